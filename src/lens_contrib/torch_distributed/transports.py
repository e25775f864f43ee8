"""Where a carrier rides where no message of the user's goes along: in a frame of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from lens_contrib.torch.frame_buffers import on_device
from lens_core.errors import MessageError, MissingExtraError
from lens_core.frame import BROADCAST_CAPACITY, decode_frame, encode_frame
from lens_core.transport import Received

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["BroadcastTransport"]


class BroadcastTransport:
    """A collective moves nothing of the user's: its message is one tensor that holds the frame.

    Attributes:
        name: ``"torch.broadcast"``.
        capacity: Size of the tensor in bytes.
    """

    name = "torch.broadcast"

    def __init__(self, capacity: int = BROADCAST_CAPACITY) -> None:
        self.capacity = capacity
        self._memory = ctypes.c_ubyte * capacity

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """A message with nothing on it, to receive into: zeros, ``uint8[capacity]``."""
        return torch.zeros(self.capacity, dtype=torch.uint8, device=device)

    def inject(self, message: torch.Tensor, carrier: Mapping[str, str]) -> torch.Tensor:
        """A new tensor, on the message's device, that holds the carrier; waits for no device.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00.
            MessageError: If the message is not a ``uint8`` tensor of the capacity.
        """
        if message.dtype != torch.uint8 or message.numel() != self.capacity:
            raise self._error(message)
        frame = bytearray(encode_frame(carrier, capacity=self.capacity))
        host = torch.frombuffer(frame, dtype=torch.uint8)
        return host if message.is_cpu else on_device(host, message.device)

    def extract(self, message: torch.Tensor) -> Received[torch.Tensor]:
        """The tensor, and the carrier that it holds; on a device waits for the current stream.

        Raises:
            MessageError: If the message is not a ``uint8`` tensor of the capacity.
        """
        if message.dtype != torch.uint8 or message.numel() != self.capacity:
            raise self._error(message)
        if message.is_cpu and message.is_contiguous():
            # In place: to bring a tensor's bytes to Python costs more than to read a frame.
            return Received(message, decode_frame(self._memory.from_address(message.data_ptr())))
        return Received(message, decode_frame(bytes(message.tolist())))

    def _error(self, message: torch.Tensor) -> MessageError:
        return MessageError(
            f"the message of a collective is a uint8 tensor of {self.capacity} bytes, not "
            f"{message.dtype} of shape {tuple(message.shape)}; use BroadcastTransport.empty()"
        )
