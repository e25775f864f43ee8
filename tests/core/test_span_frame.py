"""The short way of a frame that holds a span alone is the general one, only shorter."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.propagate import get_global_textmap, set_global_textmap
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from lens_core.frame import (
    BROADCAST_CAPACITY,
    HEADER_BYTES,
    P2P_CAPACITY,
    decode_frame,
    encode_frame,
)
from lens_core.propagation import current_carrier, inject_context
from lens_core.testing import damage_bytes
from lens_core.testing.carriers import FULL, carrier_for

trace_ids = st.integers(1, 2**128 - 1)
span_ids = st.integers(1, 2**64 - 1)
capacities = st.sampled_from([HEADER_BYTES, P2P_CAPACITY, BROADCAST_CAPACITY, 2000])


def written(context, capacity=P2P_CAPACITY, sequence=0):
    """The frame of a context, where it takes the short way; else ``None``."""
    carrier = current_carrier(context, sequence=sequence)
    return encode_frame(carrier, capacity=capacity) if carrier.ids is not None else None


def in_context(trace_id=1, span_id=2, flags=1, state=None):
    span = NonRecordingSpan(SpanContext(trace_id, span_id, False, TraceFlags(flags), state))
    return trace.set_span_in_context(span, Context())


@given(trace_ids, span_ids, st.integers(0, 255), capacities, st.integers(0, 2**64 - 1))
def test_the_bytes_are_those_of_the_injected_context(trace_id, span_id, flags, capacity, sequence):
    context = in_context(trace_id, span_id, flags)
    carrier = inject_context({}, context)
    frame = written(context, capacity, sequence)
    assert frame == encode_frame(carrier, capacity=capacity, sequence=sequence)
    for raw in (frame, memoryview(frame)):
        received = decode_frame(raw)
        assert (received.ids is not None, received.sequence) == (True, sequence)
        assert received.span_context == extract(carrier)
        assert received == carrier


def extract(carrier):
    """The span context that the propagator itself reads."""
    context = get_global_textmap().extract(carrier, context=Context())
    return trace.get_current_span(context).get_span_context()


def test_what_the_short_way_reads_is_what_the_propagator_reads():
    rng = random.Random(0)
    frames = [
        encode_frame(carrier, capacity=capacity, sequence=7)
        for carrier in ({}, carrier_for(1), FULL)
        for capacity in (HEADER_BYTES, P2P_CAPACITY, BROADCAST_CAPACITY)
    ]
    short = 0
    for _ in range(20_000):
        raw = rng.choice(frames)
        if rng.random() < 0.9:
            raw = damage_bytes(raw, rng)
        carrier = decode_frame(raw)
        if carrier.problem is not None:
            continue
        short += carrier.ids is not None
        assert carrier.span_context == extract(dict(carrier))
        assert carrier.sequence == (7 if any(raw) else None)
    assert short > 100


@pytest.mark.parametrize(
    "context",
    [
        Context(),
        Context({"value": "no span"}),
        trace.set_span_in_context(trace.INVALID_SPAN, Context()),
        in_context(state=TraceState([("a", "b")])),
        in_context(trace_id=0),
        in_context(flags=256),
        baggage.set_baggage("user", "u1", in_context()),
        baggage.set_baggage("user", "u1", Context()),
        otel_context.set_value("other", 1, in_context()),
    ],
    ids=[
        "empty",
        "no span",
        "an invalid span",
        "a trace state",
        "no trace id",
        "odd flags",
        "a span and baggage",
        "baggage",
        "a span and more",
    ],
)
def test_what_is_not_a_span_alone_is_left_to_the_propagator(context):
    assert written(context) is None


class _Subclass(CompositePropagator):
    pass


class _Other(TextMapPropagator):
    def inject(self, carrier, context=None, setter=None):
        carrier["x"] = "y"

    def extract(self, carrier, context=None, getter=None):
        return context

    @property
    def fields(self):
        return {"x"}


def test_another_propagator_is_noticed_when_it_is_set():
    before = get_global_textmap()
    try:
        assert written(in_context()) is not None
        for other in (_Other(), CompositePropagator([_Other()]), _Subclass([]), before):
            set_global_textmap(other)
            assert (written(in_context()) is not None) == (other is before)
    finally:
        set_global_textmap(before)
