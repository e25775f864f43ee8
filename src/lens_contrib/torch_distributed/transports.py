"""Where a carrier rides in a collective: the message is the frame itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lens_contrib.torch.tensors import frame_tensor, tensor_bytes
from lens_core.errors import FrameError, MessageError, MissingExtraError
from lens_core.frame import BROADCAST_CAPACITY, decode_frame, encode_frame
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

    name: Final = "torch.broadcast"

    def __init__(self, capacity: int = BROADCAST_CAPACITY) -> None:
        self.capacity = capacity

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """A message with nothing on it: zeros, ``uint8[capacity]``."""
        return torch.zeros(self.capacity, dtype=torch.uint8, device=device)

    def inject(self, message: torch.Tensor, carrier: Mapping[str, str]) -> torch.Tensor:
        """A new buffer, on the message's device, that holds the carrier.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00.
            MessageError: If the message is not a ``uint8`` tensor of the capacity.
        """
        self._check(message)
        frame = encode_frame(carrier, capacity=self.capacity)
        return frame_tensor(frame, message.device)

    def extract(self, message: torch.Tensor) -> Received[torch.Tensor]:
        """The carrier, and an empty buffer; a buffer that holds no frame comes back as it is.

        Raises:
            MessageError: If the message is not a ``uint8`` tensor of the capacity.
        """
        self._check(message)
        try:
            frame = decode_frame(tensor_bytes(message))
        except FrameError as error:
            return Received(torch.zeros_like(message), rejected=error.problem)
        if frame is None:
            return Received(message)
        return Received(torch.zeros_like(message), frame.carrier, truncated=frame.truncated)

    def _check(self, message: torch.Tensor) -> None:
        if message.dtype != torch.uint8 or message.shape != (self.capacity,):
            raise MessageError(
                f"the message of a collective is a uint8 tensor of {self.capacity} bytes, not "
                f"{message.dtype} of shape {tuple(message.shape)}; use BroadcastTransport.empty()"
            )
