"""The current context as bytes and back, for those who already move metadata of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from opentelemetry.context import Context

from lens_core.carrier import MAX_CARRIER_BYTES, check_carrier, extract_context
from lens_core.channel import current_carrier
from lens_core.diagnostics import diagnostics
from lens_core.errors import LensError
from lens_core.frame import P2P_CAPACITY, BytesLike, decode_frame, encode_frame

__all__ = ["deserialize_context", "extract_nccl_context", "serialize_context"]

#: JSON escapes at most six characters for one; what is longer cannot hold an allowed carrier.
_MAX_JSON_BYTES: Final = 6 * MAX_CARRIER_BYTES


def serialize_context(*, capacity: int = P2P_CAPACITY) -> bytes:
    """The current context as exactly ``capacity`` bytes, whether or not there is one.

    The size never depends on what is traced, so both sides can agree on it beforehand. Never
    raises for what is in the context; a carrier that is too large loses baggage first, then
    tracestate.

    Args:
        capacity: Size in bytes, at least 45; a larger one has room for more baggage.

    Raises:
        FrameError: If the capacity is out of range.
    """
    try:
        return encode_frame(current_carrier(), capacity=capacity)
    except LensError as error:
        empty = encode_frame({}, capacity=capacity)  # raises again if it was the capacity
        diagnostics.record("carrier.inject_failed", str(error))
        return empty


def deserialize_context(data: bytes | bytearray | memoryview | BytesLike) -> dict[str, str] | None:
    """The carrier in the bytes of :func:`serialize_context`; ``None`` where there is none.

    Zero bytes behind the frame do no harm. The carrier as a JSON object, the form that other
    libraries send, is read too. Never raises: anything malformed gives ``None`` and is counted as
    ``carrier.rejected``.

    Args:
        data: Any object with the buffer protocol, such as ``bytes``, a ``memoryview`` or a NumPy
            array.
    """
    try:
        raw = bytes(memoryview(data))
    except (TypeError, ValueError, BufferError) as error:
        return _reject(f"not bytes-like ({error})")
    if raw.startswith(b"{"):
        return _from_json(raw)
    if not raw:
        return None
    try:
        frame = decode_frame(raw)
    except LensError as error:
        return _reject(str(error))
    return dict(frame.carrier) or None if frame is not None else None


def extract_nccl_context(data: bytes | bytearray | memoryview | BytesLike) -> Context:
    """The context in the bytes of :func:`serialize_context`, as a new context.

    Empty where :func:`deserialize_context` gives ``None``; never the current context. Never raises.

    Args:
        data: Any object with the buffer protocol.
    """
    return extract_context(deserialize_context(data))


def _from_json(raw: bytes) -> dict[str, str] | None:
    if len(raw) > _MAX_JSON_BYTES:
        return _reject(f"{len(raw)} bytes of JSON are too many")
    try:
        carrier: Mapping[str, str] = check_carrier(json.loads(raw.rstrip(b"\0")))
    except (ValueError, RecursionError) as error:
        return _reject(f"not a carrier as JSON ({error})")
    if "traceparent" in carrier and not extract_context(carrier):
        return None  # counted there
    return dict(carrier) or None


def _reject(problem: str) -> dict[str, str] | None:
    """``None``, counted."""
    diagnostics.record(
        "carrier.rejected",
        f"deserialize_context: {problem}",
        todo="Pass exactly what serialize_context returned on the other side.",
    )
    return None
