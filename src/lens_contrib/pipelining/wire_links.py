"""Links by frames: each payload operation is followed by one more, on both sides.

For contexts that cannot be derived. Where a frame goes depends on the payload operations alone, of
which torch has to post the same on both ends; so both ends post the same frames, whatever either
knows of stages, and whether or not it traces. A rank without a span sends a frame that says so.
"""

from __future__ import annotations

from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

from lens_contrib.torch.frame_buffers import FrameBuffer
from lens_contrib.torch_distributed.transports import BroadcastTransport
from lens_core.channel import Channel
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


class _FrameTransport(BroadcastTransport):
    """A frame of its own, as in a collective, beside the payload of a pipeline."""

    name = "pipelining.wire"


_transport: Final = _FrameTransport(P2P_CAPACITY)


class Wire:
    """The frames of one pipeline on this rank, counted for each pair of stages."""

    def __init__(self) -> None:
        self._channels: dict[Pair, Channel[FrameBuffer]] = {}
        #: Of this step, by ``id`` of their tensors: a work that nobody holds would let go of them.
        self._in_flight: dict[int, FrameBuffer] = {}

    def new_step(self) -> None:
        """Let go of what was sent in the step before; its works have been waited for."""
        self._in_flight.clear()

    def send_op(self, like: dist.P2POp, pair: Pair, span: Span) -> dist.P2POp:
        """The operation that sends the context of a span where a payload operation goes.

        Args:
            like: A payload operation to the same peer.
            pair: Direction, source and destination stage.
            span: The sender's span.
        """
        # The span's context is made here: on the training thread another one is current.
        context = trace.set_span_in_context(span)
        empty = _transport.empty(like.tensor.device)
        frame = self._channel(pair).outgoing(empty, context=context)
        self._in_flight[id(frame.wire)] = frame
        return dist.P2POp(dist.isend, frame.wire, like.peer, like.group, like.tag)

    def recv_op(self, like: dist.P2POp) -> dist.P2POp:
        """The operation that receives a frame from where a payload operation comes."""
        frame = _transport.empty(like.tensor.device)
        self._in_flight[id(frame.wire)] = frame
        return dist.P2POp(dist.irecv, frame.wire, like.peer, like.group, like.tag)

    def due(self, pair: Pair) -> int:
        """The number of the frame whose receive is posted now; each call is one receive."""
        sequence = self._channel(pair).sequence
        return sequence.due(next(sequence.posted))

    def read(self, tensor: torch.Tensor, pair: Pair, due: int) -> Context:
        """The sender's context; empty where it had none, or what came is not the frame due.

        Args:
            tensor: What the frame was received into; the operation was waited for.
            pair: Direction, source and destination stage.
            due: What :meth:`due` gave for it.
        """
        # Several receives are posted ahead, so a count that is off is not followed.
        return (
            self._channel(pair)
            .arrived(self._in_flight[id(tensor)], due=due, follow=False)
            .carrier.context()
        )

    def _channel(self, pair: Pair) -> Channel[FrameBuffer]:
        channel = self._channels.get(pair)
        if channel is None:
            direction, source, destination = pair
            channel = self._channels[pair] = Channel(
                _transport, where=lambda: f"{direction} of stage {source} to stage {destination}"
            )
        return channel
