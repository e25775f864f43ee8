"""One stage of a pipeline-parallel training run, traced: what a Ray actor or a torchrun rank runs.

Every rank makes a :class:`StageTrainer` and calls its ``train_step`` for the same steps. A step is
one broadcast of the trace context, then all microbatches forward, then all backward, each tensor
sent by :mod:`lens_contrib.nccl` with the context of the span that computed it.

Spans, all of them under ``train.step``, which on other ranks links to rank 0's: ``pp.forward`` and
``pp.backward`` compute and send; ``pp.recv_forward`` and ``pp.recv_backward`` cover the wait and
link to the ``pp.forward`` or ``pp.backward`` that sent. Both ends of a hop name it
(``lens.hop.id``) from what they know without a message, so that a reader of the run can hold the
links against the names (:mod:`lens_tools.records.hops`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from opentelemetry import trace

from lens_contrib.nccl import CarrierWork, irecv, isend
from lens_contrib.torch_distributed import BroadcastTransport, broadcast_trace_context
from lens_core.carrier import Carrier
from lens_core.errors import MissingExtraError
from lens_core.links import add_carrier_link, linked_span
from lens_core.semconv import (
    DL_ITERATION,
    DL_MICROBATCH_ID,
    LENS_HOP_DIRECTION,
    LENS_HOP_ID,
    LENS_MICROBATCH,
    LENS_PEER_RANK,
    LENS_TRANSPORT,
)
from lens_core.state import set_pp_trace_carrier
from lens_tools.demo.model import ModelShape, PipelineStage
from lens_tools.demo.text import Corpus

try:
    import torch
    from torch.nn import functional
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["StageTrainer", "TrainingPlan", "broadcast_hops", "point_to_point_hops"]

Way = Literal["forward", "backward"]
_BROADCAST: Final = BroadcastTransport.name
_POINT_TO_POINT: Final = "nccl"

_tracer = trace.get_tracer("lens_tools.demo")


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What all ranks agree on beside the model.

    Attributes:
        microbatches: Microbatches of a step.
        microbatch_size: Sequences of a microbatch.
        learning_rate: Of AdamW.
        seed: Of the parameters and of the order of the data.
    """

    microbatches: int = 4
    microbatch_size: int = 8
    learning_rate: float = 3e-3
    seed: int = 0


def broadcast_hops(ranks: int, steps: int) -> int:
    """How many hops of ``torch.broadcast`` a training has: one to each further rank a step."""
    return (ranks - 1) * steps


def point_to_point_hops(ranks: int, steps: int, plan: TrainingPlan) -> int:
    """How many hops of ``nccl`` a training has: there and back for each microbatch and border."""
    return 2 * (ranks - 1) * plan.microbatches * steps


