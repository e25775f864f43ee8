"""Tensors with room for a frame behind them, for sends and receives that copy nothing."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Final

from lens_contrib.nccl.messages import TensorMessage
from lens_contrib.torch.frame_buffers import FrameBuffer
from lens_core.errors import MessageError, MissingExtraError
from lens_core.frame import P2P_CAPACITY

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["carrier_buffer", "room_behind"]

_new: Final = object.__new__
_QUANTIZED: Final = frozenset(
    (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
)


class _Allocation:
    """What is known of one tensor of :func:`carrier_buffer`, to tell that it is still the same."""

    __slots__ = ("buffer", "shape", "start", "tensor", "wire")

    def __init__(self, buffer: FrameBuffer, tensor: torch.Tensor) -> None:
        self.buffer = buffer
        self.wire = (buffer.wire,)
        self.start = tensor.data_ptr()
        self.shape = tensor.shape
        # Weak: the tensor's life is the user's; with it goes this entry.
        key = id(tensor)
        self.tensor = weakref.ref(tensor, lambda _: _allocations.pop(key, None))


#: By ``id`` of the tensor: tensors compare element by element, so they cannot be keys.
_allocations: Final[dict[int, _Allocation]] = {}


def carrier_buffer(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """An uninitialized tensor with room for a frame behind it, for ``mode="buffer"``.

    Sending and receiving it copies nothing. It is a leaf like any other (``requires_grad_`` works);
    ``torch.save`` stores the 256 bytes behind it too. What has room is this tensor object, not
    its views or copies: fill it in place (``copy_``, ``out=``), and pass the object itself.

    Args:
        shape: Shape of the tensor.
        dtype: Any dtype but the quantized ones.
        device: Where it is allocated.

    Raises:
        MessageError: If the dtype is a quantized one.
    """
    if dtype in _QUANTIZED:
        raise MessageError(
            f"a carrier_buffer cannot hold the scale of {dtype}; use the dtype of int_repr()"
        )
    size = torch.Size(shape)
    payload = size.numel() * dtype.itemsize
    wire = torch.empty(payload + P2P_CAPACITY, dtype=torch.uint8, device=device)
    tensor = wire[:payload].view(dtype).view(size)
    memory: memoryview | None = None
    if wire.is_cpu:
        memory = memoryview((ctypes.c_ubyte * wire.numel()).from_address(wire.data_ptr())).cast("B")
    buffer = FrameBuffer(wire, memory, P2P_CAPACITY)
    buffer.clear()
    _allocations[id(tensor)] = _Allocation(buffer, tensor)
    return tensor


def room_behind(tensor: torch.Tensor) -> TensorMessage:
    """A message in the memory of a tensor of :func:`carrier_buffer`, with the room behind it.

    Raises:
        MessageError: If the tensor is not one, or was moved to other memory since.
    """
    known = _allocations.get(id(tensor))
    if (
        known is None
        or known.tensor() is not tensor
        or tensor.data_ptr() != known.start
        or tensor.shape != known.shape
    ):
        raise MessageError(
            'mode="buffer" needs the very tensor that carrier_buffer() returned, not a view or a '
            "copy of it and not after .data or set_() moved it; copy_() into it, or use another "
            "mode on both sides"
        )
    # In place of __init__: a message is sent with cold caches, where each function of Python that
    # it enters counts.
    message = _new(TensorMessage)
    message.tensor, message.wire, message.buffer = tensor, known.wire, known.buffer
    message.packed = False
    return message
