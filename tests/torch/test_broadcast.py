"""``broadcast_trace_context`` on real gloo groups."""

from __future__ import annotations

import time

import pytest

from tests.gloo import rank_outcomes, run_ranks

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.propagate import set_global_textmap
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import NonRecordingSpan, SpanContext

from lens_contrib.torch_distributed import broadcast_trace_context
from lens_core import extract_context
from lens_core.diagnostics import diagnostics
from tests.torch.exchange import error_of
from tests.torch.tracing import set_up, span


def _every_source(rank, world_size):
    set_up()
    own, received = [], []
    for source in range(world_size):
        with span() as carrier:
            own.append(carrier)
            received.append(broadcast_trace_context(rank, src_rank=source))
    received.append(broadcast_trace_context())
    return own, received, dict(diagnostics.counts())


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_gets_the_context_of_the_source(world_size):
    reports = run_ranks(_every_source, world_size, 120)
    for source in range(world_size):
        sent = reports[source][0][source]
        assert sent["traceparent"].startswith("00-")
        assert [report[1][source] for report in reports] == [sent] * world_size
    # The last call is made outside of any span.
    assert [report[1][-1] for report in reports] == [None] * world_size
    counts = [report[2].get("broadcast.no_span", 0) for report in reports]
    assert counts == [1] + [0] * (world_size - 1)


def _states(rank, world_size):
    # One rank has no telemetry at all, one samples nothing, the others export.
    state = {0: "disabled", 1: "unsampled"}.get(rank, "exporting")
    set_up(state)
    sizes = []
    kept = dist.ProcessGroup.broadcast
    original = vars(dist.ProcessGroup)["broadcast"]

    def record(group, tensors, options):
        sizes.append([(str(t.dtype), tuple(t.shape), t.device.type) for t in tensors])
        return kept(group, tensors, options)

    dist.ProcessGroup.broadcast = record
    received = []
    for source in range(world_size):
        with span() as carrier:
            received.append((carrier, broadcast_trace_context(rank, source)))
    dist.ProcessGroup.broadcast = original
    return received, sizes


def test_one_rank_disabled_one_unsampled_one_exporting():
    reports = run_ranks(_states, 3, 120)
    # One broadcast of one frame for each call on each rank, whatever its state.
    assert [sizes for _, sizes in reports] == [[[("torch.uint8", (1024,), "cpu")]] * 3] * 3
    for source, sampled in ((1, 0), (2, 1)):
        sent = reports[source][0][source][0]
        assert int(sent["traceparent"][-2:], 16) & 1 == sampled
        assert [received[source][1] for received, _ in reports] == [sent] * 3
    assert [received[0][1] for received, _ in reports] == [None] * 3


def _headers(rank, world_size):
    set_up()
    with span():
        here = otel_context.get_current()
        small = baggage.set_baggage("user", "jürgen", here)
        large = baggage.set_baggage("blob", "x" * 2000, here)
        received = []
        for context in (small, large):
            token = otel_context.attach(context)
            received.append(broadcast_trace_context(rank, 0))
            otel_context.detach(token)
        received.append(broadcast_trace_context(rank, 0))
    return received, diagnostics.count("carrier.truncated")


def test_baggage_travels_and_what_is_too_large_is_left_out_and_counted():
    reports = run_ranks(_headers, 2, 120)
    assert reports[0][0] == reports[1][0]
    small, large, after = reports[1][0]
    assert baggage.get_baggage("user", extract_context(small)) == "jürgen"
    assert set(large) == {"traceparent"}
    assert after == {"traceparent": large["traceparent"]}
    assert [count for _, count in reports] == [1, 1]


class _OneHeader(TextMapPropagator):
    """A propagator that is none of the W3C's."""

    def inject(self, carrier, context=None, setter=None):
        span_context = trace.get_current_span(context).get_span_context()
        carrier["x-span"] = f"{span_context.span_id:x}"

    def extract(self, carrier, context=None, getter=None):
        span_context = SpanContext(1, int(carrier["x-span"], 16), is_remote=True)
        return trace.set_span_in_context(NonRecordingSpan(span_context), context)

    @property
    def fields(self):
        return {"x-span"}


def _other_propagator(rank, world_size):
    set_up()
    with span():
        before = broadcast_trace_context(rank, 0)
        set_global_textmap(_OneHeader())
        own = f"{trace.get_current_span().get_span_context().span_id:x}"
        return before, broadcast_trace_context(rank, 0), own


