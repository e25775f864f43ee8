"""One tensor on its way, with the room in which its frame travels."""

from __future__ import annotations

from collections.abc import Sequence

from lens_contrib.torch.frame_buffers import FrameBuffer
from lens_core.errors import MessageError, MissingExtraError

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["TensorMessage", "check_tensor"]


class TensorMessage:
    """What the user sends or receives, and what goes over the wire for it.

    Attributes:
        tensor: The user's tensor.
        wire: The tensors to send or receive into, in order; none where no carrier was put on it.
        buffer: Where the frame is, the last of ``wire``; ``None`` where there is none.
        packed: Whether the tensor's bytes travel in front of the frame, and are not in the tensor
            yet.
    """

    __slots__ = ("buffer", "packed", "tensor", "wire")

    def __init__(
        self,
        tensor: torch.Tensor,
        wire: Sequence[torch.Tensor] = (),
        buffer: FrameBuffer | None = None,
        *,
        packed: bool = False,
    ) -> None:
        self.tensor = tensor
        self.wire = wire
        self.buffer = buffer
        self.packed = packed

    def unpack(self) -> None:
        """Copy the bytes of a packed message into its tensor; on a device in stream order."""
        if self.packed and self.buffer is not None:
            self.buffer.unpack(self.tensor)
            self.packed = False

    def release(self) -> None:
        """No operation uses its room any more."""
        if self.buffer is not None and self.buffer.reusable:
            self.buffer.release()


def check_tensor(tensor: torch.Tensor) -> None:
    """Refuse a tensor on which no carrier can ride.

    Raises:
        MessageError: If it is not a dense, contiguous tensor; says what to send instead.
    """
    if (
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    ):
        return
    if tensor.layout is not torch.strided:
        raise MessageError(
            f"a tensor of layout {tensor.layout} has no single run of bytes; send its parts "
            "(such as .indices() and .values() after .coalesce()), or .to_dense()"
        )
    if tensor.is_quantized:
        raise MessageError(
            f"a quantized tensor ({tensor.dtype}) cannot be viewed as bytes; send .int_repr() and "
            "the scale, or .dequantize()"
        )
    if tensor.is_conj():
        raise MessageError(
            "the tensor is a lazy conjugate; send .resolve_conj(), and receive into a plain tensor"
        )
    if tensor.is_neg():
        raise MessageError(
            "the tensor is a lazy negative; send .resolve_neg(), and receive into a plain tensor"
        )
    raise MessageError(
        f"the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
        "contiguous; send .contiguous(), and receive into a contiguous tensor (torch.empty), "
        "then copy_() it to where it belongs"
    )
