"""Trace context on point-to-point messages, over NCCL and over gloo.

:func:`send`, :func:`recv`, :func:`isend`, :func:`irecv` and :func:`batch_isend_irecv` stand in for
``torch.distributed``'s; the receiver gets the carrier of the span that really sent the tensor.
:func:`serialize_context` and :func:`deserialize_context` are for code that moves metadata of its
own; they need no torch.
"""

from __future__ import annotations

from lens_contrib.nccl.codec import deserialize_context, extract_nccl_context, serialize_context
from lens_core.errors import MissingExtraError

try:
    from lens_contrib.nccl.buffers import carrier_buffer
    from lens_contrib.nccl.ops import CarrierWork
    from lens_contrib.nccl.p2p import batch_isend_irecv, irecv, isend, recv, send
    from lens_contrib.nccl.transports import (
        PACK_LIMIT_BYTES,
        BufferTransport,
        PackedTransport,
        PairedTransport,
    )
except MissingExtraError as _missing:
    __getattr__ = _missing.when_asked(globals())

__all__ = [
    "PACK_LIMIT_BYTES",
    "BufferTransport",
    "CarrierWork",
    "PackedTransport",
    "PairedTransport",
    "batch_isend_irecv",
    "carrier_buffer",
    "deserialize_context",
    "extract_nccl_context",
    "irecv",
    "isend",
    "recv",
    "send",
    "serialize_context",
]
