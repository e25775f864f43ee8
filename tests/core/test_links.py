import asyncio

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, StatusCode

from lens_core import (
    add_carrier_link,
    attach_carrier,
    create_linked_span,
    extract_context,
    linked_span,
)
from lens_core.semconv import LENS_HOP_DIRECTION, LENS_MICROBATCH, LENS_PEER_RANK
from lens_core.testing.carriers import FULL, carrier_for
from tests.core.recording import Recording


def linked_ids(span):
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def test_as_in_the_spec(recording):
    span = create_linked_span(
        recording.tracer,
        "pipeline.recv_forward.linked",
        remote_carrier=carrier_for(7),
        rank=1,
        from_rank=0,
    )
    assert span.is_recording()
    span.end()
    done = recording.only()
    assert done.name == "pipeline.recv_forward.linked"
    assert dict(done.attributes) == {"rank": 1, "from_rank": 0, "lens.carrier": "ok"}
    assert linked_ids(done) == [(8, 0x1008)]
    assert done.links[0].context.is_remote
    assert done.parent is None
    assert done.context.trace_id != 8


@pytest.mark.parametrize(
    "carrier", [None, {}, {"traceparent": "garbage"}, {"traceparent": 5}, {"baggage": "k=v"}]
)
def test_without_a_valid_carrier_the_span_is_unlinked(recording, carrier):
    create_linked_span(recording.tracer, "x", remote_carrier=carrier).end()
    assert recording.only().links == ()


class _Tensor:
    """What a caller may pass by mistake: its truth value raises."""

    def __bool__(self):
        raise RuntimeError("ambiguous")


@pytest.mark.parametrize("carrier", [{"traceparent": "junk"}, b"junk", 0, _Tensor()])
def test_an_invalid_carrier_does_not_link_to_the_current_span(recording, carrier):
    with recording.tracer.start_as_current_span("local"):
        create_linked_span(recording.tracer, "x", remote_carrier=carrier).end()
        create_linked_span(recording.tracer, "x", remote_carriers=[None, carrier]).end()
        with attach_carrier(carrier) as context:
            assert context is otel_context.get_current()
    assert [span.links for span in recording.spans] == [(), (), ()]


def test_it_is_locally_rooted_a_child_of_the_local_span(recording):
    with recording.tracer.start_as_current_span("local") as local:
        create_linked_span(recording.tracer, "x", remote_carrier=carrier_for(7)).end()
    done = recording.spans[0]
    assert done.parent.span_id == local.get_span_context().span_id
    assert linked_ids(done) == [(8, 0x1008)]


def test_a_context_wins_over_a_carrier(recording):
    create_linked_span(recording.tracer, "x", extract_context(carrier_for(1)), carrier_for(2)).end()
    assert linked_ids(recording.only()) == [(2, 0x1002)]


def test_fan_in_links_to_all(recording):
    create_linked_span(
        recording.tracer,
        "gather",
        remote_carrier=carrier_for(1),
        remote_carriers=[carrier_for(2), None, {}, {"traceparent": "bad"}, carrier_for(3)],
        remote_contexts=[extract_context(carrier_for(4)), Context()],
        link_attributes={LENS_PEER_RANK: 3, LENS_HOP_DIRECTION: "recv", LENS_MICROBATCH: 5},
    ).end()
    done = recording.only()
    assert linked_ids(done) == [(2, 0x1002), (5, 0x1005), (3, 0x1003), (4, 0x1004)]
    for link in done.links:
        assert dict(link.attributes) == {
            "lens.peer.rank": 3,
            "lens.hop.direction": "recv",
            "lens.microbatch": 5,
        }


def test_attributes_that_are_parameters_go_in_a_mapping(recording):
    create_linked_span(
        recording.tracer, "x", span_attributes={"name": "n", "kind": "k"}, kind=SpanKind.CONSUMER
    ).end()
    assert dict(recording.only().attributes) == {"name": "n", "kind": "k"}
    assert recording.only().kind is SpanKind.CONSUMER


def test_samplers_and_processors_see_attributes_and_links_at_the_start():
    seen = []

    class Watch(Sampler):
        def should_sample(
            self,
            parent_context,
            trace_id,
            name,
            kind=None,
            attributes=None,
            links=None,
            trace_state=None,
        ):
            seen.append(("sampler", dict(attributes), len(links)))
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)

        def get_description(self):
            return "watch"

    class Processor(SpanProcessor):
        def on_start(self, span, parent_context=None):
            seen.append(("processor", dict(span.attributes), len(span.links)))

    recording = Recording(sampler=Watch())
    recording.provider.add_span_processor(Processor())
    create_linked_span(recording.tracer, "x", remote_carrier=carrier_for(1), rank=2).end()
    attributes = {"rank": 2, "lens.carrier": "ok"}
    assert seen == [("sampler", attributes, 1), ("processor", attributes, 1)]


