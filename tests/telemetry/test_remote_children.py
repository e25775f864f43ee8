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

from lens_core.telemetry.remote_children import RemoteChildren
from lens_core.telemetry.sampling import LinkAware

ATTRIBUTES = {"rpc.system.name": "ray", "ray.task.attempt": 0, "flag": True, "share": 0.5}


def remote(flags: int = 1, *, is_remote: bool = True, state: TraceState | None = None):
    parent = SpanContext(0xABC, 0xDEF, is_remote, TraceFlags(flags), state)
    return parent, trace.set_span_in_context(NonRecordingSpan(parent), Context())


def provider_with(**settings):
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False, **settings)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("scope", "1"), exporter


@pytest.mark.parametrize("sampler", [ALWAYS_ON, ParentBased(ALWAYS_OFF), None], ids=repr)
@pytest.mark.parametrize("flags", [1, 3])
def test_it_equals_the_one_of_the_tracer(sampler, flags):
    tracer, exporter = provider_with(sampler=sampler)
    parent, context = remote(flags, state=TraceState([("vendor", "1")]))
    spans = [
        tracer.start_span("step", context, SpanKind.CONSUMER, ATTRIBUTES),
        RemoteChildren(tracer).start("step", parent, context, SpanKind.CONSUMER, dict(ATTRIBUTES)),
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
    assert vars(quick).keys() == vars(usual).keys()


def test_attributes_of_an_ended_span_do_not_change():
    tracer, exporter = provider_with()
    parent, context = remote()
    span = RemoteChildren(tracer).start("step", parent, context, SpanKind.CONSUMER, {"a": 1})
    span.end()
    span.set_attribute("a", 2)
    assert dict(exporter.get_finished_spans()[0].attributes) == {"a": 1}


@pytest.mark.parametrize(
    ("parent", "settings"),
    [
        (remote(0), {}),
        (remote(1, is_remote=False), {}),
        (remote(), {"sampler": TraceIdRatioBased(1.0)}),
        (remote(), {"sampler": ParentBased(ALWAYS_ON, remote_parent_sampled=ALWAYS_OFF)}),
        (remote(), {"sampler": LinkAware(ALWAYS_ON)}),
        (remote(), {"span_limits": SpanLimits(max_span_attributes=2)}),
    ],
    ids=["unsampled", "local", "ratio", "refusing", "unknown", "too many attributes"],
)
def test_what_the_tracer_must_decide_is_left_to_it(parent, settings):
    tracer, _ = provider_with(**settings)
    started = RemoteChildren(tracer).start("s", *parent, SpanKind.CONSUMER, dict(ATTRIBUTES))
    assert started is None


def test_another_sampler_that_is_set_later_is_asked():
    tracer, _ = provider_with()
    children = RemoteChildren(tracer)
    tracer.sampler = ALWAYS_OFF
    assert children.start("step", *remote(), SpanKind.CONSUMER, {}) is None


@pytest.mark.parametrize(
    "tracer",
    [
        trace.NoOpTracerProvider().get_tracer("scope"),
        provider_with(span_limits=SpanLimits(max_span_attribute_length=3))[0],
    ],
    ids=["no SDK", "values are cut"],
)
def test_there_is_no_short_way_for_other_tracers(tracer):
    with pytest.raises(TypeError):
        RemoteChildren(tracer)
