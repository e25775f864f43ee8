"""Deliveries: bounded, retried, spilled, counted; and the files they spill to."""

import base64
import json
import os
import random
import threading
import time

import pytest
from google.protobuf import json_format
from opentelemetry import context as otel_context
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk._logs import LoggerProvider, LogRecordProcessor, ReadableLogRecord
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from lens_core import create_linked_span
from lens_core.otlp.json_logs import encode_logs
from lens_core.otlp.json_metrics import encode_metrics
from lens_core.otlp.json_spans import encode_spans, to_line
from lens_core.otlp.protobuf import logs_request, metrics_request, spans_request
from lens_core.telemetry.export.files import LineFile, run_directory
from lens_core.telemetry.pipeline.delivery import Delivery, DeliverySettings
from lens_core.telemetry.pipeline.export_result import ExportResult, Outcome
from tests.telemetry.harness import environment, file_spans, receiving, run, unused_endpoint


class Sink:
    """Answers as told; keeps what it took."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.got = []
        self.attempts = 0
        self.gate = threading.Event()
        self.gate.set()

    def send(self, batch, timeout_s):
        self.gate.wait(30)
        self.attempts += 1
        answer = self.answers.pop(0) if self.answers else Outcome.SENT
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Outcome):
            answer = ExportResult(answer)
        if answer.outcome is Outcome.SENT:
            self.got += batch
        return answer

    def close(self):
        pass


def delivery(sink, spilled, **settings):
    values = {"delay_s": 0.05, "max_batch": 10, "max_queue": 100} | settings
    return Delivery("test", sink, spilled.extend, DeliverySettings(**values))


def stop(it, timeout_s=5.0):
    it.hurry(timeout_s)
    complete = it.settle()
    it.close()
    return complete


def test_everything_is_sent_in_order():
    sink, spilled = Sink(), []
    it = delivery(sink, spilled)
    for item in range(95):
        it.put(item)
    assert stop(it)
    assert sink.got == list(range(95))
    assert (it.counts.sent, spilled) == (95, [])


def test_a_failure_is_retried():
    sink, spilled = Sink(Outcome.RETRY, Outcome.RETRY), []
    it = delivery(sink, spilled, retry_for_s=20)
    it.put(1)
    assert it.flush(15)
    assert (sink.got, sink.attempts, spilled) == ([1], 3, [])
    assert it.counts.failed_attempts == 2
    stop(it)


@pytest.mark.parametrize("answer", [Outcome.REFUSED, RuntimeError("broken exporter")])
def test_what_cannot_be_sent_is_spilled(answer):
    sink, spilled = Sink(answer), []
    it = delivery(sink, spilled)
    it.put(1)
    assert it.flush(10)
    it.put(2)
    stop(it)
    assert (spilled, sink.got, it.counts.spilled) == ([1], [2], 1)


def test_patience_ends_and_a_rest_follows():
    sink, spilled = Sink(*[Outcome.RETRY] * 100), []
    it = delivery(sink, spilled, retry_for_s=0.1, rest_s=60)
    it.put(1)
    it.flush(10)
    attempts = sink.attempts
    it.put(2)
    it.flush(10)
    assert (spilled, sink.attempts) == ([1, 2], attempts), "not tried while resting"
    stop(it)


def test_a_receiver_that_is_slower_than_training_does_not_lose_spans():
    sink, spilled = Sink(), []
    sink.gate.clear()
    it = delivery(sink, spilled, max_queue=40, max_batch=5)
    for item in range(400):
        it.put(item)
        time.sleep(0.002)
    assert it.counts.dropped == 0
    assert len(spilled) > 300
    sink.gate.set()
    assert stop(it)
    assert sorted(sink.got + spilled) == list(range(400))


def test_overflow_is_counted():
    """A burst that neither the sender nor the spill file can keep up with."""
    sink, room = Sink(), threading.Event()
    sink.gate.clear()
    spilled = []

    def slow_disk(batch):
        room.wait(30)
        spilled.extend(batch)

    settings = DeliverySettings(delay_s=0.05, max_batch=5, max_queue=20)
    it = Delivery("test", sink, slow_disk, settings)
    for item in range(60):
        it.put(item)
        time.sleep(0.001)
    dropped = it.counts.dropped
    assert dropped >= 20
    sink.gate.set()
    room.set()
    assert not stop(it), "says that something is missing"
    assert len(sink.got) + len(spilled) + dropped == 60


def test_deadline_with_a_sink_that_hangs():
    sink, spilled = Sink(), []
    sink.gate.clear()
    it = delivery(sink, spilled)
    for item in range(25):
        it.put(item)
    start_s = time.monotonic()
    assert stop(it, 1.0)
    assert time.monotonic() - start_s < 1.5
    assert sorted(spilled) == list(range(25))
    sink.gate.set()


def test_nothing_is_lost_from_many_threads():
    sink, spilled = Sink(*[Outcome.REFUSED] * 3), []
    it = delivery(sink, spilled, max_queue=100_000)

    def produce(base):
        for item in range(1_000):
            it.put(base + item)

    threads = [threading.Thread(target=produce, args=(base,)) for base in range(0, 8_000, 1_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop(it)
    assert sorted(sink.got + spilled) == list(range(8_000))


def test_lost_is_said():
    def no_disk(batch):
        raise OSError("no space left")

    it = Delivery("test", Sink(Outcome.REFUSED), no_disk, DeliverySettings(delay_s=0.01))
    it.put(1)
    assert not stop(it)
    assert it.counts.lost == 1


def test_the_global_random_stream_is_not_used():
    state = random.getstate()
    it = delivery(Sink(Outcome.RETRY), [], retry_for_s=5)
    it.put(1)
    it.flush(5)
    stop(it)
    assert random.getstate() == state


def test_batches_while_the_receiver_is_away_are_kept(tmp_path):
    code = """
        for index in range(30):
            with tracer.start_as_current_span(f"s-{index}"):
                pass
            time.sleep(0.02)
        handle.shutdown(timeout_s=2)
        print(sum(handle.counts()[f"spans.{name}"] for name in ("sent", "spilled")))
    """
    env = environment(tmp_path, unused_endpoint(), OTEL_BSP_SCHEDULE_DELAY=50)
    returned, out, err = run(code, env)
    assert (returned, out.strip()) == (0, "30"), err
    names = [span["name"] for span, _ in file_spans(tmp_path, "spill-*.jsonl")]
    assert sorted(names) == sorted(f"s-{index}" for index in range(30))


@pytest.mark.parametrize("status", [400, 503])
def test_a_receiver_that_refuses(status, tmp_path):
    with receiving() as receiver:
        receiver.status = status
        returned, _, err = run(
            "work(); handle.shutdown(timeout_s=2)", environment(tmp_path, receiver.endpoint)
        )
        assert returned == 0
        assert str(status) in err
        assert len(file_spans(tmp_path, "spill-*.jsonl")) == 40


def test_files_of_a_run(tmp_path):
    assert run_directory(tmp_path, "a/b c").parent == tmp_path
    assert run_directory(tmp_path, "../up").parent == tmp_path
    assert run_directory(tmp_path, "..").parent == tmp_path
    file = LineFile(tmp_path / "run")
    assert file.path is None
    assert not (tmp_path / "run").exists(), "nothing is made before the first line"
    file.write({"a": "é\ud800"})
    assert file.path is not None
    assert json.loads(file.path.read_text()) == {"a": "é?"}
    assert str(os.getpid()) in file.path.name
    assert file.path.stat().st_mode & 0o777 == 0o600
    first = file.path
    file.close()
    file.write({"b": 1})
    assert file.path != first


def some_spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"r": 1, "list": ["a", "b"]}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("scope", "1.0", attributes={"s": True})
    carrier = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "a=b"}
    with tracer.start_as_current_span("outer", attributes={"i": -3, "f": 0.5, "b": True}) as outer:
        outer.add_event("event", {"e": "x"}, timestamp=5)
        outer.set_status(StatusCode.ERROR, "bad")
        create_linked_span(
            tracer, "inner", remote_carrier=carrier, link_attributes={"lens.peer.rank": 2}, l=[1, 2]
        ).end()
    return exporter.get_finished_spans()


def test_json_says_what_protobuf_says():
    """The same message as the protobuf encoding, field by field, also after a round trip."""
    spans = some_spans()
    ours = json.loads(to_line(encode_spans(spans)))
    expected = plain(ExportTraceServiceRequest.FromString(spans_request(spans)))

    assert ours == expected
    assert ours["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["links"][0]["flags"] == 0x301


def test_json_numbers_that_json_lacks():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    attributes = {"nan": float("nan"), "inf": float("inf"), "big": 2**63, "small": -(2**63)}
    provider.get_tracer("t").start_span("x", attributes=attributes).end()
    line = json.loads(to_line(encode_spans(exporter.get_finished_spans())))
    found = line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"]
    assert {pair["key"]: pair["value"] for pair in found} == {
        "nan": {"doubleValue": "NaN"},
        "inf": {"doubleValue": "Infinity"},
        "big": {"stringValue": str(2**63)},
        "small": {"intValue": str(-(2**63))},
    }


_IDS = ("traceId", "spanId", "parentSpanId")


def plain(message):
    """A protobuf message as OTLP JSON has it: ids in hex where protobuf's JSON has base64."""
    text = json_format.MessageToDict(message, use_integers_for_enums=True)

    def convert(value):
        if isinstance(value, dict):
            return {
                key: base64.b64decode(item).hex() if key in _IDS else convert(item)
                for key, item in value.items()
            }
        return [convert(item) for item in value] if isinstance(value, list) else value

    return convert(text)


