"""What goes over the wire for one tensor, in each of the three modes.

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

from typing import Final, Literal

from lens_core.errors import MessageError, MissingExtraError

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = [
    "PACK_LIMIT_BYTES",
    "Mode",
    "check_message",
    "choose_mode",
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


def choose_mode(tensor: torch.Tensor, mode: Mode) -> Mode:
    """The mode in force for this tensor: never ``"auto"``."""
    if mode == "auto":
        return "packed" if tensor.nbytes <= PACK_LIMIT_BYTES else "paired"
    if mode not in ("packed", "paired", "buffer"):
        raise MessageError(f"mode={mode!r} is not one of auto, packed, paired, buffer")
    return mode
