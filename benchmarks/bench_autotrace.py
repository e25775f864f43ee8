"""What tracing a script as it is adds to a step and to a collective, on the thread that trains."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor

from benchmarks.ratios import Report, interleave

ROUNDS, STEPS, COLLECTIVES = 150, 4, 50


def run(report: Report) -> None:
    # A process of its own: what is set up and hooked for a job stays in it.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        for title, samples in pool.submit(_measure).result().items():
            report.title(f"{title}, {ROUNDS} rounds, microseconds beside not recorded")
            plain = samples.pop("not recorded")
            for name, times in samples.items():
                added = [one - other for one, other in zip(times, plain, strict=True)]
                report.figure(name, statistics.median(added), "us")


def _measure() -> dict[str, dict[str, list[float]]]:
    os.environ.update(
        NEMO_LENS_EXPORTER="file",
        NEMO_LENS_OUTPUT_DIR=tempfile.mkdtemp(),
        NEMO_LENS_RUN_KEY="ab" * 16,
        NEMO_LENS_RUN_ID="bench",
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
    )
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    from lens_contrib.torch import instrument
    from lens_contrib.torch.autotrace.recorder import recorder
    from lens_core import set_enabled_span_groups

    torch.set_num_threads(1)
    instrument()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = iter(DataLoader(TensorDataset(torch.randn(200_000, 64)), 16))
    tensor = torch.zeros(4)

    def step() -> None:
        model(next(batches)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def level(groups: str, work: object, count: int) -> object:
        def repeated() -> None:
            recorder.is_live = bool(groups)
            if groups:
                set_enabled_span_groups(groups)
            for _ in range(count):
                work()

        return repeated

    found = {}
    for title, work, count in (
        ("a DDP step", step, STEPS),
        ("an all_reduce", lambda: dist.all_reduce(tensor), COLLECTIVES),
    ):
        variants = {
            name: level(groups, work, count)
            for name, groups in (("not recorded", ""), ("slots", "slots"), ("spans", "spans"))
        }
        samples = interleave(variants, rounds=ROUNDS)
        found[title] = {name: [us / count for us in times] for name, times in samples.items()}
    recorder.is_live = False
    return found
