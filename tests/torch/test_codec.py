"""``serialize_context`` and back: any bytes at all, never an exception, never another context."""

from __future__ import annotations

import array
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from lens_contrib.nccl.codec import deserialize_context, extract_nccl_context, serialize_context
from lens_core.carrier import CarrierStatus
from lens_core.channel import Channel
from lens_core.diagnostics import diagnostics
from lens_core.errors import FrameError
from lens_core.frame import P2P_CAPACITY, encode_frame
from lens_core.frame_transport import FrameTransport
from lens_core.propagation import current_carrier

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

span_contexts = st.builds(
    lambda trace_id, span_id, flags, state: SpanContext(
        trace_id, span_id, False, TraceFlags(flags), TraceState(state)
    ),
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.integers(0, 3),
    st.lists(
        st.tuples(st.sampled_from(["a", "lens", "x@y"]), st.just("v1")), max_size=2, unique=True
    ),
)


@pytest.fixture
def local_span():
    """A span of this process, which must never come out of anybody's bytes."""
    span = NonRecordingSpan(SpanContext(0xBAD, 0xBAD, False, TraceFlags(1)))
    token = otel_context.attach(trace.set_span_in_context(span))
    yield span
    otel_context.detach(token)


def in_context(span_context, call, **entries):
    context = trace.set_span_in_context(NonRecordingSpan(span_context), otel_context.Context())
    for name, value in entries.items():
        context = baggage.set_baggage(name, value, context)
    token = otel_context.attach(context)
    try:
        return call()
    finally:
        otel_context.detach(token)


@given(span_contexts, st.dictionaries(st.sampled_from(["user", "job"]), st.text(max_size=20)))
def test_what_was_serialized_comes_back(span_context, entries):
    data, carrier = in_context(
        span_context, lambda: (serialize_context(), current_carrier()), **entries
    )
    assert len(data) == P2P_CAPACITY
    received = deserialize_context(data)
    if received != carrier:  # over capacity: baggage goes first, traceparent never
        assert "baggage" not in received
    assert received["traceparent"] == carrier["traceparent"]
    remote = trace.get_current_span(extract_nccl_context(data)).get_span_context()
    assert (remote.trace_id, remote.span_id) == (span_context.trace_id, span_context.span_id)


@pytest.mark.parametrize("needs_span", [False, True])
def test_without_a_span_a_frame_says_so(needs_span):
    channel = Channel(FrameTransport(), needs_span=needs_span)
    nothing = encode_frame({}, capacity=P2P_CAPACITY, sequence=3)
    assert channel.outgoing(b"", sequence=3) == nothing
    context = baggage.set_baggage("user", "u1", otel_context.Context())
    with_baggage = channel.outgoing(b"", context=context, sequence=3)
    assert (with_baggage == nothing) == needs_span


@given(st.binary(max_size=600))
def test_any_bytes_give_a_carrier_or_nothing(data):
    carrier = deserialize_context(data)
    assert carrier is None or set(map(type, carrier.values())) <= {str}


@given(st.binary(min_size=1, max_size=64), st.integers(0, P2P_CAPACITY - 1))
def test_a_frame_with_other_bytes_in_it_is_nothing(noise, position):
    data = bytearray(serialize_context())
    good = encode_frame({"traceparent": TRACEPARENT}, capacity=P2P_CAPACITY)
    data[:] = good
    data[position : position + len(noise)] = noise
    data = bytes(data[:P2P_CAPACITY]).ljust(P2P_CAPACITY, b"\0")
    carrier = deserialize_context(data)
    if data == good:
        assert carrier == {"traceparent": TRACEPARENT}
    elif any(data):
        assert not carrier
        assert carrier.status is CarrierStatus.REJECTED
    else:
        assert carrier is None


MALFORMED = [
    b"[1]",
    b'"x"',
    b"null",
    b"{",
    b"{}x",
    b"{" * 5000,
    b'{"a":' * 3000,
    b"\xff\xfe\x00",
    b"LNSf",
    b"LNSf" + bytes(252),
    json.dumps({"traceparent": 7}).encode(),
    json.dumps({"traceparent": None}).encode(),
    json.dumps({"traceparent": "garbage"}).encode(),
    json.dumps({"traceparent": "00-" + "0" * 32 + "-b7ad6b7169203331-01"}).encode(),
    json.dumps({"nested": {"a": "b"}}).encode(),
    json.dumps({"baggage": "x" * 200_000}).encode(),
    memoryview(b"[1]"),
    bytearray(b"garbage"),
    array.array("d", [1.0, 2.0]),
    12,
    10**12,
    None,
    "a str",
    [1, 2, 3],
    {"traceparent": TRACEPARENT},
    object(),
]


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: type(data).__name__)
def test_malformed_input_is_nothing_and_is_counted(data, local_span):
    before = diagnostics.count("carrier.rejected")
    carrier = deserialize_context(data)
    assert not carrier
    assert carrier.status is CarrierStatus.REJECTED
    assert diagnostics.count("carrier.rejected") == before + 1
    context = extract_nccl_context(data)
    assert dict(context) == {}
    assert trace.get_current_span(context) is trace.INVALID_SPAN


@pytest.mark.parametrize("data", [b"", b"{}", bytes(256), b"{}\0\0"])
def test_nothing_is_nothing_and_is_not_counted(data):
    before = diagnostics.count("carrier.rejected")
    assert deserialize_context(data) is None
    assert diagnostics.count("carrier.rejected") == before


@pytest.mark.parametrize(
    "wrap",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: _every_second(data),
        lambda data: array.array("B", data),
        lambda data: data + bytes(100),
        lambda data: data.rstrip(b"\0"),
    ],
    ids=["bytes", "bytearray", "memoryview", "strided view", "array", "longer", "unpadded"],
)
def test_every_bytes_like_object_is_read(wrap):
    data = encode_frame({"traceparent": TRACEPARENT}, capacity=P2P_CAPACITY)
    assert deserialize_context(wrap(data)) == {"traceparent": TRACEPARENT}


def _every_second(data):
    spread = bytearray(2 * len(data))
    spread[::2] = data
    return memoryview(spread)[::2]


def test_a_numpy_array_is_read():
    numpy = pytest.importorskip("numpy")
    data = encode_frame({"traceparent": TRACEPARENT}, capacity=P2P_CAPACITY)
    assert deserialize_context(numpy.frombuffer(data, dtype=numpy.uint8)) is not None


def test_the_carrier_of_other_libraries_is_read():
    carrier = {"traceparent": TRACEPARENT, "baggage": "user=u1"}
    assert deserialize_context(json.dumps(carrier).encode()) == carrier
    assert deserialize_context(json.dumps(carrier).encode() + bytes(40)) == carrier


def test_a_larger_capacity_has_room_for_more(local_span):
    context = baggage.set_baggage("blob", "x" * 600)
    token = otel_context.attach(context)
    small, large = serialize_context(), serialize_context(capacity=1024)
    otel_context.detach(token)
    assert (len(small), len(large)) == (256, 1024)
    assert set(deserialize_context(small)) == {"traceparent"}
    assert set(deserialize_context(large)) == {"traceparent", "baggage"}
    with pytest.raises(FrameError, match="capacity 12 is outside"):
        serialize_context(capacity=12)
