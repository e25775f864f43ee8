"""hop_span: the receiver links to exactly the sender's span, and to none where it cannot know."""

import gc

import numpy as np
import pytest
import torch
from opentelemetry import propagate
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator

from lens_core.diagnostics import diagnostics
from lens_core.errors import ConfigError
from lens_core.identity import HopId, MeshCoordinates, StepScope, hop_span, step_span
from lens_core.semconv import LENS_CHUNK, LENS_MICROBATCH, LENS_PEER_RANK
from lens_core.telemetry.ids import PrivateIdGenerator
from tests.core.recording import Recording
from tests.identity.conftest import identity


def _run(rank, calls, **who):
    """The spans of one rank that makes these hop_span calls in step 1."""
    recording = Recording(id_generator=PrivateIdGenerator())
    with step_span(1, tracer=recording.tracer, identity=identity(rank, **who)):
        for operation, options in calls:
            with hop_span(operation, tracer=recording.tracer, **options):
                pass
    return [span for span in recording.spans if span.name != "step"]


def _linked(span):
    return [link.context.span_id for link in span.links]


def test_each_recv_links_to_its_own_send():
    sends = _run(0, [("send_forward", {"peer": 1, "microbatch": i}) for i in range(4)])
    recvs = _run(1, [("recv_forward", {"peer": 0, "microbatch": i}) for i in (2, 0, 3, 1)])
    expected = [sends[i].context.span_id for i in (2, 0, 3, 1)]
    assert [_linked(span)[0] for span in recvs] == expected
    link = recvs[0].links[0]
    assert dict(link.attributes) == {
        "lens.peer.rank": 0,
        "lens.hop.direction": "forward",
        "lens.microbatch": 2,
    }
    assert link.context.trace_id == recvs[0].context.trace_id


def test_a_combined_call_sends_under_its_id_and_links_to_what_it_receives():
    combined = {"peer": 1, "microbatch": 3, "recv_microbatch": 1}
    (first,) = _run(0, [("send_forward_recv_backward", combined)])
    other = {"peer": 0, "microbatch": 1, "recv_microbatch": 3}
    (second,) = _run(1, [("send_backward_recv_forward", other)])
    assert _linked(first) == [second.context.span_id]
    assert _linked(second) == [first.context.span_id]


def test_forward_backward_chunk_group_and_repeat_are_told_apart():
    calls = [
        ("send_forward", {"peer": 1, "microbatch": 0}),
        ("send_backward", {"peer": 1, "microbatch": 0}),
        ("send_forward", {"peer": 1, "microbatch": 0, "chunk": 1}),
        ("send_forward", {"peer": 1, "microbatch": 0, "group": "encoder"}),
        ("send_forward", {"peer": 1, "microbatch": 0}),
        ("send_forward", {"peer": 2, "microbatch": 0}),
    ]
    sends = _run(0, calls)
    assert len({span.context.span_id for span in sends}) == len(calls)
    recvs = _run(1, [(op.replace("send", "recv"), {**kw, "peer": 0}) for op, kw in calls[:5]])
    assert [_linked(span)[0] for span in recvs] == [span.context.span_id for span in sends[:5]]


def test_without_a_microbatch_hops_of_a_pair_are_counted():
    sends = _run(0, [("send_forward", {"peer": 1})] * 3)
    recvs = _run(1, [("recv_forward", {"peer": 0})] * 3)
    assert [_linked(span)[0] for span in recvs] == [span.context.span_id for span in sends]


def test_a_frame_s_sequence_number_stops_a_link_that_would_be_wrong():
    before = diagnostics.count("hop.sequence_mismatch")
    recording = Recording(id_generator=PrivateIdGenerator())
    with step_span(1, tracer=recording.tracer, identity=identity(1)):
        for arrived in (0, 2):  # the sender's message 1 was never received here
            with hop_span("recv_forward", peer=0, confirm=True, tracer=recording.tracer) as hop:
                assert hop.span.links == ()
                hop.confirm(arrived)
    first, second, _ = recording.spans
    sends = _run(0, [("send_forward", {"peer": 1})] * 3)
    assert _linked(first) == [sends[0].context.span_id]
    assert _linked(second) == []
    assert diagnostics.count("hop.sequence_mismatch") == before + 1


def test_a_peer_that_does_not_take_part_gets_no_link():
    before = diagnostics.count("link.missing")
    (span,) = _run(
        1, [("recv_forward", {"peer": 0, "microbatch": 0})], participants={1, 2}, owner_rank=1
    )
    assert _linked(span) == []
    assert diagnostics.count("link.missing") == before + 1


def test_outside_a_step_there_is_a_span_and_no_link(recording):
    before = diagnostics.count("link.missing")
    with hop_span("recv_forward", peer=0, microbatch=0, tracer=recording.tracer):
        pass
    assert _linked(recording.only()) == []
    assert diagnostics.count("link.missing") == before + 1


@pytest.mark.parametrize("propagator", [W3CBaggagePropagator(), CompositePropagator([])])
def test_a_link_needs_no_propagator_that_reads_a_traceparent(propagator):
    counts, textmap = diagnostics.counts(), propagate.get_global_textmap()
    propagate.set_global_textmap(propagator)
    try:
        (send,) = _run(0, [("send_forward", {"peer": 1, "microbatch": 0})])
        (recv,) = _run(1, [("recv_forward", {"peer": 0, "microbatch": 0})])
    finally:
        propagate.set_global_textmap(textmap)
    assert [link.context.span_id for link in recv.links] == [send.context.span_id]
    assert diagnostics.counts() == counts


def test_a_step_with_hops_is_gone_when_it_has_ended():
    """Not only when the garbage collector searches for circles, in the middle of some step."""
    gc.collect()
    before = sum(type(thing) is StepScope for thing in gc.get_objects())
    gc.disable()
    try:
        for _ in range(3):
            _run(1, [("send_forward_recv_backward", {"peer": 0, "microbatch": 0})])
        assert sum(type(thing) is StepScope for thing in gc.get_objects()) == before
    finally:
        gc.enable()


def test_the_peer_s_coordinates_are_on_the_link():
    mesh = MeshCoordinates({"pp": 2, "dp": 2})
    (span,) = _run(3, [("recv_forward", {"peer": 1, "microbatch": 0})], mesh=mesh)
    attributes = span.links[0].attributes
    assert (attributes["lens.peer.pp"], attributes["lens.peer.dp"]) == (0, 1)


def test_numbers_of_other_types_are_integers_on_the_span_and_in_the_ids():
    recording = Recording(id_generator=PrivateIdGenerator())
    ids = []
    for number in (int, np.int64, torch.tensor):
        with step_span(1, tracer=recording.tracer, identity=identity(0)):
            with hop_span(
                "send_forward",
                peer=number(1),
                microbatch=number(3),
                chunk=number(2),
                tracer=recording.tracer,
            ) as hop:
                ids.append(hop.span.get_span_context().span_id)
                assert hop.send == HopId("forward", 0, 1, 3, "/2")
                named = (LENS_PEER_RANK, LENS_MICROBATCH, LENS_CHUNK)
                assert [hop.span.attributes[name] for name in named] == [1, 3, 2]
    assert len(set(ids)) == 1


@pytest.mark.parametrize(
    "operation",
    [
        None,
        "",
        "forward",
        "send",
        "recv_sideways",
        "send_forward_send_backward",
        "send_forward_recv",
    ],
)
def test_an_operation_that_is_none_is_refused(operation, recording):
    with pytest.raises(ConfigError):
        with hop_span(operation, peer=0, microbatch=0, tracer=recording.tracer):
            pass
