import pytest
from opentelemetry import baggage, propagate, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import StatusCode

from lens_core import extract_context
from lens_core.carrier import CarrierStatus
from lens_core.channel import Channel, inbound, outbound
from lens_core.diagnostics import diagnostics
from lens_core.errors import MessageError
from lens_core.frame import P2P_CAPACITY
from lens_core.propagation import current_carrier
from lens_core.semconv import LENS_PEER_RANK
from lens_core.testing.carriers import FULL, carrier_for, oversized
from tests.reference_transport import PAYLOAD_BYTES, BytesTransport

TRANSPORT = BytesTransport()
PAYLOAD = b"p" * PAYLOAD_BYTES


def sent_from(carrier):
    return outbound(TRANSPORT, PAYLOAD, context=extract_context(carrier))


def test_a_link_to_exactly_the_sender(recording):
    with inbound(
        TRANSPORT,
        sent_from(FULL),
        "recv",
        tracer=recording.tracer,
        attributes={"a": 1},
        link_attributes={LENS_PEER_RANK: 2},
    ) as arrived:
        assert arrived.message == PAYLOAD
        assert arrived.carrier == FULL
        assert arrived.carrier.status is CarrierStatus.OK
        assert trace.get_current_span() is arrived.span
        assert baggage.get_all() == {}
    done = recording.only()
    assert done.parent is None
    (link,) = done.links
    assert (link.context.trace_id, link.context.span_id) == (0xF1, 0xF0 + 0x1001)
    assert dict(link.attributes) == {"lens.peer.rank": 2}
    assert dict(done.attributes) == {"a": 1, "lens.carrier": "ok", "lens.transport": "reference"}


def test_a_child_of_exactly_the_sender_with_its_baggage(recording):
    with inbound(TRANSPORT, sent_from(FULL), "call", tracer=recording.tracer, relation="child"):
        assert baggage.get_baggage("run") == "llama-7b"
    assert baggage.get_all() == {}
    done = recording.only()
    assert done.context.trace_id == 0xF1
    assert done.parent.span_id == 0xF0 + 0x1001
    assert done.links == ()


@pytest.mark.parametrize("relation", ["link", "child"])
def test_absent_and_rejected_are_told_apart_on_the_span(recording, relation):
    damaged = bytearray(sent_from(FULL))
    damaged[-1] = 1
    for message in (PAYLOAD, sent_from({}), bytes(damaged)):
        with inbound(
            TRANSPORT, message, "x", tracer=recording.tracer, relation=relation
        ) as arrived:
            assert arrived.message == PAYLOAD
    assert [span.attributes["lens.carrier"] for span in recording.spans] == [
        "absent",
        "absent",
        "rejected",
    ]
    assert all(span.parent is None and span.links == () for span in recording.spans)


def test_headers_that_nobody_here_reads_are_as_good_as_none():
    before = diagnostics.count("carrier.rejected")
    arrived = Channel(TRANSPORT).arrived(TRANSPORT.inject(PAYLOAD, {"x-team": "a"}))
    assert arrived.carrier.status is CarrierStatus.ABSENT
    assert arrived.carrier == {}
    assert diagnostics.count("carrier.rejected") == before


def test_a_child_without_a_carrier_is_a_child_of_the_local_span(recording):
    with recording.tracer.start_as_current_span("local") as local:
        with inbound(TRANSPORT, PAYLOAD, "x", tracer=recording.tracer, relation="child"):
            pass
    assert recording.spans[0].parent.span_id == local.get_span_context().span_id


def test_the_users_exception_is_recorded_and_propagates(recording):
    error = ValueError("user")
    with pytest.raises(ValueError, match="user") as raised:
        with inbound(TRANSPORT, PAYLOAD, "x", tracer=recording.tracer):
            raise error
    assert raised.value is error
    assert recording.only().status.status_code is StatusCode.ERROR


def test_a_message_that_nothing_can_ride_on_is_the_callers_error():
    with pytest.raises(MessageError):
        outbound(TRANSPORT, b"short")


class _Hostile(TextMapPropagator):
    """A third-party propagator at its worst."""

    def __init__(self, injected):
        self._injected = injected

    def inject(self, carrier, context=None, setter=None):
        if isinstance(self._injected, Exception):
            raise self._injected
        carrier.update(self._injected)

    def extract(self, carrier, context=None, getter=None):
        raise RuntimeError("extract")

    @property
    def fields(self):
        return set()


@pytest.mark.parametrize(
    "injected", [RuntimeError("inject"), {"k": 5}, {"traceparent": "junk"}, {7: "v"}]
)
def test_a_hostile_propagator_costs_the_context_and_nothing_else(injected):
    previous = propagate.get_global_textmap()
    propagate.set_global_textmap(_Hostile(injected))
    before = diagnostics.count("carrier.inject_failed")
    try:
        message = outbound(TRANSPORT, PAYLOAD)
        assert len(message) == PAYLOAD_BYTES + P2P_CAPACITY
        assert Channel(TRANSPORT).arrived(message).carrier.status is CarrierStatus.ABSENT
        assert extract_context(carrier_for(1)) == Context()
    finally:
        propagate.set_global_textmap(previous)
    assert diagnostics.count("carrier.inject_failed") == before + 1


def test_what_the_sender_left_out_is_counted():
    before = diagnostics.count("carrier.truncated")
    carrier = oversized(P2P_CAPACITY)
    arrived = Channel(TRANSPORT).arrived(sent_from(carrier))
    assert arrived.carrier.status is CarrierStatus.OK
    assert arrived.carrier == {k: v for k, v in carrier.items() if k != "baggage"}
    assert diagnostics.count("carrier.truncated") == before + 1


def test_current_carrier_is_a_new_mapping():
    token = otel_context.attach(extract_context(FULL))
    try:
        assert current_carrier() == FULL
        assert current_carrier() is not current_carrier()
    finally:
        otel_context.detach(token)
    assert current_carrier(Context()) == {}
