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
from ctypes import memmove
from typing import Final, Literal

from lens_contrib.nccl.buffers import room_behind
from lens_contrib.nccl.messages import TensorMessage, check_tensor
from lens_contrib.torch.frame_buffers import frame_buffer
from lens_core.errors import MessageError, MissingExtraError
from lens_core.frame import P2P_CAPACITY, decode_frame, encode_frame
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
    "auto_mode",
    "transport_of",
]

#: How a carrier travels; ``"auto"`` is ``"packed"`` up to :data:`PACK_LIMIT_BYTES`, else
#: ``"paired"``.
Mode = Literal["auto", "packed", "paired", "buffer"]

_new: Final = object.__new__
_NO_FRAME: Final = bytes(P2P_CAPACITY)
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
            MessageError: If no carrier can ride on this tensor; says what to send instead.
        """
        raise NotImplementedError

    def expect(self, tensor: torch.Tensor) -> TensorMessage:
        """A message to receive into, that holds no frame yet.

        Raises:
            MessageError: If no carrier can ride on this tensor.
        """
        message = self.room(tensor)
        buffer = message.buffer
        assert buffer is not None  # room() made one
        # The last message's frame may be there, and a peer that sends none would revive it.
        if buffer.frame is not None:
            buffer.frame[:] = _NO_FRAME
        else:
            buffer.clear()
        return message

    def inject(self, message: TensorMessage, carrier: Mapping[str, str]) -> TensorMessage:
        """The message with its wire, of one size with any carrier.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00.
            MessageError: If no carrier can ride on this tensor.
        """
        tensor = message.tensor
        sent = self.room(tensor)
        buffer = sent.buffer
        assert buffer is not None  # room() made one
        frame = encode_frame(carrier, capacity=P2P_CAPACITY)
        # In place, not in methods of the buffer: on the host this is done once per message.
        if buffer.frame is not None:
            if sent.packed:
                memmove(buffer.address, tensor.data_ptr(), buffer.size)
            buffer.frame[:] = frame
        else:
            if sent.packed:
                buffer.pack(tensor)
            buffer.put(frame)
        return sent

    def extract(self, message: TensorMessage) -> Received[TensorMessage]:
        """The message with what arrived in its tensor, and the carrier.

        On a device this waits for the current stream, to read the frame.
        """
        buffer = message.buffer
        if buffer is None:
            return Received(message)
        frame = buffer.frame
        if frame is None:
            message.unpack()
            return Received(message, decode_frame(buffer.read()))
        if message.packed:
            memmove(message.tensor.data_ptr(), buffer.address, buffer.size)
            message.packed = False
        # In place of __init__, which is a function more that each message would enter.
        received = _new(Received)
        received.message, received.carrier = message, decode_frame(frame)
        return received


class PackedTransport(TensorTransport):
    """One message: the tensor's bytes, then the frame."""

    name = "nccl.packed"

    def room(self, tensor: torch.Tensor) -> TensorMessage:
        """A message whose wire is one ``uint8`` of the tensor's size and 256 more."""
        check_tensor(tensor)
        buffer = frame_buffer(tensor.nbytes, device=None if tensor.is_cpu else tensor.device)
        return TensorMessage(tensor, (buffer.wire,), buffer, packed=True)


class PairedTransport(TensorTransport):
    """Two messages: the tensor as it is, then a ``uint8[256]`` that holds the frame."""

    name = "nccl.paired"

    def room(self, tensor: torch.Tensor) -> TensorMessage:
        """A message whose wire is the tensor and a frame on its device."""
        check_tensor(tensor)
        buffer = frame_buffer(device=None if tensor.is_cpu else tensor.device)
        # Back ends know no complex numbers.
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return TensorMessage(tensor, (plain, buffer.wire), buffer)


class BufferTransport(TensorTransport):
    """One message and no copy: the frame is in the room behind a ``carrier_buffer`` tensor."""

    name = "nccl.buffer"
    room = staticmethod(room_behind)


_transports: Final[Mapping[str, TensorTransport]] = {
    "packed": PackedTransport(),
    "paired": PairedTransport(),
    "buffer": BufferTransport(),
}


def auto_mode(tensor: torch.Tensor) -> Mode:
    """What ``"auto"`` is for this tensor."""
    # A sparse tensor has no nbytes; it is refused where its room is made, with what to do.
    sparse = tensor.layout is not torch.strided
    return "packed" if sparse or tensor.nbytes <= PACK_LIMIT_BYTES else "paired"


def transport_of(mode: Mode) -> TensorTransport:
    """The transport of a mode that is not ``"auto"``.

    Raises:
        MessageError: If there is no such mode.
    """
    try:
        return _transports[mode]
    except KeyError:
        raise MessageError(f"mode={mode!r} is not one of auto, packed, paired, buffer") from None