@pytest.mark.parametrize("exponential", [False, True])
def test_json_of_metrics_says_what_protobuf_says(exponential):
    reader = InMemoryMetricReader(
        preferred_aggregation={Histogram: ExponentialBucketHistogramAggregation()}
        if exponential
        else {}
    )
    provider = MeterProvider([reader], Resource({"r": 1}), shutdown_on_exit=False)
    meter = provider.get_meter("scope", "2.0")
    meter.create_counter("count", "{x}", "Counts").add(3, {"k": "v"})
    meter.create_counter("float").add(1.5)
    meter.create_gauge("level", "s").set(0.25)
    meter.create_histogram("time", "s").record(0.5)
    data = reader.get_metrics_data()
    ours = json.loads(to_line(encode_metrics([data])))
    assert ours == plain(ExportMetricsServiceRequest.FromString(metrics_request([data])))


def test_json_of_logs_says_what_protobuf_says():
    records = []

    class Keep(LogRecordProcessor):
        def on_emit(self, log_record):
            records.append(
                ReadableLogRecord(
                    log_record.log_record,
                    log_record.resource,
                    log_record.instrumentation_scope,
                    log_record.limits,
                )
            )

        def shutdown(self):
            pass

        def force_flush(self, timeout_millis=0):
            return True

    provider = LoggerProvider(Resource({"r": 1}), shutdown_on_exit=False)
    provider.add_log_record_processor(Keep())
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("t")
    with tracer.start_as_current_span("x"):
        provider.get_logger("app").emit(
            LogRecord(
                timestamp=1,
                observed_timestamp=2,
                context=otel_context.get_current(),
                severity_number=SeverityNumber.WARN,
                severity_text="WARN",
                body="text",
                attributes={"a": 1, "l": ["x", "y"]},
            )
        )
    ours = json.loads(to_line(encode_logs(records)))
    assert ours == plain(ExportLogsServiceRequest.FromString(logs_request(records)))


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json"])
def test_what_a_receiver_rejects_of_a_batch_is_said(protocol, tmp_path):
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = 7
    answer.partial_success.error_message = "too old"
    with receiving() as receiver:
        if protocol == "http/json":
            body = json_format.MessageToJson(answer).encode()
            receiver.answer = ("application/json", body)
        else:
            receiver.answer = ("application/x-protobuf", answer.SerializeToString())
        env = environment(tmp_path, receiver.endpoint, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
        returned, _, err = run("work()", env)
        assert returned == 0
        assert "rejected 7 records: too old" in err


@pytest.mark.parametrize("name", [3, None, "a\udcff", b"bytes"], ids=repr)
@pytest.mark.parametrize("exporter", ["otlp", "file"])
def test_one_name_that_is_no_text_does_not_cost_the_batch(name, exporter, tmp_path):
    code = f"""
        work(2)
        with tracer.start_as_current_span({name!r}) as span:
            span.add_event("event \\udcff")
            span.set_attribute("huge", 10**6000)
            span.set_status(__import__("opentelemetry.trace").trace.StatusCode.ERROR, "x\\udcff")
        work(2, "after")
        assert handle.shutdown(), handle.counts()
    """
    with receiving() as receiver:
        env = environment(tmp_path, receiver.endpoint, NEMO_LENS_EXPORTER=exporter)
        returned, _, err = run(code, env)
        assert returned == 0, err
        found = receiver.spans() if exporter == "otlp" else file_spans(tmp_path)
        assert len(found) == 5
        assert not file_spans(tmp_path, "spill-*.jsonl")


def test_one_record_that_no_file_can_hold_does_not_take_the_others_with_it():
    kept = []

    def spill(batch):
        if 3 in batch:
            raise ValueError("cannot be encoded")
        kept.extend(batch)

    class Refusing:
        def send(self, batch, timeout_s):
            return ExportResult(Outcome.REFUSED)

        def close(self):
            pass

    delivery = Delivery("things", Refusing(), spill, DeliverySettings())
    for item in range(6):
        delivery.put(item)
    assert delivery.flush(5)
    delivery.close()
    assert sorted(kept) == [0, 1, 2, 4, 5]
    assert (delivery.counts.spilled, delivery.counts.lost) == (5, 1)


def test_a_directory_that_is_removed_is_made_again(tmp_path):
    file = LineFile(tmp_path / "run")
    file.write({"line": 1})
    first = file.path
    first.unlink()
    first.parent.rmdir()
    file.write({"line": 2})
    file.write({"line": 3})
    assert file.path != first
    assert file.path.read_text().splitlines() == ['{"line":2}', '{"line":3}']


def test_a_run_id_too_long_for_a_file_name(tmp_path):
    names = {run_directory(tmp_path, "r" * 5000 + end).name for end in "ab"}
    assert len(names) == 2
    assert all(len(name) == 200 for name in names)
    LineFile(run_directory(tmp_path, "\U0001f600" * 5000)).write({})
    assert run_directory(tmp_path, "short").name == "short"
