"""Messages for the tests of point-to-point sends, and two ranks that swap them."""

from __future__ import annotations

import torch

from lens_contrib import nccl
from lens_contrib.nccl import PACK_LIMIT_BYTES

MODES = ("auto", "packed", "paired", "buffer")
#: On both sides of the limit, as float32.
SIZES = (1, 1000, PACK_LIMIT_BYTES // 4, PACK_LIMIT_BYTES // 4 + 1)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTIZED, key=str
)
SHAPES = ((), (0,), (2, 0, 3), (5,), (3, 4, 2))


def new_tensor(shape, dtype, mode, fill=None):
    """A tensor for this mode; its bytes count up from ``fill``, or are all 0xEE."""
    tensor = (
        nccl.carrier_buffer(shape, dtype) if mode == "buffer" else torch.empty(shape, dtype=dtype)
    )
    flat = as_bytes(tensor)
    flat.fill_(0xEE)
    if fill is not None:
        flat.copy_((torch.arange(flat.numel()) + fill) % 251)
    return tensor


def as_bytes(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8)


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def error_of(call):
    """The type and text of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def exchange(rank, out, back, mode="auto", **where):
    """Ranks 0 and 1 swap a tensor; the carrier that came."""
    peer = 1 - rank
    if rank == 0:
        nccl.send(out, peer, mode=mode, **where)
        return nccl.recv(back, peer, mode=mode, **where)
    carrier = nccl.recv(back, peer, mode=mode, **where)
    nccl.send(out, peer, mode=mode, **where)
    return carrier
