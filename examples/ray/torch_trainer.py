"""ray.train's TorchTrainer: its workers' steps in the trace of the driver that calls ``fit``.

    python examples/ray/torch_trainer.py [--out DIR]

Ray Train starts its workers itself, so the context rides in the training function's configuration,
under the name of the argument that a traced function takes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import uuid
from pathlib import Path

import ray
import torch
from opentelemetry import trace
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from trace_tree import print_trees

from lens_contrib.ray import inject_ray_context, runtime_env, traced
from lens_contrib.torch_distributed import broadcast_trace_context
from lens_core import NemoLensConfig, attach_carrier, setup_telemetry

WORKERS, STEPS = 2, 3


@traced
def fit_line(steps: int) -> float:
    """What each worker runs, under a span whose parent is the driver's."""
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracer = trace.get_tracer("torch_trainer")
    rank = torch.distributed.get_rank()
    loss = torch.zeros(())
    for step in range(steps):
        with tracer.start_as_current_span("step") as span:
            span.set_attributes({"dl.iteration": step, "nv.dl.rank": rank})
            # A collective: the spans of all ranks below are children of rank 0's step.
            carrier = broadcast_trace_context(rank)
            with attach_carrier(carrier), tracer.start_as_current_span("forward and backward"):
                inputs = torch.randn(32, 1)
                loss = ((model(inputs) - 3 * inputs) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
    return float(loss.detach())


def train_loop(config: dict[str, object]) -> None:
    """The function that Ray Train calls in each worker."""
    ray.train.report({"loss": fit_line(STEPS, _otel_carrier=config["_otel_carrier"])})


def run(out: Path) -> Path:
    """Train, and return the directory with the telemetry of all processes."""
    run_id = f"torch-trainer-{uuid.uuid4().hex[:8]}"
    os.environ.update(
        NEMO_LENS_ENABLED="1",
        NEMO_LENS_EXPORTER="file",
        NEMO_LENS_OUTPUT_DIR=str(out.resolve()),
        NEMO_LENS_RUN_ID=run_id,
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="60",
    )
    handle = setup_telemetry(NemoLensConfig.from_env())
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=runtime_env())
    try:
        with (
            tempfile.TemporaryDirectory() as storage,
            trace.get_tracer("torch_trainer").start_as_current_span("fit"),
        ):
            trainer = TorchTrainer(
                train_loop,
                train_loop_config={"_otel_carrier": inject_ray_context()},
                scaling_config=ScalingConfig(num_workers=WORKERS),
                run_config=RunConfig(storage_path=storage),
            )
            trainer.fit()
    finally:
        ray.shutdown()
        handle.shutdown()
    return out / run_id


def main() -> None:
    """Parse the arguments, run, and print what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    print_trees(run(parser.parse_args().out))


if __name__ == "__main__":
    main()