def test_another_global_propagator_is_used_from_when_it_is_set():
    first, second = run_ranks(_other_propagator, 2, 120)
    assert set(first[0]) == {"traceparent"}
    assert first[1] == second[1] == {"x-span": first[2]}


def _skipped(rank, world_size, with_step):
    set_up()
    sent, received = [], []
    for step in range(4):
        if rank == 1 and step == 1:
            continue
        with span() as carrier:
            sent.append(carrier)
            received.append(
                broadcast_trace_context(0 if rank == 0 else 1, 0, step=step)
                if with_step
                else broadcast_trace_context(rank, 0)
            )
        if rank == 1 and step == 3:
            # The call that makes up for the one that was skipped.
            received.append(broadcast_trace_context(rank, 0, step=4 if with_step else None))
    return sent, received, diagnostics.count("carrier.out_of_turn")


def test_with_a_step_a_skipped_call_costs_contexts_and_links_nothing_wrong():
    (sent, _, _), (_, received, counted) = run_ranks(_skipped, 2, 120, True)
    # Step 0 was in step; then the frames of steps 1, 2 and 3 came in the calls of 2, 3 and 4.
    assert received == [sent[0], {}, {}, {}]  # refused: falsy, but not None
    assert counted == 3


def test_without_a_step_a_skipped_call_is_delivered_to_the_next_one():
    (sent, _, _), (_, received, counted) = run_ranks(_skipped, 2, 120, False)
    assert received == sent
    assert counted == 0


def _foreign_message(rank, world_size):
    set_up()
    with span() as carrier:
        first = broadcast_trace_context(rank, 0)
        foreign = torch.full((1024,), 7, dtype=torch.uint8)
        short = torch.full((16,), 7, dtype=torch.uint8)
        if rank == 0:
            dist.broadcast(foreign, 0)
            dist.broadcast(short, 0)
            wrong = [None, None]
        else:
            # Not in step with rank 0: messages of others arrive where frames are due.
            wrong = [broadcast_trace_context(rank, 0), broadcast_trace_context(rank, 0)]
        dist.barrier()
        # Rank 1 has counted two calls more: it drops one context, then follows the sender.
        after = [broadcast_trace_context(rank, 0) for _ in range(2)]
    return carrier, first, wrong, after, dict(diagnostics.counts())


def test_a_message_of_somebody_else_is_no_context():
    (carrier, *_), (_, first, wrong, after, counts) = run_ranks(_foreign_message, 2, 120)
    assert first == carrier
    assert wrong == [{}, {}]  # refused: falsy, but not None
    assert after == [{}, carrier]
    assert counts["carrier.rejected"] == 2
    assert counts["carrier.out_of_turn"] == 1


def _one_rank_stays_away(rank, world_size):
    set_up()
    if rank == 1:
        time.sleep(5)
        return None
    start = time.monotonic()
    with span():
        error = error_of(lambda: broadcast_trace_context(rank, 0))
    return error, time.monotonic() - start


def test_a_rank_that_does_not_call_makes_the_others_raise_at_the_groups_timeout():
    (error, waited_s), _ = run_ranks(_one_rank_stays_away, 2, 30, group_timeout_s=2)
    assert error[0] == "RuntimeError"
    assert 1 < waited_s < 5


def _one_rank_dies(rank, world_size):
    import os

    set_up()
    with span():
        broadcast_trace_context(rank, 0)
        if rank == 0:
            os._exit(3)
        return error_of(lambda: broadcast_trace_context(rank, 0))


def test_the_error_of_the_collective_propagates():
    dead, survivor = rank_outcomes(_one_rank_dies, 2, 30)
    assert "exit code 3" in dead.error
    assert survivor.error is None
    assert survivor.value[0] in ("RuntimeError", "DistBackendError")


def _random_streams(rank, world_size):
    import random

    set_up()
    torch.manual_seed(1)
    random.seed(1)
    before = torch.random.get_rng_state(), random.getstate()
    # The span is made before: ids come from the SDK's own source, which is not ours.
    with span():
        inside = torch.random.get_rng_state(), random.getstate()
        broadcast_trace_context(rank, 0)
        after = torch.random.get_rng_state(), random.getstate()
    return torch.equal(before[0], after[0]), inside[1] == after[1]


def test_the_random_streams_of_the_training_are_left_alone():
    assert run_ranks(_random_streams, 2, 120) == [(True, True)] * 2
