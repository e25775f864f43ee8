"""``broadcast_trace_context`` beside one bare broadcast and beside the two-message protocol.

Gloo over the loopback, 2 and 4 ranks. A sample is a run of calls that starts at a barrier; its time
is that of the slowest rank. The source has a recording span, so nothing is saved by having nothing
to send.
"""

from __future__ import annotations

import json

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from benchmarks.ratios import Report, interleave
from benchmarks.slowest import slowest_rank
from tests.gloo import run_ranks

BARE = "one bare broadcast of 1,024 bytes"
OURS = "broadcast_trace_context"
TWO = "two messages: length, then payload"


def run(report: Report) -> None:
    for world_size in (2, 4):
        samples = slowest_rank(run_ranks(_rank, world_size, 300))
        report.title(f"broadcast, gloo, {world_size} ranks: against one bare broadcast")
        report.table(samples, BARE, bounds={OURS: 1.15})
        report.title(f"broadcast, gloo, {world_size} ranks: against two messages")
        report.table({name: samples[name] for name in (TWO, OURS)}, TWO, bounds={OURS: 0.6})


def _rank(rank, world_size):
    import torch
    import torch.distributed as dist

    from lens_contrib.torch_distributed import broadcast_trace_context
    from lens_core import inject_context

    trace.set_tracer_provider(TracerProvider())
    buffer = torch.zeros(1024, dtype=torch.uint8)

    def two_messages():
        data = json.dumps(inject_context({})).encode() if rank == 0 else b""
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0)
        if rank == 0:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            payload = torch.empty(int(length.item()), dtype=torch.uint8)
        dist.broadcast(payload, 0)
        return json.loads(payload.numpy().tobytes())

    variants = {
        BARE: lambda: dist.broadcast(buffer, 0),
        OURS: lambda: broadcast_trace_context(rank, 0),
        TWO: two_messages,
    }
    with trace.get_tracer("bench").start_as_current_span("step"):
        expected = two_messages()
        received = broadcast_trace_context(rank, 0)
        if received != expected:
            raise AssertionError(f"{received} is not {expected}")
        return interleave(variants, rounds=1000, warmup=20, before_each=dist.barrier)
