"""The frame of a span alone, written and read in as few calls as can be.

Most messages carry a ``traceparent`` and nothing else. For them these two functions do what
:func:`~lens_core.frame.encode_frame` of the injected context and
:func:`~lens_core.frame.decode_frame` do; whatever is not so simple they leave to those. Code that
runs once per message runs with cold caches, several times slower than a loop around it shows, and
what counts then is over how many functions it is spread (``benchmarks/bench_broadcast.py``).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import DEFAULT_TRACE_STATE, SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lens_core.carrier import get_global_textmap
from lens_core.frame import HEADER_BYTES, TRACEPARENT_ONLY

__all__ = ["read_span_frame", "write_span_frame"]

# The layout of lens_core.frame: the prefix, the checksum, and what the checksum covers.
_IDS: Final = struct.Struct("<Q16s8sB")
_IDS_AT: Final = HEADER_BYTES - _IDS.size
_CRC_OF_PREFIX: Final = zlib.crc32(TRACEPARENT_ONLY)


class _Whole:
    """A whole frame as one struct, padding included, so that one call writes or reads it."""

    __slots__ = ("padding", "read", "write")

    def __init__(self, capacity: int) -> None:
        rest = capacity - HEADER_BYTES
        self.write = struct.Struct(f"<8sI{_IDS.size}s{rest}x").pack_into
        self.read = struct.Struct(f"<8sIQ16s8sB{rest}s").unpack_from
        self.padding = bytes(rest)


class _Wholes(dict[int, _Whole]):
    """By capacity, made when first asked for."""

    def __missing__(self, capacity: int) -> _Whole:
        whole = self[capacity] = _Whole(capacity)
        return whole


_wholes: Final = _Wholes()


class _W3C:
    """The global propagator, where it makes ``traceparent`` from the ids of the span alone."""

    __slots__ = ("_asked", "textmap")

    def __init__(self) -> None:
        self.textmap: TextMapPropagator | None = None
        self._asked: TextMapPropagator | None = None

    def ask(self, textmap: TextMapPropagator) -> bool:
        """Whether this one does; remembered for :attr:`textmap`."""
        if textmap is not self._asked:
            parts: Sequence[object] = [textmap]
            if type(textmap) is CompositePropagator:
                parts = textmap._propagators
            kinds = {type(part) for part in parts}
            plain = TraceContextTextMapPropagator in kinds and kinds <= _W3C_KINDS
            self.textmap = textmap if plain else None
            self._asked = textmap
        return self.textmap is textmap


_W3C_KINDS: Final = frozenset((TraceContextTextMapPropagator, W3CBaggagePropagator))
_w3c: Final = _W3C()


def write_span_frame(view: memoryview, sequence: int) -> bool:
    """Write the current span's frame over a view, padding included; whether that was possible.

    It is possible where the context holds a valid span and nothing else (so no baggage), the span
    has no tracestate, and the global propagator is the W3C's. Otherwise nothing is written, and
    :func:`~lens_core.frame.encode_frame` is to be used. Never raises.

    Args:
        view: Room for the whole frame, at least :data:`~lens_core.frame.HEADER_BYTES`.
        sequence: The caller's count of frames on this channel, from 0 to 2**64 - 1.
    """
    try:
        context = otel_context.get_current()
        if len(context) != 1:
            return False
        (value,) = context.values()
        textmap = get_global_textmap()
        if textmap is not _w3c.textmap and not _w3c.ask(textmap):
            return False
        # What else is alone in a context has no such method, and raises.
        span_context = value.get_span_context()  # type: ignore[attr-defined]
        if type(span_context) is not SpanContext:
            return False
        trace_id, span_id, _, trace_flags, trace_state, is_valid = span_context
        if not is_valid or (trace_state is not DEFAULT_TRACE_STATE and trace_state):
            return False
        ids = _IDS.pack(
            sequence, trace_id.to_bytes(16, "big"), span_id.to_bytes(8, "big"), trace_flags
        )
        crc = zlib.crc32(ids, _CRC_OF_PREFIX)
        _wholes[len(view)].write(view, 0, TRACEPARENT_ONLY, crc, ids)
    except Exception:  # noqa: BLE001 - a foreign span may raise anything; the long way reports it
        return False
    return True


def read_span_frame(view: memoryview | bytes, sequence: int) -> dict[str, str] | None:
    """The carrier in a frame of a span alone that has this sequence number.

    ``None`` for any other bytes, good or bad: :func:`~lens_core.frame.decode_frame` judges those.
    What it does return is what :func:`~lens_core.frame.decode_frame` would. Never raises.

    Args:
        view: The whole frame, padding included.
        sequence: The number that the frame must have.
    """
    size = len(view)
    if size < HEADER_BYTES:
        return None
    whole = _wholes[size]
    prefix, crc, number, trace_id, span_id, trace_flags, padding = whole.read(view)
    if (
        prefix != TRACEPARENT_ONLY
        or number != sequence
        or zlib.crc32(view[_IDS_AT:HEADER_BYTES], _CRC_OF_PREFIX) != crc
        or padding != whole.padding
        or trace_id == _NO_TRACE_ID
        or span_id == _NO_SPAN_ID
    ):
        return None
    return {"traceparent": f"00-{trace_id.hex()}-{span_id.hex()}-{trace_flags:02x}"}


_NO_TRACE_ID: Final = bytes(16)
_NO_SPAN_ID: Final = bytes(8)