class StageTrainer:
    """This rank's stage. Needs an initialized process group of one rank a stage when it trains.

    Args:
        rank: This process's global rank: the stage's place in the pipeline.
        shape: Size of the whole model.
        plan: The same on every rank.
        corpus: The text; the same on every rank.
    """

    def __init__(self, rank: int, shape: ModelShape, plan: TrainingPlan, corpus: Corpus) -> None:
        self.rank = rank
        self.world_size = shape.stages
        self.model = PipelineStage(shape, rank, plan.seed)
        self._shape = shape
        self._plan = plan
        self._corpus = corpus
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=plan.learning_rate)

    def save(self, directory: Path) -> Path:
        """Write this stage's weights below a directory; returns the file."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"stage{self.rank}.pt"
        torch.save(self.model.state_dict(), path)
        return path

    def train_step(self, step: int) -> float | None:
        """Train on one step's microbatches; their mean loss on the last rank, ``None`` elsewhere.

        *Collective*: every rank calls it with the same ``step``.
        """
        if self.rank == 0:
            attributes = self._attributes(step, _BROADCAST, "send", f"step {step}")
            with _tracer.start_as_current_span("train.step", attributes=attributes):
                set_pp_trace_carrier(self._share_context(step))
                return self._run(step)
        carrier = self._share_context(step)
        set_pp_trace_carrier(carrier)
        with linked_span(
            _tracer,
            "train.step",
            remote_carrier=carrier,
            span_attributes=self._attributes(step, _BROADCAST, "recv", f"step {step}"),
            link_attributes={LENS_PEER_RANK: 0},
        ):
            return self._run(step)

    def _share_context(self, step: int) -> Carrier | None:
        return broadcast_trace_context(self.rank, src_rank=0, step=step)

    def _run(self, step: int) -> float | None:
        batches = self._microbatches(step)
        saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        sends: list[CarrierWork] = []
        for number, (inputs, targets) in enumerate(batches):
            if not self.model.first:
                inputs = self._receive(step, number, "forward", self.rank - 1).requires_grad_()
            with self._sending("forward", step, number, self.rank + 1):
                outputs = self.model(inputs)
                if self.model.last:
                    outputs = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
                else:
                    self._send(outputs.detach(), self.rank + 1, sends)
            saved.append((inputs, outputs))
        for number, (inputs, outputs) in enumerate(saved):
            gradient = None
            if not self.model.last:
                gradient = self._receive(step, number, "backward", self.rank + 1)
            with self._sending("backward", step, number, self.rank - 1):
                if gradient is None:
                    (outputs / len(batches)).backward()  # type: ignore[no-untyped-call]
                else:
                    torch.autograd.backward(outputs, gradient)
                if inputs.grad is not None:
                    self._send(inputs.grad, self.rank - 1, sends)
        for work in sends:
            work.wait()
        with _tracer.start_as_current_span("optimizer.step", attributes={DL_ITERATION: step}):
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        if not self.model.last:
            return None
        return float(torch.stack([outputs.detach() for _, outputs in saved]).mean())

    def _microbatches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The step's inputs and targets: the same on every rank, with nothing sent for it."""
        plan = self._plan
        first = (plan.seed + step) * plan.microbatches
        return [
            self._corpus.batch(plan.microbatch_size, self._shape.context, first + number)
            for number in range(plan.microbatches)
        ]

    def _send(self, tensor: torch.Tensor, peer: int, sends: list[CarrierWork]) -> None:
        work = isend(tensor, peer)
        if work is not None:
            sends.append(work)

    def _receive(self, step: int, number: int, way: Way, peer: int) -> torch.Tensor:
        tensor = torch.empty(self._plan.microbatch_size, self._shape.context, self._shape.width)
        hop = self._hop(way, step, number, peer, self.rank)
        attributes = self._attributes(step, _POINT_TO_POINT, "recv", hop, number, peer)
        with _tracer.start_as_current_span(f"pp.recv_{way}", attributes=attributes) as span:
            work = irecv(tensor, peer)
            if work is not None:
                work.wait()
                link_attributes = {LENS_PEER_RANK: peer, LENS_MICROBATCH: number}
                add_carrier_link(span, work.carrier, link_attributes)
        return tensor

    def _sending(
        self, way: Way, step: int, number: int, peer: int
    ) -> AbstractContextManager[trace.Span]:
        """The span that computes a microbatch and sends the result, if there is a next stage."""
        if 0 <= peer < self.world_size:
            hop = self._hop(way, step, number, self.rank, peer)
            attributes = self._attributes(step, _POINT_TO_POINT, "send", hop, number, peer)
        else:
            attributes = {DL_ITERATION: step, DL_MICROBATCH_ID: number}
        return _tracer.start_as_current_span(f"pp.{way}", attributes=attributes)

    @staticmethod
    def _hop(way: Way, step: int, number: int, source: int, destination: int) -> str:
        return f"step {step} {way} {number} from {source} to {destination}"

    @staticmethod
    def _attributes(
        step: int,
        transport: str,
        direction: str,
        hop: str,
        number: int | None = None,
        peer: int | None = None,
    ) -> dict[str, str | int]:
        attributes: dict[str, str | int] = {
            DL_ITERATION: step,
            LENS_TRANSPORT: transport,
            LENS_HOP_DIRECTION: direction,
            LENS_HOP_ID: hop,
        }
        if number is not None:
            attributes[DL_MICROBATCH_ID] = number
        if peer is not None:
            attributes[LENS_PEER_RANK] = peer
        return attributes
