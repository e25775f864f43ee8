"""What lies in a directory of journals may come from anybody, and may be anything."""

import json
import os
import time
import zlib

import msgpack
import pytest
from click.testing import CliRunner

from lens_core.journal import process_identity as described
from lens_core.journal.format import (
    BLOCK_BYTES,
    BLOCK_HEADER,
    BLOCK_HEADER_BYTES,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    META_AT,
    RECORD_HEADER,
    SCOPE,
    SPAN,
    Kind,
    round_to_page,
)
from lens_core.journal.location import search
from lens_core.journal.read.death import death_reason
from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import find_process_files
from lens_core.journal.read.reader import parse_journal
from lens_core.journal.recover.recovery import DirectorySink, recover
from lens_core.journal.spill import SpilledSpan, SpillFile, SpillReader
from lens_tools.cli import main
from lens_tools.hang.snapshot import take_snapshot
from lens_tools.recover.sending import SendResult, send_files
from tests.telemetry.harness import receiving

NO_PROCESS = 2**22 + 1  # beyond the largest process id that Linux gives
TRACE = b"1" * 16


def identity(**changes):
    return {
        "host": described.host_name(),
        "boot_id": described.boot_id(),
        "pid_namespace": described.pid_namespace(),
        "pid": NO_PROCESS,
        "parent_pid": 1,
        "start_ticks": 1,
        "created_ns": time.time_ns(),
        "command": "",
        "cgroup_events": "",
        "oom_kills": 0,
        "attributes": {},
        **changes,
    }


def start(number, title="fine", **changes):
    fields = {
        "trace_id": TRACE,
        "span_id": number,
        "parent": 0,
        "flags": 1,
        "state": "",
        "name": title,
        "kind": 0,
        "start_ns": 1_000,
        "attributes": {},
        "links": None,
        "scope": 0,
    }
    return tuple({**fields, **changes}.values())


def stream(records, generation=7):
    content = b""
    for kind, payload in records:
        packed = payload if isinstance(payload, bytes) else msgpack.packb(payload)
        content += RECORD_HEADER.pack(kind, len(packed), zlib.crc32(packed, generation)) + packed
    return content


def journal(blocks, **changes):
    """A journal whose checksums are all right, whatever it says."""
    meta = msgpack.packb(identity(**changes))
    first = round_to_page(META_AT + len(meta))
    content = bytearray(first + BLOCK_BYTES * len(blocks))
    HEADER.pack_into(
        content, 0, MAGIC, FORMAT_VERSION, first, BLOCK_BYTES, len(blocks), len(meta),
        zlib.crc32(meta),
    )  # fmt: skip
    content[META_AT : META_AT + len(meta)] = meta
    for index, (state, records) in enumerate(blocks):
        at = first + index * BLOCK_BYTES
        BLOCK_HEADER.pack_into(content, at, state, 0, 0, 7, 0, 0, 0)
        data = stream(records)
        content[at + BLOCK_HEADER_BYTES : at + BLOCK_HEADER_BYTES + len(data)] = data
    return bytes(content)


def ids_in(directory):
    return sorted(
        int(span["spanId"], 16)
        for path in directory.glob("*.jsonl")
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    )


ODD_RECORDS = [
    *[(Kind.START, start(5, **{name: value})) for name, value in [
        ("trace_id", b"1"), ("trace_id", "1" * 16), ("span_id", -1), ("span_id", None),
        ("parent", "x"), ("flags", None), ("kind", 99), ("kind", [1]), ("start_ns", 1.5),
        ("attributes", [1]), ("links", 5), ("links", [5]), ("scope", "x"),
    ]],
    (Kind.START, 5),
    (Kind.START, b"\x81\x91\x01\x01"),  # a map whose key is a list
    (Kind.START, b"\x91" * 400),
    (Kind.START, b"\xdd\xff\xff\xff\xff"),  # a list of 4 billion
    (Kind.ATTRIBUTES, [1]),
    (Kind.ATTRIBUTES, b"\x81\x91\x01\x01"),
    (Kind.EVENT, ["n", "x", {}]),
    (Kind.EVENT, [None, 1, {}]),
    (Kind.EVENT, ["n", 1, [1]]),
    (Kind.EVENT, 3),
    (Kind.LINK, None),
    (Kind.LINK, [TRACE, 5, None, "", {}]),
    (Kind.LINK, [TRACE, 5, 1, "", [1]]),
    (Kind.NAME, 1.5),
    (Kind.NAME, {1: 2}),
    (Kind.STATUS, [7, None]),
    (Kind.STATUS, ["n", 3]),
    (Kind.STATUS, [2, 3]),
    (Kind.SCOPE + 90, b"\x81\x91\x01\x01"),
]  # fmt: skip


