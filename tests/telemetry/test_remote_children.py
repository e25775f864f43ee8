"""A span that is started the short way is the one that the SDK's tracer would have started."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, TraceState

from lens_core.sdk.remote_children import RemoteChildren
from lens_core.telemetry.ids import PrivateIdGenerator
from lens_core.telemetry.pipeline.span_pipeline import SpanPipeline
from lens_core.telemetry.sampling import LinkAware

#: The SDK's callback for its own metrics, of which there are none here.
CHANGED = {"_record_end_metrics"}
ATTRIBUTES = {"rpc.system.name": "ray", "ray.task.attempt": 0, "flag": True, "share": 0.5}


def remote(flags: int = 1, *, is_remote: bool = True, state: TraceState | None = None):
    parent = SpanContext(0xABC, 0xDEF, is_remote, TraceFlags(flags), state)
    return parent, trace.set_span_in_context(NonRecordingSpan(parent), Context())


def children_of(tracer):
    return RemoteChildren(tracer, SpanPipeline, PrivateIdGenerator)


def provider_with(**settings):
    exporter = InMemorySpanExporter()
    pipeline = SpanPipeline((), [SimpleSpanProcessor(exporter)])
    provider = TracerProvider(shutdown_on_exit=False, active_span_processor=pipeline, **settings)
    return provider.get_tracer("scope", "1"), exporter


@pytest.mark.parametrize(
    "sampler", [ALWAYS_ON, ParentBased(ALWAYS_OFF), None], ids=["on", "parent based", "none"]
)
@pytest.mark.parametrize("flags", [1, 3])
def test_it_equals_the_one_of_the_tracer(sampler, flags):
    tracer, exporter = provider_with(sampler=sampler)
    parent, context = remote(flags, state=TraceState([("vendor", "1")]))
    spans = [
        tracer.start_span("step", context, SpanKind.CONSUMER, ATTRIBUTES),
        children_of(tracer).start("step", parent, context, SpanKind.CONSUMER, dict(ATTRIBUTES)),
    ]
    for span in spans:
        span.set_attribute("later", 1)
        span.add_event("event", {"a": 1})
        span.add_link(parent)
        span.end()
    usual, quick = exporter.get_finished_spans()
    assert usual.context.span_id != quick.context.span_id
    for one in ("trace_id", "trace_flags", "trace_state", "is_remote"):
        assert getattr(usual.context, one) == getattr(quick.context, one), one
    for one in ("name", "kind", "parent", "resource", "instrumentation_scope", "status"):
        assert getattr(usual, one) == getattr(quick, one), one
    assert dict(quick.attributes) == dict(usual.attributes)
    assert [event.name for event in quick.events] == ["event"]
    assert [link.context for link in quick.links] == [parent]
    assert quick.start_time >= usual.start_time
    assert quick.dropped_attributes == quick.dropped_events == quick.dropped_links == 0
    values = [{k: type(v) for k, v in vars(span).items() if k not in CHANGED} for span in spans]
    assert values[0] == values[1]


def test_spans_share_nothing_that_changes():
    tracer, exporter = provider_with()
    parent, context = remote()
    children = children_of(tracer)
    spans = [children.start("step", parent, context, SpanKind.CONSUMER, {}) for _ in range(2)]
    spans[0].set_attribute("a", 1)
    spans[0].add_event("event")
    spans[0].add_link(parent)
    spans[0].set_status(trace.StatusCode.ERROR)
    spans[0].end()
    assert spans[1].is_recording()
    spans[1].set_attribute("b", 1)
    spans[1].end()
    second = exporter.get_finished_spans()[1]
    assert dict(second.attributes) == {"b": 1}
    assert not second.events
    assert not second.links
    assert second.status.is_unset


def test_another_parent_is_another_trace():
    tracer, exporter = provider_with()
    children = children_of(tracer)
    for trace_id in (1, 2, 1):
        parent = SpanContext(trace_id, 3, True, TraceFlags(1))
        children.start("step", parent, Context(), SpanKind.CONSUMER, {}).end()
    assert [span.context.trace_id for span in exporter.get_finished_spans()] == [1, 2, 1]


def test_attributes_of_an_ended_span_do_not_change():
    tracer, exporter = provider_with()
    parent, context = remote()
    span = children_of(tracer).start("step", parent, context, SpanKind.CONSUMER, {"a": 1})
    span.end()
    span.set_attribute("a", 2)
    assert dict(exporter.get_finished_spans()[0].attributes) == {"a": 1}


@pytest.mark.parametrize(
    ("parent", "settings"),
    [
        (remote(0), {}),
        (remote(1, is_remote=False), {}),
        (remote(), {"span_limits": SpanLimits(max_span_attributes=2)}),
    ],
    ids=["unsampled", "local", "too many attributes"],
)
def test_what_the_tracer_must_decide_is_left_to_it(parent, settings):
    tracer, _ = provider_with(**settings)
    started = children_of(tracer).start("s", *parent, SpanKind.CONSUMER, dict(ATTRIBUTES))
    assert started is None


def test_nothing_is_started_for_a_set_up_that_is_gone():
    tracer, _ = provider_with()
    children = children_of(tracer)
    tracer.span_processor.is_taking = False
    assert children.start("step", *remote(), SpanKind.CONSUMER, {}) is None


def test_an_ended_span_stays_as_it_is(caplog):
    tracer, exporter = provider_with()
    span = children_of(tracer).start("step", *remote(), SpanKind.CONSUMER, {})
    span.end(span.start_time + 5)
    span.end()
    span.add_event("late")
    span.add_link(remote()[0])
    (ended,) = exporter.get_finished_spans()
    assert ended.end_time == ended.start_time + 5
    assert not ended.events
    assert not ended.links
    assert "ended span" in caplog.text


def test_ids_come_from_the_private_generator():
    tracer, _ = provider_with(id_generator=PrivateIdGenerator())
    children = children_of(tracer)
    spans = [children.start("step", *remote(), SpanKind.CONSUMER, {}) for _ in range(100)]
    assert len({span.context.span_id for span in spans}) == 100


def test_another_sampler_that_is_set_later_is_asked():
    tracer, _ = provider_with()
    children = children_of(tracer)
    tracer.sampler = ALWAYS_OFF
    assert children.start("step", *remote(), SpanKind.CONSUMER, {}) is None


@pytest.mark.parametrize(
    "tracer",
    [
        trace.NoOpTracerProvider().get_tracer("scope"),
        provider_with(span_limits=SpanLimits(max_span_attribute_length=3))[0],
        provider_with(sampler=TraceIdRatioBased(1.0))[0],
        provider_with(sampler=ParentBased(ALWAYS_ON, remote_parent_sampled=ALWAYS_OFF))[0],
        provider_with(sampler=LinkAware(ALWAYS_ON))[0],
        TracerProvider(shutdown_on_exit=False).get_tracer("scope"),
    ],
    ids=["no SDK", "values are cut", "ratio", "refusing", "unknown", "no pipeline of ours"],
)
def test_there_is_no_short_way_for_other_tracers(tracer):
    with pytest.raises(TypeError):
        children_of(tracer)
