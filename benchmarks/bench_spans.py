"""The cost of a span primitive whose group is off, and of one whose group is on."""

from __future__ import annotations

import gc
from contextlib import contextmanager

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.ratios import Report, interleave
from lens_core import NemoLensConfig, managed_span, setup_telemetry, trace_fn
from lens_core.spans.switch import span_groups

CALLS = 20_000
SPANS = 200


class _Nowhere(SpanExporter):
    def export(self, spans):
        return SpanExportResult.SUCCESS

    def shutdown(self):
        pass


class _Nothing:
    __slots__ = ()

    def __enter__(self):
        return None

    def __exit__(self, *exc):
        return None


NOTHING = _Nothing()


def run(report: Report) -> None:
    _off(report)
    _off_function(report)
    _on(report)


def _off(report: Report) -> None:
    def shared():
        for _ in range(CALLS):
            with NOTHING:
                pass

    def off():
        for _ in range(CALLS):
            with managed_span("communication", "x"):
                pass

    def off_with_attributes():
        for _ in range(CALLS):
            with managed_span("communication", "x", iteration=1):
                pass

    @contextmanager
    def no_op(name, **attributes):
        yield None

    def generator():
        for _ in range(CALLS):
            with no_op("x"):
                pass

    names = {
        "with on a shared do-nothing object": shared,
        "managed_span, group off": off,
        "managed_span, group off, one attribute": off_with_attributes,
        "@contextmanager no-op": generator,
    }
    samples = interleave(names, rounds=40, before_each=gc.collect)
    report.title(f"managed_span with its group off ({CALLS:,} blocks a sample)")
    report.table(
        samples, "with on a shared do-nothing object", bounds={"managed_span, group off": 2.0}
    )
    report.table(samples, "@contextmanager no-op", bounds={"managed_span, group off": 0.25})


def _off_function(report: Report) -> None:
    enabled = frozenset({"step"})

    def bare():
        return None

    traced = trace_fn("communication", "x")(bare)

    def call_and_lookup():
        for _ in range(CALLS):
            if "communication" not in enabled:
                bare()

    def call_traced():
        for _ in range(CALLS):
            traced()

    samples = interleave(
        {"bare call plus a set lookup": call_and_lookup, "trace_fn, group off": call_traced},
        rounds=40,
        before_each=gc.collect,
    )
    report.title(f"trace_fn with its group off ({CALLS:,} calls a sample)")
    report.table(samples, "bare call plus a set lookup", bounds={"trace_fn, group off": 3.0})


def _on(report: Report) -> None:
    """The whole of ours against the SDK's own provider, batch processor and span."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(_Nowhere(), max_queue_size=100_000, schedule_delay_millis=50)
    )
    sdk_tracer = provider.get_tracer("bench")
    handle = setup_telemetry(
        NemoLensConfig(
            enabled=True,
            run_id="bench",
            span_groups="step",
            metrics_enabled=False,
            journal="off",
        ),
        span_exporter=_Nowhere(),
    )
    traced = trace_fn("step", "train.step")(lambda: None)

    def sdk():
        for step in range(SPANS):
            sdk_tracer.start_span(
                "train.step", attributes={"iteration": step, "phase": "forward"}
            ).end()

    def sdk_current():
        for step in range(SPANS):
            with sdk_tracer.start_as_current_span(
                "train.step", attributes={"iteration": step, "phase": "forward"}
            ):
                pass

    def ours():
        for step in range(SPANS):
            with managed_span("step", "train.step", iteration=step, phase="forward"):
                pass

    def sdk_bare():
        for _ in range(SPANS):
            sdk_tracer.start_span("train.step").end()

    def ours_function():
        for _ in range(SPANS):
            traced()

    def settle():
        provider.force_flush()
        gc.collect()

    try:
        assert "step" in span_groups.enabled
        names = {
            "SDK start_span and end": sdk,
            "SDK start_as_current_span": sdk_current,
            "managed_span, group on": ours,
        }
        samples = interleave(names, rounds=150, before_each=settle)
        report.title(f"managed_span with its group on ({SPANS} spans a sample, 2 attributes)")
        report.table(samples, "SDK start_span and end", bounds={"managed_span, group on": 1.3})
        names = {"SDK start_span and end": sdk_bare, "trace_fn, group on": ours_function}
        samples = interleave(names, rounds=150, before_each=settle)
        report.title(f"trace_fn with its group on ({SPANS} calls a sample, no attributes)")
        report.table(samples, "SDK start_span and end", bounds={"trace_fn, group on": 1.3})
    finally:
        handle.shutdown()
        provider.shutdown()