@pytest.mark.parametrize("record", ODD_RECORDS, ids=repr)
def test_a_record_that_is_not_of_its_form_costs_its_span_alone(record, tmp_path):
    first = [] if record[0] == Kind.START else [(Kind.START, start(5))]
    blocks = [(SPAN, [*first, record]), (SPAN, [(Kind.START, start(6))])]
    (tmp_path / "spans-a.lensj").write_bytes(journal(blocks))
    (process,) = take_snapshot([tmp_path]).processes
    assert [span.span_id for span in process.spans] == [f"{6:016x}"]
    result = recover([tmp_path], lambda meta: DirectorySink(tmp_path / "out"))
    assert ids_in(tmp_path / "out") == [6]
    assert len(result.problems) == 1
    assert (tmp_path / "spans-a.lensj.damaged").exists()


@pytest.mark.parametrize(
    "scope", [3, None, [1], [0, 5], [0, [1]], [0, ["a", None, None, [1]]]], ids=repr
)
def test_a_scope_that_is_not_of_its_form_costs_no_span(scope, tmp_path):
    blocks = [(SCOPE, [(Kind.SCOPE, scope)]), (SPAN, [(Kind.START, start(6))])]
    (tmp_path / "spans-a.lensj").write_bytes(journal(blocks))
    result = recover([tmp_path], lambda meta: DirectorySink(tmp_path / "out"))
    assert (ids_in(tmp_path / "out"), len(result.problems)) == ([6], 1)


def test_whatever_else_has_the_name_of_a_journal(tmp_path):
    os.mkfifo(tmp_path / "spans-0.lensj")
    os.mkfifo(tmp_path / "spans-1.000000.spill")
    (tmp_path / "spans-2.lensj").mkdir()
    (tmp_path / "spans-3.lensj").symlink_to("/dev/zero")
    (tmp_path / "spans-4.lensj").symlink_to("nowhere")
    (tmp_path / "spans-5.lensj").symlink_to("spans-5.lensj")
    (tmp_path / "spans-6.lensj").write_bytes(b"")
    (tmp_path / "spans-7.lensj").write_bytes(journal([(SPAN, [(Kind.START, start(6))])]))
    os.mkfifo(tmp_path / "spans-7.stacks")
    (process,) = take_snapshot([tmp_path]).processes
    assert process.source.name == "spans-7.lensj"
    assert CliRunner().invoke(main, ["stacks", str(tmp_path)]).exit_code == 2
    result = recover([tmp_path], lambda meta: DirectorySink(tmp_path / "out"))
    assert "spans-7" in result.processes
    assert ids_in(tmp_path / "out") == [6]


def test_a_process_that_somebody_else_recovers_meanwhile(tmp_path):
    for number in (1, 2):
        content = journal([(SPAN, [(Kind.START, start(number))])])
        (tmp_path / f"spans-{number}.lensj").write_bytes(content)

    class SlowSink(DirectorySink):
        def deliver(self, name, spans):
            if not nested:
                nested.append(recover([tmp_path], lambda meta: DirectorySink(self.directory)))
            super().deliver(name, spans)

    nested = []
    result = recover([tmp_path], lambda meta: SlowSink(tmp_path / "out"))
    assert ids_in(tmp_path / "out") == [1, 2]
    assert result.problems == nested[0].problems == []
    assert (list(result.processes), list(nested[0].processes)) == (["spans-1"], ["spans-2"])
    assert nested[0].busy == ["spans-1"]


