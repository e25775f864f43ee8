import base64
import copy
import gzip
import json
import os
import random

import pyarrow as pa
import pytest

from lens_core.errors import LensError
from lens_tools import read_run
from lens_tools.records import RunError
from lens_tools.runs import SPANS
from lens_tools.runs.kinds import kind_and_phase
from lens_tools.runs.otlp_files import messages

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


MUTATIONS = int(os.environ.get("LENS_TEST_MUTATIONS", "300"))


def value(item):
    kinds = {bool: "boolValue", int: "intValue", str: "stringValue"}
    return {kinds[type(item)]: str(item) if type(item) is int else item}


def pairs(attributes):
    return [{"key": key, "value": value(item)} for key, item in attributes.items()]


def span(number, **more):
    attributes = pairs(more.pop("attributes", {}))
    return {
        "traceId": TRACE,
        "spanId": f"{number:016x}",
        "name": "pp.forward",
        "startTimeUnixNano": str(1_000_000 * number),
        "endTimeUnixNano": str(1_000_000 * number + 500),
        "attributes": attributes,
        **more,
    }


def message(*spans, rank=0, run="r", **resource):
    process = pairs({"nemo.run.id": run, "nv.dl.rank": rank, "host.name": "h", **resource})
    group = {"resource": {"attributes": process}, "scopeSpans": [{"spans": list(spans)}]}
    return {"resourceSpans": [group]}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_column_is_filled_from_what_was_recorded(tmp_path):
    step = span(1, name="train.step", attributes={"dl.iteration": 7, "lens.step.own_ns.forward": 5})
    attributes = {
        "dl.microbatch_id": 2,
        "lens.chunk": 1,
        "lens.hop.id": "a hop",
        "lens.peer.rank": 4,
        "lens.batch.id": "b",
        "lens.stage": 9,
    }
    link = {"traceId": TRACE, "spanId": f"{1:016x}"}
    recv = span(
        2, name="pp.recv_forward", parentSpanId=f"{1:016x}", links=[link], attributes=attributes
    )
    reduce = span(3, name="x", attributes={"lens.op": "all_reduce", "lens.group": "g"})
    reduce["attributes"] += pairs({"lens.sequence": 11, "nemo.span.truncated": True})
    more = {
        "process.pid": 17,
        "dl.pipeline_parallel.rank": 1,
        "dl.data_parallel.rank": 2,
        "dl.tensor_parallel.rank": 3,
        "nemo.run.attempt": 1,
    }
    write(tmp_path / "t.jsonl", message(step, recv, reduce, rank=5, **more))
    run = read_run(tmp_path)
    assert run.spans.schema.equals(SPANS)
    first, second, third = run.spans.to_pylist()
    ids = bytes.fromhex(TRACE)
    assert second == {
        "run": "r",
        "attempt": 1,
        "trace": ids,
        "span": (2).to_bytes(8, "big"),
        "parent": (1).to_bytes(8, "big"),
        "name": "pp.recv_forward",
        "phase": "forward",
        "start_ns": 2_000_000,
        "end_ns": 2_000_500,
        "rank": 5,
        "host": "h",
        "pid": 17,
        "dp": 2,
        "stage": 9,
        "tp": 3,
        "step": 7,
        "microbatch": 2,
        "chunk": 1,
        "kind": "recv",
        "group_id": None,
        "seq_in_group": None,
        "hop_id": "a hop",
        "peer_rank": 4,
        "links": [ids + (1).to_bytes(8, "big")],
        "batch_id": "b",
        "truncated": False,
    }
    assert (first["parent"], first["stage"], first["kind"]) == (None, 1, "other")
    assert [third[n] for n in ("kind", "phase", "group_id", "seq_in_group", "truncated")] == [
        "collective",
        "all_reduce",
        "g",
        11,
        True,
    ]
    assert run.step_times.to_pylist() == [
        {
            "run": "r",
            "attempt": 1,
            "rank": 5,
            "step": 7,
            "phase": "forward",
            "own_ns": 5,
            "queued_ns": 0,
        }
    ]
    assert "<Run r: 3 spans, 1 ranks" in repr(run)
    assert "<th>spans</th><td>3</td>" in run._repr_html_()


