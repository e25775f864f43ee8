"""The short way for a lone traceparent carries what the general way carries."""

from __future__ import annotations

import functools
import pickle

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import baggage, propagate, trace
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState
from ray import cloudpickle

from lens_contrib.ray import CARRIER_ARGUMENT, RayTransport, ray_dispatch_with_context, traced
from lens_contrib.ray.acceptance import Acceptance, acceptance_of, takes_keyword
from lens_contrib.ray.call_spec import LocalTracer
from lens_core.carrier import CarrierStatus
from lens_core.carrier_size import MAX_CARRIER_BYTES, carrier_size
from lens_core.channel import Channel
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


SENDER, RECEIVER = Channel(RayTransport(compact=True)), Channel(RayTransport())


def received(value):
    return RECEIVER.arrived({CARRIER_ARGUMENT: value}).carrier


@settings(max_examples=200, deadline=None)
@given(context=contexts())
def test_a_context_arrives_as_it_was(context):
    before = trace.get_current_span(context).get_span_context()
    arrived = RECEIVER.arrived(SENDER.outgoing({}, context=context)).carrier.context()
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
    assert received(carrier).context() == {}


@pytest.mark.parametrize(
    "header",
    [
        b"00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01",
        b"00-" + b"1" * 32 + b"-" + b"0" * 16 + b"-01",
        b"00-" + b"A" * 32 + b"-" + b"1" * 16 + b"-01",
        b"01-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01",
        b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01 ",
        b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01-x",
    ],
)
def test_a_traceparent_that_is_not_one_of_version_00_is_no_context(header):
    assert received(header).status is CarrierStatus.REJECTED
    assert received(header).context() == {}


def test_another_propagator_is_honoured_also_when_it_comes_later(cluster, monkeypatch):
    """Although the caller remembers what it sent last under the same context."""

    @ray.remote(num_cpus=0)
    @traced
    def trace_id():
        return f"{trace.get_current_span().get_span_context().trace_id:032x}"

    with cluster.caller() as caller:
        assert ray.get(trace_id.remote()) == caller.trace_id
        before = propagate.get_global_textmap()
        propagate.set_global_textmap(CompositePropagator([]))
        try:
            assert ray.get(trace_id.remote()) != caller.trace_id
        finally:
            propagate.set_global_textmap(before)
        assert ray.get(trace_id.remote()) == caller.trace_id


def test_what_may_not_travel_becomes_a_builtin():
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("scope", "1.0")
    assert pickle.loads(pickle.dumps(LocalTracer(tracer))) == ("scope", "1.0")
    copy = cloudpickle.loads(cloudpickle.dumps(traced(tracer=tracer)(lambda x: x + 1)))
    ours = {
        type(cell.cell_contents).__module__
        for inner in (copy, *(cell.cell_contents for cell in copy.__closure__))
        for cell in getattr(inner, "__closure__", None) or ()
    }
    assert ours <= {"builtins"}
    assert copy(1) == 2


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
    def inner(x, *, _otel_carrier=None):
        return function(x, _otel_carrier=_otel_carrier)

    return inner


@pytest.mark.parametrize(
    ("decorators", "acceptance"),
    [
        ([], Acceptance.POSITION),
        ([keeps_keywords], Acceptance.KEYWORD),
        ([names_it], Acceptance.KEYWORD),
        ([is_strict], Acceptance.NOTHING),
        ([keeps_keywords, is_strict], Acceptance.NOTHING),
        ([is_strict, keeps_keywords], Acceptance.NOTHING),
        ([keeps_keywords, names_it, keeps_keywords], Acceptance.KEYWORD),
    ],
)
def test_decorators_around_a_function_are_found(decorators, acceptance):
    function = functools.reduce(
        lambda inner, decorator: decorator(inner), decorators, traced(keeps_keywords)
    )
    assert acceptance_of(function) is acceptance


def test_what_a_function_takes_is_read_from_its_code():
    assert takes_keyword(lambda *, carrier: 0, "carrier")
    assert takes_keyword(lambda carrier: 0, "carrier")
    assert takes_keyword(lambda **rest: 0, "carrier")
    assert not takes_keyword(lambda *carrier: 0, "carrier")
    assert not takes_keyword(lambda carrier, /: 0, "carrier")
    assert not takes_keyword(len, "carrier")


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

    before = diagnostics.count("carrier.rejected")
    assert ray.get(ray_dispatch_with_context(work, _carrier=carrier), timeout=60) == 1
    assert diagnostics.count("carrier.rejected") == before + 1
