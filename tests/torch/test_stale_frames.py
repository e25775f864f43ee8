"""A buffer that is used again never gives the frame of an earlier message.

The peer sends fewer bytes than a frame, and they are its magic: what is behind them in a buffer
that was not cleared is the whole frame of the message before.
"""

import pytest
import torch
import torch.distributed as dist

from tests.gloo import run_ranks

MAGIC = torch.frombuffer(bytearray(b"LNSf"), dtype=torch.uint8)


def _tracer():
    from opentelemetry.sdk.trace import TracerProvider

    return TracerProvider(shutdown_on_exit=False).get_tracer("tests")


def _counts():
    from lens_core.diagnostics import diagnostics

    counts = diagnostics.counts()
    return counts.get("carrier.rejected", 0), counts.get("carrier.out_of_turn", 0)


def _broadcast(rank, world_size):
    from lens_contrib.torch_distributed import broadcast_trace_context

    if rank == 0:
        with _tracer().start_as_current_span("step"):
            broadcast_trace_context(rank, step=5)
        dist.broadcast(MAGIC, 0)
        return None
    first = broadcast_trace_context(rank, step=5)
    # The same step again: an old frame would be taken for this call's.
    second = broadcast_trace_context(rank, step=5)
    return bool(first), bool(second), second.status.value, _counts()


def test_broadcast():
    _, receiver = run_ranks(_broadcast, 2, 60)
    assert receiver == (True, False, "rejected", (1, 0))


def _point_to_point(rank, world_size, mode, verb):
    from lens_contrib import nccl

    def new():
        return nccl.carrier_buffer((6,)) if mode == "buffer" else torch.empty(6)

    tensor = new()
    if rank == 0:
        tensor.copy_(torch.arange(6.0))
        with _tracer().start_as_current_span("send"):
            nccl.send(tensor, 1, mode=mode)
        payload = torch.arange(6.0) + 10
        if mode == "paired":
            dist.send(payload, 1)
            dist.send(MAGIC, 1)
        else:
            dist.send(torch.cat((payload.view(torch.uint8), MAGIC)), 1)
        return None

    def receive():
        if verb == "recv":
            return nccl.recv(tensor, 0, mode=mode)
        if verb == "irecv":
            work = nccl.irecv(tensor, 0, mode=mode)
        else:
            (work,) = nccl.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 0)], mode=mode)
        work.wait()
        return work.carrier

    first = receive()
    second = receive()
    return bool(first), bool(second), second.status.value, tensor.tolist(), _counts()


@pytest.mark.parametrize("verb", ["recv", "irecv", "batch"])
@pytest.mark.parametrize("mode", ["packed", "paired", "buffer"])
def test_point_to_point(mode, verb):
    _, receiver = run_ranks(_point_to_point, 2, 60, mode, verb)
    assert receiver == (True, False, "rejected", [10.0, 11.0, 12.0, 13.0, 14.0, 15.0], (1, 0))


def _no_headers(rank, world_size):
    from lens_contrib.torch_distributed import broadcast_trace_context
    from lens_core.diagnostics import diagnostics

    with _tracer().start_as_current_span("step"):
        carrier = broadcast_trace_context(rank)
    counts = diagnostics.counts()
    return carrier, counts.get("broadcast.no_headers", 0), counts.get("broadcast.no_span", 0)


def test_a_source_whose_propagators_write_nothing_is_not_said_to_have_no_span():
    source, other = run_ranks(_no_headers, 2, 60, env={"OTEL_PROPAGATORS": "none"})
    assert source == (None, 1, 0)
    assert other == (None, 0, 0)
