"""Where a carrier rides where no message of the user's goes along: in a frame of its own."""

from __future__ import annotations

from collections.abc import Mapping

from lens_contrib.torch.frame_buffers import FrameBuffer, frame_buffer
from lens_core.errors import MessageError, MissingExtraError
from lens_core.frame import BROADCAST_CAPACITY
from lens_core.transport import Received

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["BroadcastTransport"]


class BroadcastTransport:
    """A collective moves nothing of the user's: its message is one buffer that holds the frame.

    Attributes:
        name: ``"torch.broadcast"``.
        capacity: Size of the buffer in bytes.
    """

    name = "torch.broadcast"

    def __init__(self, capacity: int = BROADCAST_CAPACITY) -> None:
        self.capacity = capacity

    def empty(self, device: torch.device | None = None) -> FrameBuffer:
        """A message with nothing on it, to receive into: zeros, ``uint8[capacity]``."""
        buffer = frame_buffer(device or torch.device("cpu"), capacity=self.capacity)
        buffer.clear()
        return buffer

    def inject(self, message: FrameBuffer, carrier: Mapping[str, str]) -> FrameBuffer:
        """A buffer of its own, on the message's device, that holds the carrier.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00.
            MessageError: If the message is not a buffer of the capacity.
        """
        self._check(message)
        buffer = frame_buffer(message.wire.device, capacity=self.capacity)
        buffer.put(carrier)
        return buffer

    def extract(self, message: FrameBuffer) -> Received[FrameBuffer]:
        """The buffer, and the carrier that it holds.

        Raises:
            MessageError: If the message is not a buffer of the capacity.
        """
        self._check(message)
        return Received(message, message.carrier())

    def _check(self, message: FrameBuffer) -> None:
        if type(message) is not FrameBuffer or message.capacity != self.capacity:
            raise MessageError(
                f"the message of a collective is a buffer of {self.capacity} bytes, not {message}; "
                "use BroadcastTransport.empty()"
            )