@pytest.mark.parametrize(
    ("name", "kind", "phase"),
    [
        ("pp.forward", "compute", "forward"),
        ("send_forward", "send", "forward"),
        ("send_backward_recv_forward", "recv", "forward"),
        ("DataLoader.next", "compute", "data"),
        ("optimizer.step", "compute", "optimizer"),
        ("checkpoint.save", "compute", "checkpoint"),
        ("step", "other", "step"),
        ("evaluate", "other", "other"),
    ],
)
def test_a_name_says_kind_and_phase(name, kind, phase):
    assert kind_and_phase(name, None, None) == (kind, phase)


def framed(*bodies):
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


def in_base64(found):
    found = copy.deepcopy(found)
    for group in found["resourceSpans"]:
        for one in group["scopeSpans"][0]["spans"]:
            for name in ("traceId", "spanId"):
                one[name] = base64.b64encode(bytes.fromhex(one[name])).decode()
    return found


def zstd(raw):
    target = pa.BufferOutputStream()
    with pa.CompressedOutputStream(target, "zstd") as stream:
        stream.write(raw)
    return target.getvalue().to_pybytes()


def as_protobuf(found):
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    return ParseDict(in_base64(found), TracesData()).SerializeToString()


ONE, TWO = message(span(1), span(2)), message(span(3), rank=1)
LINES = "".join(json.dumps(line) + "\n" for line in (ONE, TWO)).encode()
FORMS = {
    "lines": LINES,
    "lines in gzip": gzip.compress(LINES),
    "lines in gzip of two members": gzip.compress(LINES[:500]) + gzip.compress(LINES[500:]),
    "lines in zstd": zstd(LINES),
    "ids in base64": "".join(json.dumps(in_base64(m)) + "\n" for m in (ONE, TWO)).encode(),
    "framed protobuf": framed(as_protobuf(ONE), as_protobuf(TWO)),
    "framed protobuf in zstd each": framed(zstd(as_protobuf(ONE)), zstd(as_protobuf(TWO))),
    "framed JSON in zstd each": framed(*(zstd(json.dumps(m).encode()) for m in (ONE, TWO))),
    "framed protobuf in gzip": gzip.compress(framed(as_protobuf(ONE), as_protobuf(TWO))),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_read_by_what_is_in_it(tmp_path, form):
    (tmp_path / "telemetry").write_bytes(FORMS[form])
    run = read_run(tmp_path / "telemetry")
    assert [s["span"][-1] for s in run.spans.to_pylist()] == [1, 2, 3]
    assert run.ranks == [0, 1]
    assert run.reading.problems == []


DAMAGES = {
    "half a line": (LINES[:-20], "half a line at the end"),
    "a line of something else": (LINES + b"[1]\n", "no OTLP message"),
    "a torn line between": (LINES[:40] + b"\n" + LINES, "not JSON"),
    "half a gzip file": (gzip.compress(LINES * 500)[:-20], "unreadable"),
    "half a frame": (framed(as_protobuf(ONE))[:-3], "half a message"),
    "a wrong length": (framed(as_protobuf(ONE)) + b"\x7f\0\0\0abc", "length is damaged"),
    "a frame of noise": (framed(b"\xff" * 30, as_protobuf(ONE)), "no OTLP protobuf"),
    "a damaged frame in zstd": (
        framed(zstd(as_protobuf(ONE))[:-9], zstd(as_protobuf(ONE))),
        "compression",
    ),
    "nested too deeply": (b'{"a":' + b"[" * 200_000 + b"\n" + LINES, "not JSON"),
    "bad UTF-8": (b'{"a":"\xff\xfe"}\n' + LINES, "not JSON"),
}


ALL_LOST = ("half a frame",)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_and_the_rest_is_read(tmp_path, damage):
    raw, said = DAMAGES[damage]
    (tmp_path / "t.jsonl").write_bytes(raw)
    write(tmp_path / "whole.jsonl", message(span(9)))
    run = read_run(tmp_path)
    found = {s["span"][-1] for s in run.spans.to_pylist()}
    assert found >= ({9} if damage in ALL_LOST else {1, 9})
    assert said in "\n".join(run.reading.lines())


def test_damaged_spans_and_attributes_are_counted_and_the_others_kept(tmp_path):
    bad = [
        span(2, traceId="xyz"),
        span(3, spanId="0" * 16),
        span(4, startTimeUnixNano=str(2**70)),
        span(5, startTimeUnixNano="soon"),
        "no span",
        {},
    ]
    odd = span(6, name="\ud800", attributes={"dl.iteration": "many", "lens.stage": 2**40})
    backwards = span(7, endTimeUnixNano="5")
    write(tmp_path / "t.jsonl", message(span(1), *bad, odd, backwards, rank="first"))
    run = read_run(tmp_path)
    rows = run.spans.to_pylist()
    assert [r["span"][-1] for r in rows] == [1, 6, 7]
    assert [(r["rank"], r["step"], r["stage"]) for r in rows] == [(None, None, None)] * 3
    assert (rows[2]["truncated"], rows[2]["end_ns"]) == (True, rows[2]["start_ns"])
    counts = run.reading.counts
    assert counts["damaged spans"] == len(bad)
    assert counts["damaged attributes"] == 3
    assert counts["spans that end before they start"] == 1
    assert counts["spans without rank"] == counts["spans without step"] == 3


def test_each_span_counts_once_and_as_its_own_code_ended_it(tmp_path):
    mine = span(1, attributes={"nemo.span.truncated": True}, endTimeUnixNano=str(9 * 10**9))
    write(tmp_path / "a.jsonl", message(mine))
    write(tmp_path / "b.jsonl", message(span(1)), message(span(1)))
    run = read_run(tmp_path)
    (row,) = run.spans.to_pylist()
    assert (row["truncated"], row["end_ns"]) == (False, 1_000_500)
    assert run.reading.counts["repeated spans"] == 2


def test_links_to_spans_that_are_not_there_are_counted(tmp_path):
    there, gone = ({"traceId": TRACE, "spanId": f"{n:016x}"} for n in (1, 99))
    write(tmp_path / "a.jsonl", message(span(1), span(2, links=[there, gone])))
    assert read_run(tmp_path).reading.counts["links to spans that are not there"] == 1


def test_a_receive_and_the_send_that_it_links_to_are_one_hop(tmp_path):
    """The spans of a pipeline schedule: they link, and name no hop."""

    def receive(number, sender):
        link = {"traceId": TRACE, "spanId": f"{sender:016x}"}
        return span(number, name="pp.recv_forward", links=[link])

    sends = [span(number, name="pp.send_forward") for number in (1, 2, 3)]
    write(tmp_path / "0.jsonl", message(*sends, rank=4))
    # The third send is linked to twice: to which of both it went cannot be told.
    receives = [receive(11, 2), receive(12, 1), receive(13, 3), receive(14, 3), receive(15, 99)]
    write(tmp_path / "1.jsonl", message(*receives, rank=7))
    rows = {row["span"][-1]: row for row in read_run(tmp_path).spans.to_pylist()}
    hops = {number: row["hop_id"] for number, row in rows.items()}
    assert hops[1] == hops[12] == f"{TRACE}/{1:016x}"
    assert hops[2] == hops[11] == f"{TRACE}/{2:016x}"
    assert [rows[n]["peer_rank"] for n in (1, 2, 11, 12)] == [7, 7, 4, 4]
    assert [(hops[n], rows[n]["peer_rank"]) for n in (3, 13, 14, 15)] == [(None, None)] * 4


def test_of_several_runs_the_largest_is_read_or_the_one_named(tmp_path):
    write(tmp_path / "a.jsonl", message(span(1), span(2)), message(span(3), run="other"))
    run = read_run(tmp_path)
    assert (run.run_id, run.spans.num_rows) == ("r", 2)
    assert run.reading.runs == {"r": 2, "other": 1}
    assert "2 runs are here" in "\n".join(run.reading.lines())
    assert read_run(tmp_path, run_id="other").spans.num_rows == 1
    with pytest.raises(RunError, match="the runs are: other, r"):
        read_run(tmp_path, run_id="third")


def test_only_what_is_new_is_read_again(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", message(span(1)))
    write(tmp_path / "b.jsonl", message(span(5)))
    assert read_run(tmp_path).reading.cached == 0
    assert read_run(tmp_path).reading.cached == 2
    offsets = []

    def watched(path, offset=0):
        offsets.append(offset)
        return messages(path, offset)

    monkeypatch.setattr("lens_tools.runs.shards.messages", watched)
    size = path.stat().st_size
    with path.open("a") as file:
        file.write(json.dumps(message(span(2))) + "\n" + '{"resourceSp')
    run = read_run(tmp_path)
    assert offsets == [size]
    assert [s["span"][-1] for s in run.spans.to_pylist()] == [1, 2, 5]
    assert "half a line" in "\n".join(run.reading.lines())
    with path.open("a") as file:
        file.write('ans":[]}\n' + json.dumps(message(span(3))) + "\n")
    run = read_run(tmp_path)
    assert [s["span"][-1] for s in run.spans.to_pylist()] == [1, 2, 3, 5]
    assert run.reading.lines() == ["4 spans without step"]


def test_a_file_that_is_another_one_is_read_anew(tmp_path):
    write(tmp_path / "a.jsonl", message(span(1)))
    read_run(tmp_path)
    write(tmp_path / "a.jsonl", message(span(7), span(8)))
    assert [s["span"][-1] for s in read_run(tmp_path).spans.to_pylist()] == [7, 8]


def test_a_damaged_cache_is_made_again(tmp_path):
    write(tmp_path / "a.jsonl", message(span(1)))
    read_run(tmp_path)
    for file in (tmp_path / ".lens-cache").iterdir():
        file.write_bytes(b"{}" if file.suffix == ".json" else b"")
    assert read_run(tmp_path).spans.num_rows == 1
    for file in (tmp_path / ".lens-cache").glob("*.parquet"):
        file.write_bytes(b"PAR1")
    assert read_run(tmp_path).spans.num_rows == 1


def test_without_a_cache_nothing_is_left_behind(tmp_path):
    write(tmp_path / "a.jsonl", message(span(1)))
    assert read_run(tmp_path, cache=False).spans.num_rows == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_processes_read_beside_each_other_what_one_reads_alone(tmp_path, monkeypatch):
    for rank in range(3):
        spans = (span(100 * rank + n) for n in range(1, 4))
        write(tmp_path / f"{rank}.jsonl", message(*spans, rank=rank))
    alone = read_run(tmp_path, cache=False, workers=1)
    monkeypatch.setattr("lens_tools.runs.reading._SMALL_BYTES", 0)
    beside = read_run(tmp_path, workers=2)
    assert beside.reading.cached == 3
    assert beside.spans.to_pylist() == alone.spans.to_pylist()


def test_mutated_files_never_raise(tmp_path):
    rng, path = random.Random(7), tmp_path / "t.jsonl"
    seeds = list(FORMS.values())
    for _ in range(MUTATIONS):
        raw = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 8)):
            at = rng.randrange(len(raw))
            cut = rng.choice((0, 0, 1, 5))
            raw[at : at + cut] = bytes(rng.randrange(256) for _ in range(rng.choice((0, 1, 4))))
            if rng.random() < 0.1:
                del raw[rng.randrange(len(raw) + 1) :]
            raw += b"{" * (not raw)
        path.write_bytes(raw)
        try:
            run = read_run(path, cache=False)
        except LensError:
            continue
        assert run.spans.schema.equals(SPANS)
