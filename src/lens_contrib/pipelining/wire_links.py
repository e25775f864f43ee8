"""Links by frames: each payload operation is followed by one more, on both sides.

For contexts that cannot be derived. Where a frame goes depends on the payload operations alone, of
which torch has to post the same on both ends; so both ends post the same frames, whatever either
knows of stages, and whether or not it traces. A rank without a span sends a frame that says so.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

from lens_contrib.torch.frames import Turns, outgoing_frame
from lens_contrib.torch.tensors import frame_tensor, tensor_bytes
from lens_core.carrier import extract_context
from lens_core.detach import detach
from lens_core.errors import MissingExtraError
from lens_core.frame import P2P_CAPACITY

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["WIRE_VERSION", "Wire"]

#: Version of what is sent: raised when a rank with the old one could not read the new one.
WIRE_VERSION: Final = 1


#: Direction (``forward`` or ``backward``), source stage, destination stage.
Pair = tuple[str, int, int]


class _Arrivals:
    """Frames that arrive of one pair of stages."""

    __slots__ = ("posted", "turns")

    def __init__(self, pair: Pair) -> None:
        self.posted = 0
        self.turns = Turns(lambda: f"{pair[0]} of stage {pair[1]} to stage {pair[2]}")


class Wire:
    """The frames of one pipeline on this rank, counted for each pair of stages."""

    def __init__(self) -> None:
        self._sent: Counter[Pair] = Counter()
        self._arrivals: dict[Pair, _Arrivals] = {}
        self._alive: list[torch.Tensor] = []

    def new_step(self) -> None:
        """Let go of what was sent in the step before; its works have been waited for."""
        self._alive.clear()

    def send_op(self, like: dist.P2POp, pair: Pair, span: Span) -> dist.P2POp:
        """The operation that sends the context of a span where a payload operation goes.

        Args:
            like: A payload operation to the same peer.
            pair: Direction, source and destination stage.
            span: The sender's span.
        """
        number = self._sent[pair]
        self._sent[pair] = number + 1
        token = otel_context.attach(trace.set_span_in_context(span))
        try:
            frame = outgoing_frame(capacity=P2P_CAPACITY, sequence=number)
        finally:
            detach(token)
        tensor = frame_tensor(frame, like.tensor.device)
        self._alive.append(tensor)  # a work that nobody holds would let go of it too early
        return dist.P2POp(dist.isend, tensor, like.peer, like.group, like.tag)

    def recv_op(self, like: dist.P2POp) -> dist.P2POp:
        """The operation that receives a frame from where a payload operation comes."""
        tensor = torch.zeros(P2P_CAPACITY, dtype=torch.uint8, device=like.tensor.device)
        self._alive.append(tensor)  # likewise
        return dist.P2POp(dist.irecv, tensor, like.peer, like.group, like.tag)

    def due(self, pair: Pair) -> int:
        """The number of the frame whose receive is posted now; each call is one receive."""
        arrivals = self._arrivals.get(pair)
        if arrivals is None:
            arrivals = self._arrivals[pair] = _Arrivals(pair)
        number = arrivals.turns.due(arrivals.posted)
        arrivals.posted += 1
        return number

    def read(self, tensor: torch.Tensor, pair: Pair, due: int) -> Context:
        """The sender's context; empty where it had none, or what came is not the frame due.

        Args:
            tensor: What the frame was received into; the operation was waited for.
            pair: Direction, source and destination stage.
            due: What :meth:`due` gave for it.
        """
        # Several receives are posted ahead, so a count that is off is not followed.
        carrier = self._arrivals[pair].turns.read(tensor_bytes(tensor), due, follow=False)
        return extract_context(carrier)