@pytest.mark.parametrize("left", ["journal", "spill"])
def test_killed_while_it_deletes_what_it_has_delivered(left, tmp_path):
    table, stem = tmp_path / "spans-a.lensj", tmp_path / "spans-a"
    table.write_bytes(journal([(SPAN, [(Kind.START, start(1))])]))
    spill = SpillFile(stem, identity(), {})
    spill.write([SpilledSpan(2, 7, 2_000, stream([(Kind.START, start(2))]))])
    spill.close(delete=False)
    (path,) = tmp_path.glob("*.spill")
    kept = table if left == "journal" else path
    content = kept.read_bytes()
    assert recover([tmp_path], lambda meta: DirectorySink(tmp_path / "out")).problems == []
    assert ids_in(tmp_path / "out") == [1, 2]
    kept.write_bytes(content)
    assert recover([tmp_path], lambda meta: DirectorySink(tmp_path / "out")).problems == []
    assert ids_in(tmp_path / "out") == [1, 2]
    assert not kept.exists()


def test_a_length_that_is_damaged_does_not_ask_for_the_memory(tmp_path):
    spill = SpillFile(tmp_path / "spans-a", identity(), {})
    spill.write([SpilledSpan(2, 7, 2_000, stream([(Kind.START, start(2))]))])
    spill.close(delete=False)
    (path,) = tmp_path.glob("*.spill")
    with path.open("ab") as file:
        file.write(b"\xff" * 9)
    reader = SpillReader(path)
    assert [span.span_id for span in reader.read()] == [2]
    assert "unfinished" in reader.problem


def test_a_world_size_that_is_none_is_not_counted_to(tmp_path):
    attributes = {"nv.dl.rank": 0, "nv.dl.world_size": 2**62}
    wait = start(6, attributes={"lens.op": "all_reduce"})
    content = journal([(SPAN, [(Kind.START, wait)])], attributes=attributes)
    (tmp_path / "spans-a.lensj").write_bytes(content)
    assert take_snapshot([tmp_path]).world_size is None
    assert CliRunner().invoke(main, ["hang", str(tmp_path)]).exit_code in (0, 1)


