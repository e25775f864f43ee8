"""What tracing a pipeline schedule costs: a training step with and without, in one interleaved run.

Gloo, 2 and 4 ranks, 8 microbatches. Each variant has its own copy of the model; all run in every
round, in a shuffled order. A sample is the time of the slowest rank.

A stage has the weights of one transformer block of its width, 12 width**2: no pipeline has smaller
ones. The bounds are for such stages. The same with stages of a single linear layer is printed too,
without a bound: the floor, what the spans of a step cost beside next to no work.
"""

from __future__ import annotations

from benchmarks.bench_derived_ids import null_tracer
from benchmarks.ratios import Report, interleave
from benchmarks.slowest import slowest_rank
from tests.gloo import run_ranks

PLAIN = "not instrumented"
DERIVED = 'links="derived"'
WIRE = 'links="wire"'
_SMALL = {"width": 512, "rows": 8}  # 16 KiB of float32 in each message
_LARGE = {"width": 512, "rows": 512}  # 1 MiB


def run(report: Report) -> None:
    from tests.pipelining.programs import SCHEDULES

    for world_size in (2, 4):
        for name in SCHEDULES:
            samples = slowest_rank(run_ranks(_rank, world_size, 300, name, _SMALL, 20, True))
            report.title(f"{name}, {world_size} ranks, 16 KiB activations")
            report.table(samples, PLAIN, bounds={DERIVED: 1.15})
    for world_size in (2, 4):
        samples = slowest_rank(run_ranks(_rank, world_size, 500, "Schedule1F1B", _LARGE, 12, True))
        report.title(f"Schedule1F1B, {world_size} ranks, 1 MiB activations")
        report.table(samples, PLAIN)
        for links in (DERIVED, WIRE):
            report.same(samples, PLAIN, links)
    for world_size, size, kib in ((2, _SMALL, 16), (2, _LARGE, 1024), (4, _LARGE, 1024)):
        samples = slowest_rank(run_ranks(_rank, world_size, 500, "Schedule1F1B", size, 20, False))
        report.title(
            f"Schedule1F1B, {world_size} ranks, {kib} KiB activations, one linear layer a stage"
        )
        report.table(samples, PLAIN)


def _block(width):
    import torch

    inner = 6 * width
    layers = torch.nn.Linear(width, inner), torch.nn.GELU(), torch.nn.Linear(inner, width)
    return torch.nn.Sequential(*layers)


def _rank(rank, world_size, name, size, rounds, blocks):
    import torch
    import torch.distributed as dist

    from lens_contrib.pipelining import instrument_pipelining
    from lens_core.identity import Identity, RunKey, install_identity, step_span
    from tests.pipelining.programs import MICROBATCHES, build, one_layer

    install_identity(Identity(RunKey(bytes(range(16))), rank=rank))
    tracer = null_tracer()
    x = torch.randn(MICROBATCHES * size["rows"], size["width"])
    steps = iter(range(10**9))

    def variant(links):
        schedule, _, first, last = build(
            rank, world_size, name, width=size["width"], layers=_block if blocks else one_layer
        )
        if links:
            instrument_pipelining(schedule, links, name=links, tracer=tracer)

        def step():
            schedule.step(*((x,) if first else ()), **({"target": x} if last else {}))

        def traced_step():
            with step_span(next(steps), tracer=tracer):
                step()

        return traced_step if links else step

    return interleave(
        {PLAIN: variant(""), DERIVED: variant("derived"), WIRE: variant("wire")},
        rounds=rounds,
        warmup=3,
        before_each=dist.barrier,
    )
