"""The demo's Ray actors: one per pipeline stage, and one that samples from the result."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

from opentelemetry import trace

from lens_contrib.ray import traced
from lens_core import NemoLensConfig, TelemetryHandle, setup_telemetry
from lens_core.errors import MissingExtraError
from lens_core.semconv import (
    DL_PIPELINE_PARALLEL_RANK,
    DL_PIPELINE_PARALLEL_SIZE,
    LENS_HOP_DIRECTION,
    LENS_HOP_ID,
    LENS_TRANSPORT,
    NV_DL_RANK,
    NV_DL_WORLD_SIZE,
)
from lens_tools.demo.model import ModelShape, PipelineStage, sample_text
from lens_tools.demo.text import load_corpus
from lens_tools.demo.training import StageTrainer, TrainingPlan

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["SamplerActor", "StageActor", "mark_received"]

#: Longest wait of one rank for another before the run fails.
GROUP_TIMEOUT_S: Final = 60


def mark_received(hop: str) -> None:
    """Name the hop that the current call came by."""
    trace.get_current_span().set_attributes(
        {LENS_HOP_ID: hop, LENS_HOP_DIRECTION: "recv", LENS_TRANSPORT: "ray"}
    )


class StageActor:
    """One rank of the training.

    Args:
        rank: Global rank.
        shape: Size of the whole model; one rank a stage.
        plan: What all ranks agree on.
        text: Path of the text; ``None`` for the one that ships with CPython.
        otlp_endpoint: Base URL of a collector that gets the spans as well.
    """

    def __init__(
        self,
        rank: int,
        shape: ModelShape,
        plan: TrainingPlan,
        text: str | None,
        otlp_endpoint: str | None,
    ) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._world_size = shape.stages
        self._telemetry = setup_telemetry(
            NemoLensConfig.from_env(),
            resource_attributes={
                NV_DL_RANK: rank,
                NV_DL_WORLD_SIZE: shape.stages,
                DL_PIPELINE_PARALLEL_RANK: rank,
                DL_PIPELINE_PARALLEL_SIZE: shape.stages,
            },
            otlp_endpoint=otlp_endpoint,
            # The driver ends these actors; what they recorded must not end with them.
            write_through=True,
        )
        self._trainer = StageTrainer(rank, shape, plan, load_corpus(text))

    @traced
    def form_group(self, store: str, hop: str) -> None:
        """Join the gloo group. *Collective*: every rank calls it with the same path."""
        mark_received(hop)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, self._world_size),  # type: ignore[attr-defined]
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )

    @traced
    def train_step(self, step: int, hop: str) -> float | None:
        """One step of training; its loss on the last rank. *Collective*."""
        mark_received(hop)
        return self._trainer.train_step(step)

    @traced
    def save(self, directory: str, hop: str) -> str:
        """Write this stage's weights; returns the file."""
        mark_received(hop)
        return str(self._trainer.save(Path(directory)))

    def close(self) -> None:
        """Leave the group and send what telemetry is left."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._telemetry.shutdown()


class SamplerActor:
    """Writes text with the trained weights.

    Args:
        otlp_endpoint: Base URL of a collector that gets the spans as well. Without one this actor
            sets no telemetry up: the decorator does, from the environment.
    """

    def __init__(self, otlp_endpoint: str | None) -> None:
        torch.set_num_threads(1)
        self._telemetry: TelemetryHandle | None = None
        if otlp_endpoint is not None:
            self._telemetry = setup_telemetry(
                NemoLensConfig.from_env(), otlp_endpoint=otlp_endpoint, write_through=True
            )

    @traced
    def sample(
        self,
        shape: ModelShape,
        checkpoints: Sequence[str],
        text: str | None,
        prompt: str,
        length: int,
        hop: str,
    ) -> str:
        """The prompt, continued by ``length`` characters."""
        mark_received(hop)
        corpus = load_corpus(text)
        stages = []
        for index, path in enumerate(checkpoints):
            stage = PipelineStage(shape, index)
            stage.load_state_dict(torch.load(path, weights_only=True))
            stages.append(stage.eval())
        ids = sample_text(stages, corpus.encode(prompt), length, shape.context)
        return corpus.decode(ids)

    def close(self) -> None:
        """Send what telemetry is left."""
        if self._telemetry is not None:
            self._telemetry.shutdown()
