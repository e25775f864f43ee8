"""What it costs to know the trace of a step: derived ids beside everything that sends a message.

A training-like loop on gloo, compute and one all_reduce a step, with 2 and 4 ranks. Every variant
runs in every round, in a shuffled order, and is paired with the plain step of the same round; the
plain step is there twice, as an A/A control. A sample is the time of the slowest rank.
"""

from __future__ import annotations

import json
import statistics
import time
import timeit

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.ratios import Report, interleave
from benchmarks.slowest import slowest_rank
from lens_core import extract_context, inject_context, linked_span
from lens_core.identity import HopId, Identity, RunKey, StepScope, hop_span, step_span
from lens_core.identity.derive import Deriver
from lens_core.telemetry.ids import PrivateIdGenerator
from tests.gloo import run_ranks

PLAIN = "plain step"
SPAN = "an ordinary span of the SDK, no link"
DERIVED = "derived: step span, linked to the owner's"
HOPS = "derived, and a send and a linked recv span"
FRAME = "one-frame collective, linked span"
STORE = "store: publish, read after the work"
TWO = "two messages: length, then payload"
_KEY = RunKey(bytes(range(16)))


class _Nowhere(SpanExporter):
    def export(self, spans):
        return SpanExportResult.SUCCESS


def run(report: Report) -> None:
    _ids(report)
    _per_rank(report)
    _store_reads(report)
    for world_size, multiplications, rounds in (
        (2, 6, 200),
        (4, 6, 200),
        (2, 150, 100),
        (4, 150, 100),
    ):
        samples = slowest_rank(run_ranks(_loop, world_size, 500, multiplications, rounds))
        length = "a short step" if multiplications == 6 else "a step"
        report.title(f"{length} of compute + all_reduce, gloo, {world_size} ranks")
        report.table(samples, PLAIN)
        for name in samples:
            print(f"  added to the step by {name}: {_shown(_added(samples, name))}")
        report.same(samples, PLAIN, DERIVED, judge=length == "a step")


def _ids(report: Report) -> None:
    report.title("one derived id")
    deriver, hop = Deriver(_KEY), HopId("forward", 0, 1, 3)
    scope = StepScope(Identity(_KEY, rank=0), "step", 7, 0)
    for name, call in {
        "trace id of a step": lambda: deriver.ids("step", 7, 0)[0],
        "span id of a hop": lambda: deriver.ids("hop", "step", 7, 0, "forward", 0, 1, 3),
    }.items():
        us = min(timeit.repeat(call, number=20_000, repeat=7)) / 20_000 * 1e6
        report.figure(name, us, "us", at_most=3.0)
    us = min(timeit.repeat(lambda: scope.hop_ids(hop), number=20_000, repeat=7)) / 20_000 * 1e6
    report.figure("context of a hop, as what a traceparent says", us, "us")


def _per_rank(report: Report) -> None:
    report.title("processor time of one rank for a step span and a link, by number of ranks")
    medians = {}
    for world_size in (2, 8, 32):
        times = run_ranks(_one_at_a_time, world_size, 300, group_timeout_s=200.0)
        medians[world_size] = statistics.median(times)
        report.figure(f"{world_size} ranks", medians[world_size], "us")
    report.figure("32 ranks / 2 ranks", medians[32] / medians[2], "x", at_most=1.25)


def _one_at_a_time(rank, world_size):
    import torch.distributed as dist

    tracer, who = null_tracer(), Identity(_KEY, rank=rank)
    times = []
    for turn in range(world_size):
        if turn == rank:
            for step in range(0, 1_000, 50):
                start = time.thread_time_ns()
                for number in range(step, step + 50):
                    with step_span(number, tracer=tracer, identity=who):
                        pass
                times.append((time.thread_time_ns() - start) / 50e3)
        dist.barrier()
    # The least disturbed run of 50: other processes of a shared machine empty the caches.
    return min(times)


def _store_reads(report: Report) -> None:
    report.title("reads a second from one TCP store's server, 4 ranks reading at once")
    port = _free_port()
    rates = run_ranks(_read_store, 4, 120, port)
    report.figure("reads a second", sum(rates), "1/s")


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _read_store(rank, world_size, port):
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    if rank == 0:
        store.set("context", "x" * 256)
    dist.barrier()
    start, reads = time.perf_counter(), 2_000
    for _ in range(reads):
        store.get("context")
    rate = reads / (time.perf_counter() - start)
    dist.barrier()
    return rate


def null_tracer():
    provider = TracerProvider(id_generator=PrivateIdGenerator(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_Nowhere()))
    return provider.get_tracer("bench")


def _loop(rank, world_size, multiplications, rounds):
    import torch
    import torch.distributed as dist

    from lens_contrib.torch.published_context import StoreContext
    from lens_contrib.torch_distributed import broadcast_trace_context

    tracer, who = null_tracer(), Identity(_KEY, rank=rank)
    a, gradient = torch.randn(160, 160), torch.randn(64 * 1024)
    channel = StoreContext(dist.group.WORLD.get_group_store(), world_size=world_size)
    to, source, steps = (rank + 1) % world_size, (rank - 1) % world_size, iter(range(10**9))

    def work():
        for _ in range(multiplications):
            a @ a
        dist.all_reduce(gradient)

    def ordinary():
        with tracer.start_as_current_span("step"):
            work()

    def derived():
        with step_span(next(steps), tracer=tracer, identity=who):
            work()

    def with_hops():
        with step_span(next(steps), tracer=tracer, identity=who):
            with hop_span("send_forward", peer=to, microbatch=0, tracer=tracer):
                pass
            with hop_span("recv_forward", peer=source, microbatch=0, tracer=tracer):
                pass
            work()

    def linked(carrier):
        with linked_span(tracer, "step", remote_carrier=carrier):
            work()

    def one_frame():
        with tracer.start_as_current_span("source"):
            carrier = broadcast_trace_context(rank, 0)
        linked(carrier)

    def through_the_store():
        if rank == 0:
            with tracer.start_as_current_span("source"):
                channel.publish()
        with tracer.start_as_current_span("step") as span:
            work()
            context = extract_context(channel.latest())
            sender = trace.get_current_span(context).get_span_context()
            if sender.is_valid:
                span.add_link(sender)

    def two_messages():
        with tracer.start_as_current_span("source"):
            data = json.dumps(inject_context({})).encode() if rank == 0 else b""
            length = torch.tensor([len(data)])
            dist.broadcast(length, 0)
            payload = torch.empty(int(length.item()), dtype=torch.uint8)
            if rank == 0:
                payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(payload, 0)
            carrier = json.loads(payload.numpy().tobytes())
        linked(carrier)

    return interleave(
        {PLAIN: work, SPAN: ordinary, DERIVED: derived, HOPS: with_hops, FRAME: one_frame,
         STORE: through_the_store, TWO: two_messages},
        rounds=rounds,
        warmup=10,
        before_each=dist.barrier,
    )  # fmt: skip


def _added(samples, name):
    """Median and 95 % interval of what a variant adds to the plain step, in microseconds."""
    import random

    paired = [one - plain for one, plain in zip(samples[name], samples[PLAIN], strict=True)]
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(paired, k=len(paired))) for _ in range(400))
    return statistics.median(paired), medians[9], medians[389]


def _shown(added) -> str:
    return "{:.0f} us [{:.0f}, {:.0f}]".format(*added)
