"""Foreign code in telemetry's way: processors, exporters, providers and handlers that raise."""

import logging
import textwrap
import time

import pytest
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from lens_core import linked_span, span_cm, trace_fn
from lens_core.diagnostics import Diagnostics, describe, diagnostics
from tests.telemetry.harness import environment, file_spans, receiving, run, start, telemetry


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Panic(BaseException):
    """As the panics of extension modules are."""


class Raising(SpanProcessor):
    def __init__(self, where, error):
        self._where = where
        self._error = error

    def _maybe(self, where):
        if where == self._where:
            raise self._error

    def on_start(self, span, parent_context=None):
        self._maybe("start")

    def on_end(self, span):
        self._maybe("end")

    def shutdown(self):
        self._maybe("shutdown")

    def force_flush(self, timeout_millis=0):
        self._maybe("flush")
        return True


class Exporter(SpanExporter):
    def __init__(self, result=SpanExportResult.SUCCESS, error=None, shutdown=None):
        self.names = []
        self._result = result
        self._error = error
        self._shutdown = shutdown or (lambda: None)

    def export(self, spans):
        self.names += [span.name for span in spans]
        if self._error is not None:
            raise self._error
        return self._result

    def shutdown(self):
        self._shutdown()


@trace_fn("job")
def decorated():
    return 5


@pytest.mark.parametrize("where", ["start", "end", "shutdown", "flush"])
@pytest.mark.parametrize("error", [ValueError("x"), UnspeakableError()])
def test_a_processor_that_raises_is_not_seen_by_the_user(where, error):
    exporter = Exporter()
    with telemetry(span_exporter=exporter, span_processors=[Raising(where, error)]) as handle:
        for block in (
            span_cm("own"),
            handle.tracer.start_as_current_span("direct"),
            linked_span(handle.tracer, "linked"),
        ):
            with pytest.raises(KeyError), block:
                raise KeyError("mine")
        assert decorated() == 5
    assert sorted(exporter.names) == ["decorated", "direct", "linked", "own"]


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), UnspeakableError(), Panic(), SystemExit(3)],
    ids=lambda e: type(e).__name__,
)
def test_an_exporter_that_raises_loses_nothing(error, tmp_path):
    exporter = Exporter(error=error)
    config = {"output_dir": str(tmp_path), "metrics_enabled": False}
    with telemetry(config, span_exporter=exporter) as handle:
        for index in range(3):
            with span_cm(f"s{index}"):
                pass
        handle.shutdown()
        assert handle.counts()["spans.spilled"] == 3
    assert len(file_spans(tmp_path)) == 3


def test_an_exporter_that_forgets_to_answer_is_not_asked_again():
    exporter = Exporter(result=None)
    with telemetry(span_exporter=exporter) as handle:
        with span_cm("once"):
            pass
        assert handle.shutdown()
    assert exporter.names == ["once"]


def panic():
    raise Panic


def unspeakable():
    raise UnspeakableError


@pytest.mark.parametrize("shutdown", [unspeakable, panic, lambda: time.sleep(60)])
def test_an_exporter_that_cannot_be_shut_down(shutdown):
    with telemetry(span_exporter=Exporter(shutdown=shutdown)) as handle:
        began = time.monotonic()
        assert handle.shutdown(timeout_s=2)
        assert time.monotonic() - began < 6
    with telemetry():
        pass


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), -1.0, 1e300])
def test_any_number_is_a_deadline(timeout_s):
    with telemetry() as handle:
        handle.shutdown(timeout_s)
    with telemetry():
        pass


def test_a_deadline_that_is_no_number_leaves_telemetry_as_it_is():
    with telemetry(span_exporter=Exporter()) as handle:
        with pytest.raises(TypeError):
            handle.shutdown(None)
        assert handle.is_exporting


def test_a_logging_handler_that_raises(monkeypatch):
    class Full(logging.Handler):
        def handle(self, record):
            raise OSError("no space")

    monkeypatch.setattr(logging.getLogger("lens_core"), "handlers", [Full()])
    counted = Diagnostics()
    counted.record("disk", "full")
    assert counted.count("disk") == 1


def test_an_exception_without_a_text():
    assert describe(UnspeakableError()) == "UnspeakableError: <str() of the exception failed>"
    assert describe(ValueError("x")) == "ValueError: x"


FOREIGN = """
    from lens_core import *
    from lens_core.telemetry.config import NemoLensConfig
    from opentelemetry import trace
    class UnspeakableError(Exception):
        def __str__(self):
            raise RuntimeError("no text")
    class Span(trace.Span):
        def __getattribute__(self, name):
            if name.startswith("__"):
                return object.__getattribute__(self, name)
            def method(*args, **kwargs):
                raise UnspeakableError
            return method
    Span.__abstractmethods__ = frozenset()
    starts = True
    class Tracer(trace.Tracer):
        def start_span(self, *args, **kwargs):
            if not starts:
                raise UnspeakableError
            return Span()
        start_as_current_span = start_span
    class Provider(trace.TracerProvider):
        def get_tracer(self, *args, **kwargs):
            return Tracer()
    trace.set_tracer_provider(Provider())
    tracer = trace.get_tracer("app")
    carrier = {"traceparent": f"00-{'1' * 32}-{'1' * 16}-01"}

    @trace_fn("job")
    def function():
        return 1
    @trace_fn("job")
    def generator():
        yield 1

    for starts in (True, False):
        handle = setup_telemetry(NemoLensConfig(enabled=True, exporter="none", run_id="r"))
        for block in (
            lambda: span_cm("x"),
            lambda: managed_span("job", "x", a=1),
            lambda: linked_span(tracer, "x", remote_carrier=carrier),
        ):
            with block():
                record_training_step(1, loss=float("nan"), duration_s=1.0)
            try:
                with block():
                    raise KeyError("mine")
            except KeyError:
                pass
            else:
                raise AssertionError
        assert function() == 1
        assert list(generator()) == [1]
        create_linked_span(tracer, "x", remote_carrier=carrier)
        assert add_carrier_link(Span(), carrier).value == "ok"
        safe_set_span_attributes(Span(), {"a": 1})
        assert handle.shutdown()
"""


def test_a_provider_of_the_application_whose_every_method_raises(tmp_path):
    returned, _, err = run(
        "handle.shutdown()\n" + textwrap.dedent(FOREIGN), environment(tmp_path, NEMO_LENS_ENABLED=0)
    )
    assert returned == 0, err


@pytest.mark.parametrize("when", ["shutdown", "exit"])
def test_an_interrupt_during_the_last_wait_loses_nothing(when, tmp_path):
    """The collector does not answer, and the user does not want to wait for it."""
    code = f"""
        def interrupt():
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)
        work()
        threading.Thread(target=interrupt, daemon=True).start()
        if {when == "shutdown"}:
            try:
                handle.shutdown(timeout_s=60)
            except KeyboardInterrupt:
                setup_telemetry(NemoLensConfig(enabled=True, exporter="none")).shutdown()
    """
    with receiving() as receiver:
        receiver.hang_s = 30
        process = start(code, environment(tmp_path, receiver.endpoint))
        out, err = process.communicate(timeout=40)
    assert process.returncode == 0, err
    assert len(file_spans(tmp_path, "spill-*.jsonl")) == 40, (out, err)


def test_incidents_name_what_happened():
    before = diagnostics.count("processor.failed")
    with telemetry(span_processors=[Raising("end", ValueError("x"))]), span_cm("x"):
        pass
    assert diagnostics.count("processor.failed") == before + 1
