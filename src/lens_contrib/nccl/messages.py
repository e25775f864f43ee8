"""What goes over the wire for one tensor, in each of the three modes.

``packed``
    One message: the tensor's bytes, then the frame. Costs a copy on both sides.
``paired``
    Two messages: the tensor as it is, then the frame. Costs a second operation.
``buffer``
    One message and no copy: the tensor was allocated by :func:`carrier_buffer`, with room for the
    frame behind it.

The mode follows from the tensor's size in bytes and from the call, which both sides know alike,
and from nothing that may differ between them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Final, Literal

from lens_core.errors import MessageError, MissingExtraError
from lens_core.frame import P2P_CAPACITY

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = [
    "PACK_LIMIT_BYTES",
    "Mode",
    "Slack",
    "carrier_buffer",
    "check_message",
    "choose_mode",
    "payload_bytes",
    "slack_of",
]

#: How a carrier travels; ``"auto"`` is ``"packed"`` up to :data:`PACK_LIMIT_BYTES`, else
#: ``"paired"``.
Mode = Literal["auto", "packed", "paired", "buffer"]

#: Largest tensor, in bytes, that ``"auto"`` packs. Up to here a copy on both sides is cheaper than
#: a second message (``benchmarks/bench_p2p.py`` prints both on each side of the limit).
PACK_LIMIT_BYTES: Final = 256 * 1024


def check_message(tensor: torch.Tensor) -> None:
    """Refuse a tensor on which no carrier can ride.

    Raises:
        MessageError: If it is not a dense, contiguous tensor; says what to send instead.
    """
    if not isinstance(tensor, torch.Tensor):
        raise MessageError(f"expected a torch.Tensor, got {type(tensor).__name__}")
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
    # Not left to view(uint8): that succeeds on some non-contiguous tensors, with wrong bytes.
    if not tensor.is_contiguous():
        raise MessageError(
            f"the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous; send .contiguous(), and receive into a contiguous tensor (torch.empty), "
            "then copy_() it to where it belongs"
        )


def choose_mode(tensor: torch.Tensor, mode: Mode) -> Mode:
    """The mode in force for this tensor: never ``"auto"``."""
    if mode == "auto":
        return "packed" if tensor.nbytes <= PACK_LIMIT_BYTES else "paired"
    if mode not in ("packed", "paired", "buffer"):
        raise MessageError(f"mode={mode!r} is not one of auto, packed, paired, buffer")
    return mode


def payload_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as a flat ``uint8`` tensor."""
    # .data: plain dist.recv writes behind autograd's back as well, and a version bump here could
    # raise in a backward pass that works without lens.
    return tensor.data.reshape(-1).view(torch.uint8)


class Slack:
    """The memory behind a tensor of :func:`carrier_buffer`.

    Attributes:
        wire: ``uint8``: the tensor's bytes and the frame, what is sent and received.
        frame: ``uint8[256]``: the frame's part of ``wire``.
        view: The same bytes for Python, where they are on the host; else ``None``.
    """

    __slots__ = ("_shape", "_start", "frame", "tensor", "view", "wire")

    def __init__(self, wire: torch.Tensor, tensor: torch.Tensor) -> None:
        self.wire = wire
        self.frame = wire[-P2P_CAPACITY:]
        self.view: memoryview | None = None
        if wire.device.type == "cpu":
            memory = (ctypes.c_ubyte * P2P_CAPACITY).from_address(self.frame.data_ptr())
            self.view = memoryview(memory).cast("B")
        self._start = wire.data_ptr()
        self._shape = tensor.shape
        # Weak: the tensor's life is the user's; with it goes this entry.
        key = id(tensor)
        self.tensor = weakref.ref(tensor, lambda _: _slacks.pop(key, None))

    def belongs_to(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is still the one that was allocated, on the same memory."""
        return (
            self.tensor() is tensor
            and tensor.data_ptr() == self._start
            and tensor.shape == self._shape
        )


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
        dtype: Any dtype that torch can view as bytes.
        device: Where it is allocated.

    Raises:
        MessageError: If tensors of this dtype cannot be viewed as bytes.
    """
    size = torch.Size(shape)
    try:
        payload = size.numel() * torch.empty(0, dtype=dtype).element_size()
        wire = torch.empty(payload + P2P_CAPACITY, dtype=torch.uint8, device=device)
        tensor = wire[:payload].view(dtype).view(size)
    except (RuntimeError, NotImplementedError) as error:
        raise MessageError(f"no carrier_buffer of {dtype}: {error}") from None
    wire[payload:].zero_()
    _slacks[id(tensor)] = Slack(wire, tensor)
    return tensor


def slack_of(tensor: torch.Tensor) -> Slack:
    """The memory behind a tensor of :func:`carrier_buffer`.

    Raises:
        MessageError: If the tensor is not one, or was moved to other memory since.
    """
    slack = _slacks.get(id(tensor))
    if slack is None or not slack.belongs_to(tensor):
        raise MessageError(
            'mode="buffer" needs the very tensor that carrier_buffer() returned, not a view or a '
            "copy of it and not after .data or set_() moved it; copy_() into it, or use another "
            "mode on both sides"
        )
    return slack
