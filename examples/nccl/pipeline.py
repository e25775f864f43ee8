"""A pipeline-parallel training under torchrun, with the true sender of every tensor in its trace.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/nccl/pipeline.py

Four ranks train the stages of a small character transformer on CPython's own documentation. A step
is one ``broadcast_trace_context``; activations and gradients travel by ``lens_contrib.nccl``. Every
rank writes its spans to an OTLP JSON Lines file. At the end rank 0 reads them back and holds every
receiver against the span that really sent to it; exit status 1 if one points elsewhere.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lens_core import NemoLensConfig, setup_telemetry
from lens_core.semconv import NV_DL_RANK, NV_DL_WORLD_SIZE
from lens_tools.demo.model import ModelShape
from lens_tools.demo.text import load_corpus
from lens_tools.demo.training import (
    StageTrainer,
    TrainingPlan,
    broadcast_hops,
    point_to_point_hops,
)
from lens_tools.records import HopResolution, read_records, resolve_hops, run_directory


def main() -> int:
    """Train, then check the trace; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--text", type=Path, help="UTF-8 text to train on")
    parser.add_argument("--out", default="runs", help="directory that holds one directory per run")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run_id = _shared_run_id()
    telemetry = setup_telemetry(
        NemoLensConfig(
            enabled=True, exporter="file", run_id=run_id, output_dir=os.path.abspath(arguments.out)
        ),
        resource_attributes={NV_DL_RANK: rank, NV_DL_WORLD_SIZE: ranks},
    )

    corpus = load_corpus(arguments.text)
    plan = TrainingPlan()
    trainer = StageTrainer(rank, ModelShape(len(corpus.characters), ranks), plan, corpus)
    losses: list[float] = []
    for step in range(arguments.steps):
        loss = trainer.train_step(step)
        if loss is not None:  # only the last stage knows it
            losses.append(loss)
            if step % 10 == 0 or step == arguments.steps - 1:
                print(f"step {step:>4}: loss {loss:.3f}", flush=True)

    telemetry.shutdown()
    dist.barrier()  # every file is complete
    healthy = not losses or arguments.steps < 10 or losses[-1] < losses[0]
    if rank == 0:
        expected = {
            "torch.broadcast": broadcast_hops(ranks, arguments.steps),
            "nccl": point_to_point_hops(ranks, arguments.steps, plan),
        }
        healthy = _check(run_directory(arguments.out, run_id), expected)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if healthy else 1


def _shared_run_id() -> str:
    """The run's name: that of the environment, or one that rank 0 makes up."""
    named = os.environ.get("NEMO_LENS_RUN_ID", "")
    choice = [named or time.strftime("pipeline-%Y%m%d-%H%M%S-") + secrets.token_hex(2)]
    dist.broadcast_object_list(choice, 0)
    return str(choice[0])


def _check(directory: Path, expected: dict[str, int]) -> bool:
    """Print how every kind of hop fared; whether all receivers point at their true sender."""
    run = read_records(directory)
    print(f"\n{len(run.files)} files, {len(run.spans):,} spans in {directory}")
    healthy = not run.problems
    found = resolve_hops(run.spans)
    for transport, hops in expected.items():
        fared = found.get(transport, HopResolution(transport))
        healthy &= fared.receivers == fared.resolved == hops
        print(
            f"{transport}: {fared.resolved:,} of {hops:,} receivers resolved to their true sender"
        )
        for problem in fared.problems[:5]:
            print(f"  {problem}")
    return healthy


if __name__ == "__main__":
    sys.exit(main())
