"""Reinforcement learning in small, with the shape of the real thing: one step is one trace.

    python examples/ray/reinforce.py [--steps N] [--out DIR]

A driver, two rollout actors that generate asynchronously, a reward task per sample, and two
trainer actors in a gloo group. The policy learns to write letters in alphabetical order. Every
sample has a link to the span that published the policy version which wrote it, so a trace shows
how old the policy was.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from opentelemetry import trace
from opentelemetry.context import Context
from trace_tree import print_trees

from lens_contrib.ray import inject_ray_context, runtime_env, traced, traced_get
from lens_core import NemoLensConfig, linked_span, setup_telemetry

LETTERS, LENGTH = 6, 8
TRAINERS, ROLLOUT_ACTORS, SAMPLES = 2, 2, 8


@dataclass(frozen=True)
class Policy:
    """Weights, and the span that published them."""

    version: int
    logits: torch.Tensor  # of the next letter, given the last: LETTERS x LETTERS
    carrier: dict[str, str]


@dataclass(frozen=True)
class Sample:
    """What a policy wrote."""

    version: int
    letters: torch.Tensor


@traced
class Rollouts:
    """Generates; several calls run at once in each actor."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self._random = torch.Generator().manual_seed(seed)

    async def generate(self, policy: Policy, count: int) -> AsyncIterator[Sample]:
        """Samples as they are ready."""
        tracer = trace.get_tracer("reinforce")
        for _ in range(count):
            with linked_span(
                tracer, "sample", remote_carrier=policy.carrier, version=policy.version
            ):
                letters = [0]
                for _ in range(LENGTH):
                    chances = policy.logits[letters[-1]].softmax(0)
                    letters.append(int(torch.multinomial(chances, 1, generator=self._random)))
                    await asyncio.sleep(0)
            yield Sample(policy.version, torch.tensor(letters))


@traced
def reward(sample: Sample) -> float:
    """The share of letters that follow their predecessor in the alphabet."""
    letters = sample.letters
    return float(((letters[:-1] + 1) % LETTERS == letters[1:]).float().mean())


@traced
class Trainer:
    """One rank of the group that trains the policy."""

    def __init__(self, rank: int, store: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, TRAINERS), rank=rank, world_size=TRAINERS
        )
        self._logits = torch.zeros(LETTERS, LETTERS, requires_grad=True)
        self._optimizer = torch.optim.Adam([self._logits], lr=0.3)
        self._version = 0

    def publish(self) -> Policy:
        """The policy as it is now, with the context of this call."""
        return Policy(self._version, self._logits.detach().clone(), inject_ray_context())

    def update(self, samples: list[Sample], rewards: list[float]) -> int:
        """One step on this rank's samples; gradients are averaged over the ranks."""
        letters = torch.stack([sample.letters for sample in samples])
        advantage = torch.tensor(rewards) - sum(rewards) / len(rewards)
        chosen = self._logits.log_softmax(1)[letters[:, :-1], letters[:, 1:]]
        loss = -(advantage[:, None] * chosen).mean()
        self._optimizer.zero_grad()
        loss.backward()
        with trace.get_tracer("reinforce").start_as_current_span("all-reduce"):
            dist.all_reduce(self._logits.grad)
        self._optimizer.step()
        self._version += 1
        return self._version


def train_step(
    step: int, rollouts: list[ray.actor.ActorHandle], trainers: list[ray.actor.ActorHandle]
) -> float:
    """One step, under a trace of its own; its mean reward."""
    score = ray.remote(num_cpus=0.5)(reward)
    tracer = trace.get_tracer("reinforce")
    # An empty context: the step is the root of its trace, not a child of the run.
    with tracer.start_as_current_span("step", context=Context(), attributes={"dl.iteration": step}):
        policy = ray.get(trainers[0].publish.remote())
        streams = [actor.generate.remote(policy, SAMPLES) for actor in rollouts]
        samples = [ref for stream in streams for ref in stream]
        rewards = [score.remote(sample) for sample in samples]
        values, written = traced_get(rewards), ray.get(samples)
        share = len(samples) // TRAINERS
        parts = [slice(rank * share, (rank + 1) * share) for rank in range(TRAINERS)]
        updates = [
            trainer.update.remote(written[part], values[part])
            for trainer, part in zip(trainers, parts, strict=True)
        ]
        traced_get(updates, name="wait for the trainers")
    return sum(values) / len(values)


def run(out: Path, steps: int) -> Path:
    """Train, and return the directory with the telemetry of all processes."""
    run_id = f"reinforce-{uuid.uuid4().hex[:8]}"
    os.environ.update(
        NEMO_LENS_ENABLED="1",
        NEMO_LENS_EXPORTER="file",
        NEMO_LENS_OUTPUT_DIR=str(out.resolve()),
        NEMO_LENS_RUN_ID=run_id,
    )
    handle = setup_telemetry(NemoLensConfig.from_env())
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=runtime_env())
    try:
        with tempfile.TemporaryDirectory() as directory:
            rollout_actor = ray.remote(num_cpus=0)(Rollouts)
            trainer_actor = ray.remote(num_cpus=0)(Trainer)
            rollouts = [rollout_actor.remote(seed) for seed in range(ROLLOUT_ACTORS)]
            trainers = [
                trainer_actor.remote(rank, str(Path(directory, "store")))
                for rank in range(TRAINERS)
            ]
            for step in range(steps):
                print(f"step {step}: mean reward {train_step(step, rollouts, trainers):.2f}")
            with suppress(ray.exceptions.RayError):
                for actor in (*rollouts, *trainers):
                    ray.kill(actor)  # as RL drivers end their workers; no span is lost by it
    finally:
        ray.shutdown()
        handle.shutdown()
    return out / run_id


def main() -> None:
    """Parse the arguments, run, and print what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    print_trees(run(arguments.out, arguments.steps))


if __name__ == "__main__":
    main()
