"""``lens_contrib.nccl`` beside plain ``torch.distributed`` point-to-point messages.

Gloo over the loopback. Pairs of ranks play ping-pong; a call's time is half a round trip, of the
slowest rank. With 4 ranks two pairs do so at once. Every rank has a recording span.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from benchmarks.ratios import BASELINE_TWIN, Report, interleave
from benchmarks.slowest import slowest_rank
from tests.gloo import run_ranks

KB, MB = 1024, 1024 * 1024
PLAIN, AUTO, BUFFER = "plain send and recv", "lens send and recv", "lens, mode=buffer"
PACKED, PAIRED = "lens, mode=packed", "lens, mode=paired"
#: Size to (bound of auto, bound of buffer, rounds, calls in a round).
SIZES = {4 * KB: (1.8, 1.2, 200, 20), MB: (1.3, 1.1, 200, 8), 16 * MB: (1.1, 1.05, 200, 2)}
#: Around the limit up to which ``auto`` packs.
AROUND = (16 * KB, 64 * KB, 128 * KB, 256 * KB, 512 * KB, 2 * MB)


def run(report: Report) -> None:
    for world_size in (2, 4):
        for size, (auto, buffer, rounds, calls) in SIZES.items():
            samples = slowest_rank(
                run_ranks(_rank, world_size, 300, size, (AUTO, BUFFER), rounds, calls)
            )
            report.title(f"point-to-point, gloo, {world_size} ranks, {size // KB:,} KB one way")
            report.table(samples, PLAIN, bounds={AUTO: auto, BUFFER: buffer})
    report.title("the limit up to which a message is packed: packed, then paired, against plain")
    for size in AROUND:
        samples = slowest_rank(run_ranks(_rank, 2, 300, size, (PACKED, PAIRED), 80, 4))
        print(f"  {size // KB:,} KB")
        report.table({name: samples[name] for name in samples if name != BASELINE_TWIN}, PLAIN)


def _rank(rank, world_size, size, names, rounds, calls):
    import torch
    import torch.distributed as dist

    from lens_contrib import nccl

    trace.set_tracer_provider(TracerProvider())
    peer = rank ^ 1
    # The same memory for every variant: what another one has just used is in the caches.
    out, back = (nccl.carrier_buffer((size // 4,), torch.float32) for _ in range(2))
    out.copy_(torch.arange(size // 4))

    def plain():
        if rank % 2 == 0:
            dist.send(out, peer)
            dist.recv(back, peer)
        else:
            dist.recv(back, peer)
            dist.send(out, peer)

    def lens(mode):
        def play():
            if rank % 2 == 0:
                nccl.send(out, peer, mode=mode)
                return nccl.recv(back, peer, mode=mode)
            carrier = nccl.recv(back, peer, mode=mode)
            nccl.send(out, peer, mode=mode)
            return carrier

        return play

    every = {
        PLAIN: plain,
        AUTO: lens("auto"),
        BUFFER: lens("buffer"),
        PACKED: lens("packed"),
        PAIRED: lens("paired"),
    }
    variants = {name: every[name] for name in (PLAIN, *names)}
    with trace.get_tracer("bench").start_as_current_span("step"):
        for name in names:
            carrier = every[name]()
            if carrier is None or "traceparent" not in carrier:
                raise AssertionError(f"{name}: no carrier came, but {carrier}")
        samples = interleave(
            variants, rounds=rounds, calls_per_round=calls, warmup=5, before_each=dist.barrier
        )
    return {name: [time / 2 for time in times] for name, times in samples.items()}
