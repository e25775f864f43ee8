"""Where a carrier rides where no message of the user's goes along: in a frame of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lens_contrib.torch.frame_buffers import FrameBuffer, frame_buffer
from lens_core.errors import MessageError, MissingExtraError
from lens_core.frame import BROADCAST_CAPACITY, decode_frame, encode_frame
from lens_core.transport import Received

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["BroadcastTransport"]

_new: Final = object.__new__


class BroadcastTransport:
    """A collective moves nothing of the user's: its message is one buffer that holds the frame.

    Attributes:
        name: ``"torch.broadcast"``.
        capacity: Size of the buffer in bytes.
        spare: Buffers of the host that no message uses: :meth:`inject` takes one, and whoever has
            sent it gives it back. One that is taken is nobody else's.
    """

    name = "torch.broadcast"

    def __init__(self, capacity: int = BROADCAST_CAPACITY) -> None:
        self.capacity = capacity
        self.spare: list[FrameBuffer] = []

    def empty(self, device: torch.device | None = None) -> FrameBuffer:
        """A message with nothing on it, to receive into: zeros, ``uint8[capacity]``."""
        buffer = frame_buffer(device=device, capacity=self.capacity)
        buffer.clear()
        return buffer

    def inject(self, message: FrameBuffer, carrier: Mapping[str, str]) -> FrameBuffer:
        """Another buffer, on the message's device, that holds the carrier; waits for no device.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00.
            MessageError: If the message is not a buffer of the capacity.
        """
        if type(message) is not FrameBuffer or message.capacity != self.capacity:
            raise self._error(message)
        frame = encode_frame(carrier, capacity=self.capacity)
        if message.frame is not None and self.spare:
            buffer = self.spare.pop()
        else:
            device = None if message.frame is not None else message.wire.device
            buffer = frame_buffer(device=device, capacity=self.capacity)
        if buffer.frame is not None:
            buffer.frame[:] = frame
        else:
            buffer.put(frame)
        return buffer

    def extract(self, message: FrameBuffer) -> Received[FrameBuffer]:
        """The buffer, and the carrier that it holds; on a device waits for the current stream.

        Raises:
            MessageError: If the message is not a buffer of the capacity.
        """
        if type(message) is not FrameBuffer or message.capacity != self.capacity:
            raise self._error(message)
        frame = message.frame
        # In place of __init__, which is a function more that each broadcast would enter.
        received = _new(Received)
        received.message = message
        received.carrier = decode_frame(message.read() if frame is None else frame)
        return received

    def _error(self, message: object) -> MessageError:
        return MessageError(
            f"the message of a collective is a buffer of {self.capacity} bytes, not {message}; "
            "use BroadcastTransport.empty()"
        )