@pytest.mark.parametrize("name", ["[/red]", "[bold]x", "\x1b[2J", "\ud800", "a\rb"], ids=repr)
def test_a_name_is_shown_as_it_is_and_moves_no_cursor(name, tmp_path):
    packed = msgpack.packb(start(6, name), unicode_errors="surrogatepass")
    content = journal([(SPAN, [(Kind.START, packed)])], attributes={"nv.dl.rank": 0})
    (tmp_path / "spans-a.lensj").write_bytes(content)
    result = CliRunner().invoke(main, ["hang", str(tmp_path)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    shown = "".join(sign if sign.isprintable() else "?" for sign in name)
    assert shown in result.output
    assert "\x1b" not in result.output


def test_many_ranks_without_a_journal_are_counted(tmp_path):
    attributes = {"nv.dl.rank": 0, "nv.dl.world_size": 1000}
    content = journal([(SPAN, [(Kind.START, start(6))])], attributes=attributes)
    (tmp_path / "spans-a.lensj").write_bytes(content)
    output = CliRunner().invoke(main, ["hang", str(tmp_path)]).output
    assert "no open spans of rank 1, 2," in output
    assert "15, 16, and 983 more are here" in output


def test_the_memory_of_another_host_says_nothing_about_a_copy(tmp_path):
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 3\n")
    for boot_id, reason in ((described.boot_id(), "oom"), ("another", "unknown")):
        content = journal(
            [(SPAN, [(Kind.START, start(6))])], boot_id=boot_id, cgroup_events=str(counter)
        )
        image = parse_journal(tmp_path / "a", content)
        assert death_reason(image, Liveness.DEAD, stacks=tmp_path / "none") == reason


def test_a_directory_that_cannot_be_read_is_said(tmp_path, monkeypatch):
    missing = tmp_path / "gone"
    assert take_snapshot([missing]).problems == [f"{missing}: No such file or directory"]
    assert find_process_files(tmp_path) == []


@pytest.mark.parametrize("run", ["", "x" * 300, "x" * 5000, "\ud800", "a\nb"], ids=repr)
@pytest.mark.parametrize("command", ["hang", "recover", "stacks"])
def test_what_names_no_run_is_said(command, run, tmp_path, monkeypatch):
    (tmp_path / "spans-a.lensj").write_bytes(journal([(SPAN, [(Kind.START, start(6))])]))
    monkeypatch.chdir(tmp_path)  # an empty name does not mean what lies here
    result = CliRunner().invoke(main, [command, run])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert (tmp_path / "spans-a.lensj").exists()


def test_a_run_whose_directory_is_not_there_yet(tmp_path, monkeypatch):
    journals = tmp_path / "journals" / "run-7"
    journals.mkdir(parents=True)
    (journals / "spans-a.lensj").write_bytes(journal([(SPAN, [(Kind.START, start(6))])]))
    monkeypatch.setenv("NEMO_LENS_JOURNAL_DIR", str(tmp_path / "journals"))
    for run in ("run-7", str(tmp_path / "runs" / "run-7"), str(tmp_path / "runs" / "run-7") + "/"):
        assert search(run).directories == [journals]
    assert search(str(tmp_path / "runs" / "run-8")).directories == []


ODD_LINES = [
    "5", "null", "[]", "x", "[" * 100_000, '{"resourceSpans": null}', '{"resourceSpans": [5]}',
    '{"resourceSpans": {"a": 1}}', '{"resourceSpans": [{"scopeSpans": 5}]}',
    '{"resourceSpans": [{"scopeSpans": [{"spans": [3]}]}]}',
    '{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}',
]  # fmt: skip


@pytest.mark.parametrize("line", ODD_LINES, ids=lambda line: line[:60])
def test_a_line_that_is_not_of_its_form_does_not_stop_the_others(line, tmp_path):
    span = {"traceId": "1" * 32, "spanId": "2" * 16, "name": "x"}
    good = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    (tmp_path / "spans-h-1-2.jsonl").write_text(f"{line}\n{good}\n")
    with receiving() as receiver:
        result = SendResult()
        send_files(tmp_path, receiver.endpoint, result)
    assert (result.sent, len(result.problems)) == (1, 1)
    assert "spans-h-1-2.jsonl:1: " in result.problems[0]


@pytest.mark.parametrize("endpoint", ["", "collector", "ftp://x", "http://[::1", "http://a:x"])
@pytest.mark.parametrize("command", ["ship", "recover", "agent"])
def test_an_endpoint_that_is_none_is_refused_at_once(command, endpoint, tmp_path):
    (tmp_path / "spans-a.lensj").write_bytes(journal([(SPAN, [(Kind.START, start(6))])]))
    result = CliRunner().invoke(main, [command, str(tmp_path), "--otlp", endpoint])
    assert (result.exit_code, "is no URL" in result.output) == (2, True)
    assert (tmp_path / "spans-a.lensj").exists()


@pytest.mark.parametrize("lives", [False, True])
def test_what_was_spilled_outlives_a_journal_that_is_torn(lives, tmp_path):
    own = described.describe_process().to_mapping()
    spill = SpillFile(tmp_path / "spans-a", own if lives else identity(), {})
    spill.write([SpilledSpan(2, 7, 2_000, stream([(Kind.START, start(2))]))])
    spill.close(delete=False)
    (tmp_path / "spans-a.lensj").write_bytes(b"")
    result = recover([tmp_path], lambda meta: DirectorySink(tmp_path / "out"))
    assert ids_in(tmp_path / "out") == ([] if lives else [2])
    assert (len(result.alive), len(result.problems)) == ((1, 0) if lives else (0, 1))
    assert (tmp_path / "spans-a.lensj.damaged").exists() is not lives
