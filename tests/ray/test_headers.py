"""The short way for a lone traceparent carries what the general way carries."""

from __future__ import annotations

import functools
import gc
import pickle

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import baggage, propagate, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from lens_contrib.ray import RayTransport, ray_dispatch_with_context, traced
from lens_contrib.ray.outer import OuterDecorators, accepts_keyword
from lens_contrib.ray.process_local import LocalTracer, ProcessLocal
from lens_contrib.ray.w3c import Headers
from lens_core.carrier_size import MAX_CARRIER_BYTES, carrier_size
from lens_core.diagnostics import diagnostics

SPANS = st.one_of(
    st.just(trace.INVALID_SPAN_CONTEXT),
    st.builds(
        lambda trace_id, span_id, flags, state: SpanContext(
            trace_id, span_id, False, TraceFlags(flags), TraceState(state)
        ),
        st.integers(1, 2**128 - 1),
        st.integers(1, 2**64 - 1),
        st.integers(0, 3),
        st.sampled_from([[], [("vendor", "x")]]),
    ),
)


@st.composite
def contexts(draw):
    context = trace.set_span_in_context(NonRecordingSpan(draw(SPANS)), Context())
    for name in draw(st.sets(st.sampled_from(["a", "b"]))):
        context = baggage.set_baggage(name, "value", context)
    return context


def current_in(headers, context):
    token = otel_context.attach(context)
    try:
        return headers.current()
    finally:
        otel_context.detach(token)


@settings(max_examples=200, deadline=None)
@given(context=contexts())
def test_a_context_arrives_as_it_was(context):
    headers = Headers()
    before = trace.get_current_span(context).get_span_context()
    for _ in range(2):  # the second time from what is remembered
        arrived = headers.read(current_in(headers, context))[0]
        after = trace.get_current_span(arrived).get_span_context()
        if before.is_valid:
            assert after[:2] == before[:2]
            assert (after.trace_flags, after.is_remote) == (before.trace_flags, True)
            assert after.trace_state == before.trace_state
        else:
            assert not after.is_valid
        assert dict(baggage.get_all(arrived)) == dict(baggage.get_all(context))


@settings(max_examples=300, deadline=None)
@given(carrier=st.one_of(st.binary(max_size=60), st.text(max_size=60), st.integers(), st.none()))
def test_what_is_no_carrier_is_no_context(carrier):
    assert Headers().read(carrier)[0] == {}


@pytest.mark.parametrize(
    "header",
    [
        b"00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01",
        b"00-" + b"A" * 32 + b"-" + b"1" * 16 + b"-01",
        b"01-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01",
        b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01 ",
        b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01-x",
    ],
)
def test_a_traceparent_that_is_not_one_of_version_00_is_no_context(header):
    assert Headers().read(header)[0] == {}


def test_another_propagator_is_honoured_also_when_it_comes_later():
    headers = Headers()
    span = SpanContext(1, 2, False, TraceFlags(1))
    context = trace.set_span_in_context(NonRecordingSpan(span), Context())
    assert isinstance(current_in(headers, context), bytes)
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(CompositePropagator([]))
    try:
        assert current_in(headers, context) == {}
    finally:
        propagate.set_global_textmap(before)
    assert isinstance(current_in(headers, context), bytes)


def test_what_may_not_travel_becomes_a_builtin():
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("scope", "1.0")
    assert pickle.loads(pickle.dumps(ProcessLocal())) is None
    assert pickle.loads(pickle.dumps(LocalTracer(tracer))) == ("scope", "1.0")


def keeps_keywords(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def is_strict(function):
    @functools.wraps(function)
    def inner(x):
        return function(x)

    return inner


def names_it(function):
    @functools.wraps(function)
    def inner(x, *, carrier=None):
        return function(x, carrier=carrier)

    return inner


@pytest.mark.parametrize(
    ("decorators", "tolerance"),
    [
        ([], 2),
        ([keeps_keywords], 1),
        ([names_it], 1),
        ([is_strict], 0),
        ([keeps_keywords, is_strict], 0),
        ([is_strict, keeps_keywords], 0),
        ([keeps_keywords, names_it, keeps_keywords], 1),
    ],
)
def test_decorators_around_a_function_are_found(decorators, tolerance):
    def function(x, *, carrier=None):
        return x

    guard = OuterDecorators(function, "carrier")
    outermost = functools.reduce(lambda inner, decorator: decorator(inner), decorators, function)
    assert guard.tolerance() == tolerance
    assert pickle.loads(pickle.dumps(guard)) == tolerance
    assert callable(outermost)


def test_a_decorator_that_is_no_function_counts_as_strict():
    class Decorator:
        def __init__(self, function):
            functools.update_wrapper(self, function)

        def __call__(self, *args, **kwargs):
            return self.__wrapped__(*args, **kwargs)

    def function(x, *, carrier=None):
        return x

    guard = OuterDecorators(function, "carrier")
    kept = Decorator(function)
    assert guard.tolerance() == 0
    assert kept(1) == 1


def test_a_function_that_is_gone_is_unknown():
    def make():
        def function(x):
            return x

        return OuterDecorators(function, "carrier")

    guard = make()
    gc.collect()
    assert guard.tolerance() == 0


def test_what_a_function_takes_is_read_from_its_code():
    assert accepts_keyword(lambda *, carrier: 0, "carrier")
    assert accepts_keyword(lambda carrier: 0, "carrier")
    assert accepts_keyword(lambda **rest: 0, "carrier")
    assert not accepts_keyword(lambda *carrier: 0, "carrier")
    assert not accepts_keyword(lambda carrier, /: 0, "carrier")
    assert not accepts_keyword(len, "carrier")


def test_room_is_made_for_the_mark_of_what_was_left_out():
    headers = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    fills = {**headers, "x": "v" * (MAX_CARRIER_BYTES - carrier_size(headers) - 1)}
    assert carrier_size(fills) == MAX_CARRIER_BYTES
    whole = RayTransport().extract(RayTransport().inject({}, fills))
    assert (whole.carrier, whole.carrier.problem, whole.carrier.truncated) == (fills, None, False)
    received = RayTransport().extract(RayTransport().inject({}, {**fills, "baggage": "k=v"}))
    assert (received.carrier, received.carrier.problem, received.carrier.truncated) == (
        headers,
        None,
        True,
    )


@pytest.mark.parametrize("carrier", [5, b"xx", "traceparent", object(), {"traceparent": 5}])
def test_a_carrier_that_is_none_does_not_break_a_dispatch(cluster, carrier):
    @ray.remote(num_cpus=0)
    @traced
    def work():
        return 1

    before = diagnostics.count("carrier.inject_failed")
    assert ray.get(ray_dispatch_with_context(work, _carrier=carrier), timeout=60) == 1
    assert diagnostics.count("carrier.inject_failed") == before + 1
