"""Tensors with room for a frame behind them, for sends and receives that copy nothing."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Final

from lens_contrib.torch.frames import outgoing_frame
from lens_contrib.torch.tensors import frame_tensor, tensor_bytes
from lens_core.errors import MessageError, MissingExtraError
from lens_core.frame import P2P_CAPACITY
from lens_core.span_frame import write_span_frame

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["Slack", "carrier_buffer", "slack_of"]

_NO_FRAME: Final = bytes(P2P_CAPACITY)
_QUANTIZED: Final = frozenset(
    (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
)


class Slack:
    """The memory behind a tensor of :func:`carrier_buffer`: a room whose bytes are the tensor's.

    Attributes:
        wire: ``uint8``: the tensor's bytes and the frame, what is sent and received.
        frame: ``uint8[256]``: the frame's part of ``wire``.
        on_host: Whether Python reads the frame in place.
        view: The frame's bytes for Python, where they are on the host; else ``None``.
        tensor: The tensor, weakly.
        start: Address of its first element.
        shape: Its shape.
    """

    __slots__ = ("frame", "on_host", "shape", "start", "tensor", "view", "wire")

    def __init__(self, wire: torch.Tensor, tensor: torch.Tensor) -> None:
        self.wire = wire
        self.frame = wire[-P2P_CAPACITY:]
        self.view: memoryview | None = None
        self.on_host = wire.is_cpu
        if wire.is_cpu:
            memory = (ctypes.c_ubyte * P2P_CAPACITY).from_address(self.frame.data_ptr())
            self.view = memoryview(memory).cast("B")
        self.start = tensor.data_ptr()
        self.shape = tensor.shape
        # Weak: the tensor's life is the user's; with it goes this entry.
        key = id(tensor)
        self.tensor = weakref.ref(tensor, lambda _: _slacks.pop(key, None))

    def write(self, number: int) -> None:
        """Put the current context's frame there; never raises, never waits for a device."""
        if self.view is None:
            frame = outgoing_frame(P2P_CAPACITY, number)
            self.frame.copy_(frame_tensor(frame, self.frame.device))
        elif not write_span_frame(self.view, number):
            self.view[:] = outgoing_frame(P2P_CAPACITY, number)

    def clear(self) -> None:
        """Make it hold no frame."""
        if self.view is not None:
            self.view[:] = _NO_FRAME
        else:
            self.frame.zero_()

    def read(self) -> bytes | memoryview:
        """The frame's bytes, until the next message; on a device this waits for the stream."""
        return self.view if self.view is not None else tensor_bytes(self.frame)

    def pack(self, tensor: torch.Tensor) -> None:
        """Nothing to do: the tensor's bytes are there."""

    def unpack(self, tensor: torch.Tensor) -> None:
        """Nothing to do: the bytes are the tensor's."""

    def give_back(self) -> None:
        """Nothing to do: the memory is the user's."""


#: By ``id`` of the tensor: tensors compare element by element, so they cannot be keys.
_slacks: Final[dict[int, Slack]] = {}


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
    wire[payload:].zero_()
    _slacks[id(tensor)] = Slack(wire, tensor)
    return tensor


def slack_of(tensor: torch.Tensor) -> Slack:
    """The memory behind a tensor of :func:`carrier_buffer`.

    Raises:
        MessageError: If the tensor is not one, or was moved to other memory since.
    """
    slack = _slacks.get(id(tensor))
    if (
        slack is None
        or slack.tensor() is not tensor
        or tensor.data_ptr() != slack.start
        or tensor.shape != slack.shape
    ):
        raise MessageError(
            'mode="buffer" needs the very tensor that carrier_buffer() returned, not a view or a '
            "copy of it and not after .data or set_() moved it; copy_() into it, or use another "
            "mode on both sides"
        )
    return slack
