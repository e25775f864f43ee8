"""One stage of a pipeline-parallel training run, traced: what a Ray actor or a torchrun rank runs.

Every rank makes a :class:`Stage` and calls :meth:`Stage.train_step` for the same steps. A step is
one broadcast of the trace context, then all microbatches forward, then all backward, each tensor
sent by :mod:`lens_contrib.nccl` with the context of the span that computed it.

Spans (all of them children of ``train.step``, which links to rank 0's): ``pp.forward`` and
``pp.backward`` compute and send; ``pp.recv_forward`` and ``pp.recv_backward`` cover the wait and
link to the sender's ``pp.forward`` or ``pp.backward``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final, Literal

from opentelemetry import trace

from lens_contrib.demo.model import StageModel, Text, TrainingConfig
from lens_contrib.nccl import CarrierWork, irecv, isend
from lens_contrib.torch_distributed import broadcast_trace_context
from lens_core.errors import MissingExtraError
from lens_core.links import add_carrier_link, linked_span
from lens_core.semconv import (
    DL_ITERATION,
    DL_MICROBATCH_ID,
    LENS_HOP_DIRECTION,
    LENS_MICROBATCH,
    LENS_PEER_RANK,
    NV_DL_RANK,
)
from lens_core.state import set_pp_trace_carrier

try:
    import torch
    import torch.distributed as dist
    from torch.nn import functional
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["Stage"]

Direction = Literal["forward", "backward"]
#: Value of ``lens.hop.direction`` for the hop from rank 0's step to the other ranks' steps.
BROADCAST: Final = "broadcast"

_tracer = trace.get_tracer("lens_contrib.demo")


class Stage:
    """This rank's stage. Needs an initialized process group of ``world_size`` ranks.

    Args:
        rank: This process's global rank: the stage's place in the pipeline.
        world_size: Number of stages.
        config: The same on every rank.
    """

    def __init__(self, rank: int, world_size: int, config: TrainingConfig | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config or TrainingConfig()
        self.text = Text(self.config)
        self.model = StageModel(rank, world_size, self.config, self.text.characters)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)
        shape = (self.config.microbatch_size, self.config.context, self.config.width)
        self._activation_shape = torch.Size(shape)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of this stage's weights, for a checkpoint."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def train_step(self, step: int) -> float:
        """Train on one step's microbatches; returns their mean loss, on every rank.

        *Collective*: every rank calls it with the same ``step``.
        """
        if self.rank == 0:
            with _tracer.start_as_current_span("train.step", attributes=self._attributes(step)):
                set_pp_trace_carrier(self._share_context(step))
                return self._run(step)
        carrier = self._share_context(step)
        set_pp_trace_carrier(carrier)
        with linked_span(
            _tracer,
            "train.step",
            remote_carrier=carrier,
            span_attributes=self._attributes(step),
            link_attributes={LENS_PEER_RANK: 0, LENS_HOP_DIRECTION: BROADCAST},
        ):
            return self._run(step)

    def _share_context(self, step: int) -> dict[str, str] | None:
        return broadcast_trace_context(self.rank, src_rank=0, step=step)

    def _run(self, step: int) -> float:
        batches = self.text.microbatches(step)
        saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        sends: list[CarrierWork] = []
        for number, (inputs, targets) in enumerate(batches):
            if not self.model.first:
                inputs = self._receive(step, number, "forward", self.rank - 1).requires_grad_()
            with self._hop_span("pp.forward", step, number, "forward", self.rank + 1):
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
            with self._hop_span("pp.backward", step, number, "backward", self.rank - 1):
                if gradient is None:
                    (outputs / len(batches)).backward()  # type: ignore[no-untyped-call]
                else:
                    torch.autograd.backward(outputs, gradient)
                if inputs.grad is not None:
                    self._send(inputs.grad, self.rank - 1, sends)
        for work in sends:
            work.wait()
        with _tracer.start_as_current_span("optimizer.step", attributes=self._attributes(step)):
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return self._mean_loss([outputs for _, outputs in saved])

    def _mean_loss(self, outputs: list[torch.Tensor]) -> float:
        """The last stage's loss, on every rank."""
        loss = torch.zeros(())
        if self.model.last:
            loss = torch.stack([output.detach() for output in outputs]).mean()
        if self.world_size > 1:
            dist.broadcast(loss, self.world_size - 1)
        return float(loss)

    def _send(self, tensor: torch.Tensor, peer: int, sends: list[CarrierWork]) -> None:
        work = isend(tensor, peer)
        if work is not None:
            sends.append(work)

    def _receive(self, step: int, number: int, direction: Direction, peer: int) -> torch.Tensor:
        tensor = torch.empty(self._activation_shape)
        with self._hop_span(f"pp.recv_{direction}", step, number, direction, peer) as span:
            work = irecv(tensor, peer)
            if work is not None:
                work.wait()
                add_carrier_link(
                    span,
                    work.carrier,
                    {
                        LENS_PEER_RANK: peer,
                        LENS_HOP_DIRECTION: direction,
                        LENS_MICROBATCH: number,
                    },
                )
        return tensor

    def _hop_span(
        self, name: str, step: int, number: int, direction: Direction, peer: int
    ) -> AbstractContextManager[trace.Span]:
        attributes = self._attributes(step)
        attributes[DL_MICROBATCH_ID] = number
        attributes[LENS_HOP_DIRECTION] = direction
        if 0 <= peer < self.world_size:
            attributes[LENS_PEER_RANK] = peer
        return _tracer.start_as_current_span(name, attributes=attributes)

    def _attributes(self, step: int) -> dict[str, str | int]:
        return {DL_ITERATION: step, NV_DL_RANK: self.rank}
