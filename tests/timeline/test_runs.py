import json
import re

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from lens_core.otlp.json_spans import encode_spans
from lens_core.telemetry.export.files import LineFile
from lens_tools.records.read import RunError, read_records

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def line(**span):
    span = {"traceId": TRACE, "spanId": SPAN, "name": "x", **span}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}) + "\n"


def test_what_the_sdk_recorded_is_read_back_whole(tmp_path):
    file = LineFile(tmp_path)
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"nv.dl.rank": 3}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("scope")
    attributes = {"s": "é", "i": 2**62, "b": True, "f": 0.5, "l": ["a", "b"], "n": [1, 2]}
    with tracer.start_as_current_span("parent") as parent:
        link = Link(parent.get_span_context(), {"lens.peer.rank": 1})
        span = tracer.start_span(
            "child", attributes=attributes, links=[link], kind=SpanKind.CONSUMER
        )
        span.add_event("happened", {"k": 1}, timestamp=17)
        span.set_status(Status(StatusCode.ERROR, "why"))
        span.end()
    file.write(encode_spans(exporter.get_finished_spans()))
    file.close()

    run = read_records(tmp_path)
    assert (run.problems, run.repeated, len(run.files)) == ([], 0, 1)
    parent, child = run.spans
    assert child.name == "child"
    assert dict(child.attributes) == attributes
    assert child.parent_span_id == parent.span_id
    assert child.trace_id == parent.trace_id
    assert parent.parent_span_id == ""
    assert child.kind == 5
    assert (child.status_code, child.status_message) == (2, "why")
    assert [(e.name, e.time_ns, dict(e.attributes)) for e in child.events] == [
        ("happened", 17, {"k": 1})
    ]
    assert [(k.span_id, dict(k.attributes)) for k in child.links] == [
        (parent.span_id, {"lens.peer.rank": 1})
    ]
    assert child.rank == 3
    assert child.scope == "scope"
    assert 0 < child.start_ns <= child.end_ns
    assert child.source == file.path


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("\x00\x00\x00\n", "not JSON"),
        ("[1, 2]\n", "expected an object, got list"),
        ("17\n", "expected an object, got int"),
        ('{"resourceSpans": 5}\n', "not OTLP"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "no ids"}]}]}]}\n', "traceId"),
        (line(traceId="00" * 16), "is not an id"),
        (line(spanId="zz" * 8), "is not an id"),
        (line(spanId="0x" + "1" * 14), "is not an id"),
        (line(spanId="+" + "1" * 15), "is not an id"),
        (line(spanId="1_" * 7 + "11"), "is not an id"),
        (line(spanId="\u0661" * 16), "is not an id"),
        (line(startTimeUnixNano="soon"), "invalid literal"),
        (line(attributes=[{"value": {}}]), "key"),
        ("[" * 100_000 + "\n", ""),
    ],
)
def test_a_bad_line_is_reported_and_the_rest_is_read(tmp_path, bad, problem):
    path = tmp_path / "a.jsonl"
    path.write_text(line(spanId="1" * 16) + bad + "\n" + line(spanId="2" * 16))
    run = read_records(tmp_path)
    assert [span.span_id for span in run.spans] == ["1" * 16, "2" * 16]
    (report,) = run.problems
    assert report.startswith(f"{path}:2: ")
    assert re.search(problem, report)


def test_a_line_that_a_killed_writer_left_unfinished_is_said_to_be_so(tmp_path):
    (tmp_path / "a.jsonl").write_text(line(spanId="1" * 16) + line()[:-20])
    run = read_records(tmp_path)
    assert [span.span_id for span in run.spans] == ["1" * 16]
    assert run.problems[0].endswith("(unfinished: the writer was killed)")


def test_lines_of_metrics_logs_and_blank_lines_are_no_problem(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"resourceMetrics": []}\n\n{"resourceLogs": []}\n' + line())
    run = read_records(tmp_path)
    assert (len(run.spans), run.problems) == (1, [])


def test_a_span_that_was_written_twice_counts_once_and_the_true_end_wins(tmp_path):
    truncated = [{"key": "nemo.span.truncated", "value": {"boolValue": True}}]
    (tmp_path / "a.jsonl").write_text(line(endTimeUnixNano="9", attributes=truncated))
    (tmp_path / "b.jsonl").write_text(line(endTimeUnixNano="5"))
    (tmp_path / "c.jsonl").write_text(line(endTimeUnixNano="9", attributes=truncated))
    run = read_records(tmp_path)
    (span,) = run.spans
    assert (span.end_ns, span.truncated, run.repeated) == (5, False, 2)


def test_values_of_every_kind(tmp_path):
    values = {
        "str": {"stringValue": "x"},
        "int": {"intValue": "-5"},
        "double": {"doubleValue": "NaN"},
        "bytes": {"bytesValue": "aGk="},
        "mixed": {"arrayValue": {"values": [{"intValue": 1}, {"stringValue": "a"}]}},
        "floats": {"arrayValue": {"values": [{"doubleValue": 1}]}},
        "map": {"kvlistValue": {"values": [{"key": "k", "value": {"intValue": 1}}]}},
        "none": {},
    }
    pairs = [{"key": key, "value": value} for key, value in values.items()]
    (tmp_path / "a.jsonl").write_text(line(attributes=pairs))
    (span,) = read_records(tmp_path).spans
    attributes = dict(span.attributes)
    assert attributes.pop("double") != attributes.get("double")
    assert attributes == {
        "str": "x",
        "int": -5,
        "bytes": "hi",
        "mixed": ["1", "a"],
        "floats": [1.0],
        "map": '{"k": 1}',
        "none": "",
    }


def test_a_single_file_is_a_run_too(tmp_path):
    (tmp_path / "a.jsonl").write_text(line())
    assert len(read_records(tmp_path / "a.jsonl").spans) == 1


def test_no_run_is_a_clear_error(tmp_path):
    with pytest.raises(RunError, match="there is no such directory"):
        read_records(tmp_path / "nonesuch")
    with pytest.raises(RunError, match=r"no \.jsonl file is in it"):
        read_records(tmp_path)
