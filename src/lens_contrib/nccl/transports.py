"""Where a carrier rides on a point-to-point message: packed, paired, or in a buffer's own room.

``packed``
    One message: the tensor's bytes, then the frame. Costs a copy on both sides.
``paired``
    Two messages: the tensor as it is, then the frame. Costs a second operation.
``buffer``
    One message and no copy: the tensor was allocated by ``carrier_buffer``, with room for the
    frame behind it.

The mode follows from the tensor's size in bytes and from the call, which both sides know alike,
and from nothing that may differ between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from lens_contrib.nccl.buffers import room_behind
from lens_contrib.nccl.messages import TensorMessage, check_tensor
from lens_contrib.torch.frame_buffers import frame_buffer
from lens_core.carrier import Carrier
from lens_core.errors import MessageError, MissingExtraError
from lens_core.transport import Received

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = [
    "PACK_LIMIT_BYTES",
    "BufferTransport",
    "Mode",
    "PackedTransport",
    "PairedTransport",
    "TensorTransport",
    "transport_for",
]

#: How a carrier travels; ``"auto"`` is ``"packed"`` up to :data:`PACK_LIMIT_BYTES`, else
#: ``"paired"``.
Mode = Literal["auto", "packed", "paired", "buffer"]

#: Largest tensor, in bytes, that ``"auto"`` packs. Up to here a copy on both sides is cheaper than
#: a second message (``benchmarks/bench_p2p.py`` prints both on each side of the limit).
PACK_LIMIT_BYTES: Final = 256 * 1024


class TensorTransport:
    """What the three ways have in common: a message is a tensor with room for a frame.

    Attributes:
        name: Name of the transport.
    """

    name: str

    def room(self, tensor: torch.Tensor) -> TensorMessage:
        """A message with its room, of which the frame's part may hold anything.

        Raises:
            MessageError: If no carrier can ride on this tensor.
        """
        raise NotImplementedError

    def check(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor on which no carrier can ride.

        Raises:
            MessageError: If it is one; says what to send instead.
        """
        check_tensor(tensor)

    def expected(self, tensor: torch.Tensor) -> TensorMessage:
        """A message to receive into, that holds no frame yet.

        Raises:
            MessageError: If no carrier can ride on this tensor.
        """
        message = self.room(tensor)
        if message.buffer is not None:
            # The last message's frame may be there, and a peer that sends none would revive it.
            message.buffer.clear()
        return message

    def inject(self, message: TensorMessage, carrier: Mapping[str, str]) -> TensorMessage:
        """The message with its wire, of one size with any carrier.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00.
            MessageError: If no carrier can ride on this tensor.
        """
        sent = self.room(message.tensor)
        if sent.buffer is not None:
            if sent.packed:
                sent.buffer.pack(message.tensor)
            sent.buffer.put(carrier)
        return sent

    def extract(self, message: TensorMessage) -> Received[TensorMessage]:
        """The message with what arrived in its tensor, and the carrier.

        On a device this waits for the current stream, to read the frame.
        """
        buffer = message.buffer
        if buffer is None:
            return Received(message, Carrier())
        if message.packed:
            message.unpack()
        return Received(message, buffer.carrier())


class PackedTransport(TensorTransport):
    """One message: the tensor's bytes, then the frame."""

    name = "nccl.packed"

    def room(self, tensor: torch.Tensor) -> TensorMessage:
        """A message whose wire is one ``uint8`` of the tensor's size and 256 more."""
        self.check(tensor)
        buffer = frame_buffer(tensor.device, tensor.nbytes)
        return TensorMessage(tensor, (buffer.wire,), buffer, packed=True)


class PairedTransport(TensorTransport):
    """Two messages: the tensor as it is, then a ``uint8[256]`` that holds the frame."""

    name = "nccl.paired"

    def room(self, tensor: torch.Tensor) -> TensorMessage:
        """A message whose wire is the tensor and a frame on its device."""
        self.check(tensor)
        buffer = frame_buffer(tensor.device)
        # Back ends know no complex numbers.
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return TensorMessage(tensor, (plain, buffer.wire), buffer)


class BufferTransport(TensorTransport):
    """One message and no copy: the frame is in the room behind a ``carrier_buffer`` tensor."""

    name = "nccl.buffer"

    def check(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that is not one of ``carrier_buffer``."""
        room_behind(tensor)

    def room(self, tensor: torch.Tensor) -> TensorMessage:
        """A message whose wire is the tensor's own memory with the room behind it."""
        buffer = room_behind(tensor)
        return TensorMessage(tensor, (buffer.wire,), buffer)


_packed: Final = PackedTransport()
_paired: Final = PairedTransport()
_by_mode: Final[Mapping[str, TensorTransport]] = {
    "packed": _packed,
    "paired": _paired,
    "buffer": BufferTransport(),
}


def transport_for(tensor: torch.Tensor, mode: Mode) -> TensorTransport:
    """The transport of a mode, for this tensor.

    Raises:
        MessageError: If there is no such mode.
    """
    if mode == "auto":
        # A sparse tensor has no nbytes; it is refused where its room is made, with what to do.
        sparse = tensor.layout is not torch.strided
        return _packed if sparse or tensor.nbytes <= PACK_LIMIT_BYTES else _paired
    try:
        return _by_mode[mode]
    except KeyError:
        raise MessageError(f"mode={mode!r} is not one of auto, packed, paired, buffer") from None
