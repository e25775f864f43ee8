"""The current context as bytes and back, for those who already move metadata of their own."""

from __future__ import annotations

import json
from typing import Final

from opentelemetry.context import Context

from lens_core.carrier import Carrier
from lens_core.carrier_size import MAX_CARRIER_BYTES
from lens_core.channel import Channel
from lens_core.diagnostics import diagnostics
from lens_core.errors import FrameError
from lens_core.frame import HEADER_BYTES, MAX_CAPACITY, P2P_CAPACITY, BytesLike
from lens_core.frame_transport import FrameTransport
from lens_core.propagation import extract_context, read_carrier

__all__ = ["deserialize_context", "extract_nccl_context", "serialize_context"]

#: JSON escapes at most six characters for one; what is longer cannot hold an allowed carrier.
_MAX_JSON_BYTES: Final = 6 * MAX_CARRIER_BYTES
_channel: Final = Channel(FrameTransport())


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
    if not HEADER_BYTES <= capacity <= MAX_CAPACITY:
        raise FrameError(f"capacity {capacity} is outside {HEADER_BYTES}..{MAX_CAPACITY} bytes")
    return Channel(FrameTransport(capacity)).outgoing(b"", sequence=0)


def deserialize_context(data: bytes | bytearray | memoryview | BytesLike) -> Carrier | None:
    """The carrier in the bytes of :func:`serialize_context`; ``None`` where there is none.

    Zero bytes behind the frame do no harm. The carrier as a JSON object, the form that other
    libraries send, is read too. Never raises: anything malformed gives a falsy carrier whose
    ``status`` is ``rejected``, and is counted as ``carrier.rejected``.

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
    return _channel.arrived(raw).carrier.or_none()


def extract_nccl_context(data: bytes | bytearray | memoryview | BytesLike) -> Context:
    """The context in the bytes of :func:`serialize_context`, as a new context.

    Empty where :func:`deserialize_context` gives ``None``; never the current context. Never raises.

    Args:
        data: Any object with the buffer protocol.
    """
    return extract_context(deserialize_context(data))


def _from_json(raw: bytes) -> Carrier | None:
    if len(raw) > _MAX_JSON_BYTES:
        return _reject(f"{len(raw)} bytes of JSON are too many")
    try:
        return read_carrier(json.loads(raw.rstrip(b"\0"))).or_none()
    except (ValueError, RecursionError) as error:
        return _reject(f"not a carrier as JSON ({error})")


def _reject(problem: str) -> Carrier:
    """A refused carrier, counted."""
    diagnostics.record(
        "carrier.rejected",
        f"deserialize_context: {problem}",
        todo="Pass exactly what serialize_context returned on the other side.",
    )
    return Carrier.refused(problem, reported=True)
