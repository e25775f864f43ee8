"""Where a carrier rides on a point-to-point message: packed, paired, or in a buffer's slack.

A receiver of a point-to-point message knows the tensor that it expects; so do these transports.
That is how a message on which nothing was injected is told from one with a frame: by its size,
never by its content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from lens_contrib.nccl.buffers import carrier_buffer, slack_of
from lens_contrib.nccl.modes import check_message
from lens_contrib.nccl.rooms import payload_bytes
from lens_contrib.torch.tensors import frame_tensor, tensor_bytes
from lens_core.errors import FrameError, MessageError, MissingExtraError
from lens_core.frame import P2P_CAPACITY, decode_frame, encode_frame
from lens_core.transport import Received

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["BufferTransport", "PackedTransport", "PairedTransport"]


_M = TypeVar("_M")


class PackedTransport:
    """One message: the tensor's bytes, then the frame.

    Args:
        like: A tensor of the shape and dtype that the receiver expects; not kept.
    """

    name: Final = "nccl.packed"

    def __init__(self, like: torch.Tensor) -> None:
        check_message(like)
        self._shape, self._dtype, self._size = like.shape, like.dtype, like.nbytes

    def inject(self, message: torch.Tensor, carrier: Mapping[str, str]) -> torch.Tensor:
        """``uint8`` of the message's size and 256 more, on the message's device.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00.
            MessageError: If the message is not of the expected shape and dtype, or not dense.
        """
        if not self._expected(message):
            raise MessageError(
                f"expected {self._dtype} of shape {tuple(self._shape)}, got {message.dtype} of "
                f"shape {tuple(message.shape)}; both sides must name the same tensor"
            )
        check_message(message)
        frame = frame_tensor(encode_frame(carrier, capacity=P2P_CAPACITY), message.device)
        return torch.cat((payload_bytes(message), frame))

    def extract(self, message: torch.Tensor) -> Received[torch.Tensor]:
        """The tensor, viewing the message's memory, and the carrier.

        Raises:
            MessageError: If the message has neither the expected tensor's size nor that and a
                frame's.
        """
        if self._expected(message):
            return Received(message)
        if message.dtype != torch.uint8 or message.shape != (self._size + P2P_CAPACITY,):
            raise MessageError(
                f"expected uint8 of {self._size + P2P_CAPACITY} bytes, got {message.dtype} of "
                f"shape {tuple(message.shape)}; both sides must use the same mode"
            )
        payload = message[: self._size].view(self._dtype).view(self._shape)
        return _received(payload, tensor_bytes(message[self._size :]))

    def _expected(self, message: torch.Tensor) -> bool:
        return message.dtype == self._dtype and message.shape == self._shape


class PairedTransport:
    """One more message: the tensors as they are, then one tensor that holds the frame.

    Args:
        count: How many tensors the receiver expects.
    """

    name: Final = "nccl.paired"

    def __init__(self, count: int = 1) -> None:
        self._count = count

    def inject(
        self, message: Sequence[torch.Tensor], carrier: Mapping[str, str]
    ) -> list[torch.Tensor]:
        """The same tensors and a ``uint8[256]``, on the device of the last one.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00.
            MessageError: If there are more or fewer tensors than expected, or one is not dense.
        """
        if len(message) != self._count or not message:
            raise MessageError(f"expected {self._count} tensors, got {len(message)}")
        for tensor in message:
            check_message(tensor)
        frame = encode_frame(carrier, capacity=P2P_CAPACITY)
        return [*message, frame_tensor(frame, message[-1].device)]

    def extract(self, message: Sequence[torch.Tensor]) -> Received[Sequence[torch.Tensor]]:
        """The tensors, and the carrier.

        Raises:
            MessageError: If there are neither the expected number of tensors nor one more.
        """
        if len(message) == self._count:
            return Received(message)
        if len(message) != self._count + 1:
            raise MessageError(f"expected {self._count + 1} tensors, got {len(message)}")
        *tensors, frame = message
        return _received(tensors, tensor_bytes(frame))


class BufferTransport:
    """No copy on the wire's path: the frame is in the slack of a :func:`carrier_buffer` tensor."""

    name: Final = "nccl.buffer"

    def inject(self, message: torch.Tensor, carrier: Mapping[str, str]) -> torch.Tensor:
        """A new buffer with the message's content and the frame.

        A transport changes no message, so this one copies; ``send(mode="buffer")`` writes the frame
        into the slack of the user's own buffer, which is no part of the message.

        Raises:
            CarrierError: If the carrier is not a mapping of strings to strings.
            FrameError: If its ``traceparent`` is not one of version 00.
            MessageError: If the message is not a tensor of :func:`carrier_buffer`.
        """
        slack_of(message)
        frame = encode_frame(carrier, capacity=P2P_CAPACITY)
        copy = carrier_buffer(message.shape, message.dtype, message.device)
        copy.data.copy_(message.data)
        slack_of(copy).frame.copy_(frame_tensor(frame, message.device))
        return copy

    def extract(self, message: torch.Tensor) -> Received[torch.Tensor]:
        """The message itself, and the carrier from its slack.

        Raises:
            MessageError: If the message is not a tensor of :func:`carrier_buffer`.
        """
        return _received(message, tensor_bytes(slack_of(message).frame))


def _received(message: _M, frame_bytes: bytes) -> Received[_M]:
    try:
        frame = decode_frame(frame_bytes)
    except FrameError as error:
        return Received(message, rejected=error.problem)
    if frame is None:
        return Received(message)
    return Received(message, frame.carrier, truncated=frame.truncated)
