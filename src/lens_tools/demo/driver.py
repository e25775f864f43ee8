"""The demo's Ray driver: starts the actors, calls them step by step, and ends them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from opentelemetry import trace
from opentelemetry.trace import SpanKind

from lens_contrib.ray import runtime_env
from lens_core.semconv import (
    DL_ITERATION,
    LENS_HOP_DIRECTION,
    LENS_HOP_ID,
    LENS_PEER_RANK,
    LENS_TRANSPORT,
)
from lens_tools.demo.actors import SamplerActor, StageActor
from lens_tools.demo.errors import DemoError
from lens_tools.demo.model import ModelShape
from lens_tools.demo.text import load_corpus
from lens_tools.demo.training import TrainingPlan

__all__ = ["DemoResult", "run_demo"]

_CALL_TIMEOUT_S: Final = 90
_SAMPLE_LENGTH: Final = 160
_PROMPT: Final = "\n\nThe "


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the training gave.

    Attributes:
        losses: Mean loss of each step, in nats per character.
        sample: Text that the trained model wrote.
        ray_hops: How many traced calls were made.
    """

    losses: list[float]
    sample: str
    ray_hops: int


def run_demo(
    plan: TrainingPlan,
    *,
    ranks: int,
    steps: int,
    text: str | None,
    directory: Path,
    otlp_endpoint: str | None,
    on_step: Callable[[int, float], None],
    on_phase: Callable[[str], None],
) -> DemoResult:
    """Train over Ray and gloo; the settings of telemetry are those of this process's environment.

    Args:
        plan: What all ranks agree on.
        ranks: Pipeline stages, one actor each.
        steps: Steps of training.
        text: Path of the text; ``None`` for the one that ships with CPython.
        directory: Where checkpoints and the group's store go.
        otlp_endpoint: Base URL of a collector that gets the spans as well.
        on_step: Called after each step with its number and loss.
        on_phase: Called with what happens next, for a person who waits.

    Raises:
        TextError: If nothing can be trained on the text.
        DemoError: If an actor fails or does not answer.
    """
    symbols = len(load_corpus(text).characters)
    shape = ModelShape(symbols, ranks, layers=max(4, ranks))
    on_phase("starting Ray")
    with _local_ray(ranks):
        try:
            driver = _Driver(shape, plan, text, otlp_endpoint)
            return driver.run(steps, directory, on_step, on_phase)
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            raise DemoError(f"an actor failed: {lines[-1] if lines else error!r}") from error


@contextmanager
def _local_ray(ranks: int) -> Iterator[None]:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        # A cluster of our own, even where RAY_ADDRESS names one: the demo is no guest there.
        address="local",
        num_cpus=ranks + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=100 * 1024 * 1024,
        runtime_env=runtime_env({"env_vars": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}}),
    )
    try:
        yield
    finally:
        ray.shutdown()


class _Driver:
    """Calls the actors, each call under a span of its own that names the hop."""

    def __init__(
        self, shape: ModelShape, plan: TrainingPlan, text: str | None, otlp: str | None
    ) -> None:
        self._shape = shape
        self._text = text
        self._tracer = trace.get_tracer("lens_tools.demo")
        self._calls = 0
        stage = ray.remote(StageActor)
        # Any: an actor's handle has the methods of its class only when it runs.
        self._stages: list[Any] = [
            stage.remote(rank, shape, plan, text, otlp) for rank in range(shape.stages)
        ]
        self._sampler: Any = ray.remote(SamplerActor).remote(otlp)

    def run(
        self,
        steps: int,
        directory: Path,
        on_step: Callable[[int, float], None],
        on_phase: Callable[[str], None],
    ) -> DemoResult:
        """The whole run, under one root span."""
        losses = []
        with self._tracer.start_as_current_span("job"):
            on_phase(f"starting {len(self._stages)} stages and a sampler")
            checkpoints = directory / "checkpoints"
            checkpoints.mkdir(parents=True, exist_ok=True)
            self._on_all_stages("form_group", str(directory / "gloo-store"))
            on_phase("training")
            for step in range(steps):
                loss = self._on_all_stages("train_step", step, step=step)[-1]
                if not isinstance(loss, float):
                    raise DemoError(f"the last stage gave no loss in step {step}, but {loss!r}")
                losses.append(loss)
                on_step(step, loss)
            on_phase("saving and sampling")
            files = self._on_all_stages("save", str(checkpoints))
            sampled = self._call(
                self._sampler,
                "sample",
                "sample",
                {},
                (self._shape, files, self._text, _PROMPT, _SAMPLE_LENGTH),
            )
            sample = ray.get(sampled, timeout=_CALL_TIMEOUT_S)
        closing = [actor.close.remote() for actor in (*self._stages, self._sampler)]
        ray.get(closing, timeout=_CALL_TIMEOUT_S)
        return DemoResult(losses, str(sample), self._calls)

    def _on_all_stages(
        self, method: str, *arguments: object, step: int | None = None
    ) -> Sequence[object]:
        """Call a method on every stage at once; what each returned, by rank."""
        about = {} if step is None else {DL_ITERATION: step}
        references = [
            self._call(
                stage,
                method,
                f"{method}/{step}/rank {rank}",
                {**about, LENS_PEER_RANK: rank},
                arguments,
            )
            for rank, stage in enumerate(self._stages)
        ]
        answers: Sequence[object] = ray.get(references, timeout=_CALL_TIMEOUT_S)
        return answers

    def _call(
        self,
        actor: object,
        method: str,
        hop: str,
        about: Mapping[str, int],
        arguments: Sequence[object],
    ) -> ray.ObjectRef[object]:
        with self._tracer.start_as_current_span(
            f"call {method}",
            kind=SpanKind.PRODUCER,
            attributes={
                **about,
                LENS_HOP_ID: hop,
                LENS_HOP_DIRECTION: "send",
                LENS_TRANSPORT: "ray",
            },
        ):
            self._calls += 1
            reference: ray.ObjectRef[object] = getattr(actor, method).remote(*arguments, hop=hop)
            return reference