def test_the_context_manager_makes_the_span_current_and_ends_it(recording):
    before = otel_context.get_current()
    with linked_span(recording.tracer, "x", remote_carrier=carrier_for(1), rank=2) as span:
        assert trace.get_current_span() is span
        assert span.is_recording()
    assert otel_context.get_current() == before
    done = recording.only()
    assert done.status.status_code is StatusCode.UNSET
    assert done.events == ()


class BrokenStrError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "kind", "description"),
    [
        (ValueError("first line\nsecond"), "ValueError", "ValueError: first line"),
        (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit", "SystemExit: 3"),
        (
            asyncio.CancelledError(),
            "asyncio.exceptions.CancelledError",
            "asyncio.exceptions.CancelledError",
        ),
        (
            BrokenStrError(),
            "tests.core.test_links.BrokenStrError",
            "tests.core.test_links.BrokenStrError: <str() of the exception failed>",
        ),
    ],
    ids=["exception", "interrupt", "exit", "cancelled", "broken-str"],
)
def test_exceptions_of_every_kind_are_recorded_and_propagate(recording, error, kind, description):
    before = otel_context.get_current()
    with pytest.raises(type(error)) as raised, linked_span(recording.tracer, "x"):
        raise error
    assert raised.value is error
    assert otel_context.get_current() == before
    done = recording.only()
    assert done.status.status_code is StatusCode.ERROR
    assert done.status.description == description
    assert done.attributes["error.type"] == kind
    assert [event.name for event in done.events] == ["exception"]


@pytest.mark.parametrize("error", [GeneratorExit(), SystemExit(), SystemExit(0)])
def test_ordinary_ends_are_no_errors(recording, error):
    with pytest.raises(type(error)), linked_span(recording.tracer, "x"):
        raise error
    assert recording.only().status.status_code is StatusCode.UNSET
    assert recording.only().events == ()


def test_attach_carrier_shares_the_trace_and_the_baggage(recording):
    before = otel_context.get_current()
    with attach_carrier(FULL) as context:
        assert otel_context.get_current() is context
        assert baggage.get_baggage("run") == "llama-7b"
        recording.tracer.start_span("inside").end()
    assert otel_context.get_current() == before
    done = recording.only()
    assert done.context.trace_id == 0xF1
    assert done.parent.span_id == 0xF0 + 0x1001
    assert done.parent.is_remote


def test_attach_carrier_keeps_what_others_put_into_the_context(recording):
    token = otel_context.attach(otel_context.set_value("theirs", 1))
    try:
        with attach_carrier(carrier_for(1)):
            assert otel_context.get_value("theirs") == 1
    finally:
        otel_context.detach(token)


@pytest.mark.parametrize("carrier", [None, {}, {"traceparent": "garbage"}])
def test_attach_of_nothing_leaves_the_context_as_it_is(recording, carrier):
    with recording.tracer.start_as_current_span("local") as local, attach_carrier(carrier):
        assert trace.get_current_span() is local


def test_attach_restores_on_error():
    before = otel_context.get_current()
    with pytest.raises(KeyError), attach_carrier(carrier_for(1)):
        raise KeyError
    assert otel_context.get_current() == before


def test_a_span_that_waits_is_linked_when_the_carrier_is_there(recording):
    span = recording.tracer.start_span("recv")
    assert add_carrier_link(span, carrier_for(7), {LENS_PEER_RANK: 2}) == "ok"
    span.end()
    done = recording.only()
    assert linked_ids(done) == [(8, 0x1008)]
    assert dict(done.links[0].attributes) == {"lens.peer.rank": 2}
    assert dict(done.attributes) == {"lens.carrier": "ok"}


@pytest.mark.parametrize(
    ("carrier", "status"),
    [
        (None, "absent"),
        ({}, "absent"),
        ({"baggage": "k=v"}, "absent"),
        ({"traceparent": "garbage"}, "rejected"),
        ({"traceparent": 5}, "rejected"),
        (b"", "rejected"),
        (_Tensor(), "rejected"),
    ],
)
def test_a_span_without_a_valid_carrier_says_so(recording, carrier, status):
    with recording.tracer.start_as_current_span("recv") as span:
        assert add_carrier_link(span, carrier) == status
    assert recording.only().links == ()
    assert recording.only().attributes["lens.carrier"] == status


def test_a_link_to_a_span_that_has_ended_does_not_raise(recording):
    span = recording.tracer.start_span("recv")
    span.end()
    add_carrier_link(span, carrier_for(7))
    assert recording.only().links == ()
