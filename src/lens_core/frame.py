"""A carrier as bytes of a fixed size: versioned, check-summed, zero padded.

Layout, little-endian (:data:`HEADER_BYTES` = 45 bytes before the body)::

    offset  size  field
    0       4     magic  b"LNSf"
    4       1     version  1
    5       1     flags  (FrameFlags)
    6       2     body length in bytes
    8       4     CRC-32 of everything after it up to the end of the body, and of bytes 0..7
    12      8     sequence number
    20      16    trace id, big-endian; all zero = no traceparent
    36      8     span id, big-endian
    44      1     trace flags
    45      n     body: a msgpack map ``str -> str`` of the other headers
    45+n    ...   zeros up to the capacity

All zero bytes are *no frame*: a buffer that nobody wrote to. A sender that has no context sends a
valid frame marked :attr:`FrameFlags.NO_CONTEXT`, so that what is sent never depends on whether
this process traces.

Capacity is agreed at set-up by both sides. It costs nothing up to 4 KiB: a broadcast of 32 and of
4,096 bytes takes the same time (``benchmarks/bench_broadcast.py``).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import Final, Protocol

import msgpack

from lens_core.carrier import MAX_CARRIER_BYTES, carrier_size, shrinking
from lens_core.errors import FrameError

__all__ = [
    "BROADCAST_CAPACITY",
    "HEADER_BYTES",
    "MAX_CAPACITY",
    "P2P_CAPACITY",
    "TRACEPARENT_ONLY",
    "BytesLike",
    "Frame",
    "FrameFlags",
    "decode_frame",
    "encode_frame",
]

#: Bytes of a frame in a collective.
BROADCAST_CAPACITY: Final = 1024
#: Bytes of a frame beside a point-to-point message.
P2P_CAPACITY: Final = 256

_MAGIC: Final = b"LNSf"
_VERSION: Final = 1
_PREFIX: Final = struct.Struct("<4sBBH")  # magic, version, flags, body length
_CRC: Final = struct.Struct("<I")
_IDS: Final = struct.Struct("<Q16s8sB")  # sequence, trace id, span id, trace flags
_CRC_AT: Final = _PREFIX.size
_IDS_AT: Final = _CRC_AT + _CRC.size
HEADER_BYTES: Final = _IDS_AT + _IDS.size
#: The first bytes of every frame that holds a ``traceparent`` and nothing else.
TRACEPARENT_ONLY: Final = _PREFIX.pack(_MAGIC, _VERSION, 0, 0)
#: Largest frame: the length of a body is 16 bits.
MAX_CAPACITY: Final = HEADER_BYTES + 0xFFFF

_NO_TRACE_ID: Final = bytes(16)
_NO_SPAN_ID: Final = bytes(8)
_MAX_HEADERS: Final = 64
#: What ``traceparent`` leaves of the largest carrier: its name, and 55 characters of version 00.
_MAX_FURTHER_BYTES: Final = MAX_CARRIER_BYTES - len("traceparent") - 55


class BytesLike(Protocol):
    """Anything with the buffer protocol: bytes, bytearray, memoryview, a NumPy array."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class FrameFlags(IntFlag):
    """What a frame says about itself."""

    #: The sender had no context to send.
    NO_CONTEXT = 1
    #: The carrier was too large; ``baggage`` was left out.
    DROPPED_BAGGAGE = 2
    #: The carrier was too large; ``tracestate`` was left out too.
    DROPPED_TRACESTATE = 4
    #: The carrier was too large; all but ``traceparent`` was left out.
    DROPPED_OTHER = 8


_KNOWN_FLAGS: Final = (
    FrameFlags.NO_CONTEXT
    | FrameFlags.DROPPED_BAGGAGE
    | FrameFlags.DROPPED_TRACESTATE
    | FrameFlags.DROPPED_OTHER
)
_DROPPED: Final = _KNOWN_FLAGS & ~FrameFlags.NO_CONTEXT
_DROP_FLAGS: Final = {
    "baggage": FrameFlags.DROPPED_BAGGAGE,
    "tracestate": FrameFlags.DROPPED_TRACESTATE,
}
_NO_FLAGS: Final = FrameFlags(0)


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame's content.

    Attributes:
        carrier: The headers; empty where the sender had no context.
        sequence: The sender's count of frames on this channel; a gap means a skipped call.
        flags: What the frame says about itself.
    """

    carrier: Mapping[str, str]
    sequence: int = 0
    flags: FrameFlags = _NO_FLAGS

    @property
    def truncated(self) -> bool:
        """Whether headers were left out because they did not fit."""
        return bool(self.flags & _DROPPED)


def encode_frame(carrier: Mapping[str, str], *, capacity: int, sequence: int = 0) -> bytes:
    """The carrier as exactly ``capacity`` bytes.

    A carrier that is too large, for the frame or for :data:`MAX_CARRIER_BYTES`, loses ``baggage``
    first, then ``tracestate``, then every other header, but never ``traceparent``; the flags say
    so.

    Args:
        carrier: Headers; an empty one gives a frame marked ``NO_CONTEXT``.
        capacity: Size of the frame in bytes, from :data:`HEADER_BYTES` to
            :data:`MAX_CAPACITY`.
        sequence: The caller's count of frames on this channel, modulo 2**64.

    Raises:
        CarrierError: If the carrier is not ``str -> str``.
        FrameError: If the capacity is out of range, or ``traceparent`` is not one of version 00
            of W3C Trace Context.
    """
    if not HEADER_BYTES <= capacity <= MAX_CAPACITY:
        raise FrameError(f"capacity {capacity} is outside {HEADER_BYTES}..{MAX_CAPACITY} bytes")
    trace_id, span_id, trace_flags = _NO_TRACE_ID, _NO_SPAN_ID, 0
    flags = FrameFlags(0)
    body = b""
    if carrier:
        carrier_size(carrier)  # checks the types; how much fits is decided below
        headers = dict(carrier)
        traceparent = headers.pop("traceparent", None)
        if traceparent is not None:
            trace_id, span_id, trace_flags = _parse_traceparent(traceparent)
        if headers:
            body, flags = _encode_body(headers, capacity - HEADER_BYTES)
    if trace_id is _NO_TRACE_ID and not body:
        flags |= FrameFlags.NO_CONTEXT
    prefix = _PREFIX.pack(_MAGIC, _VERSION, flags, len(body))
    ids = _IDS.pack(sequence & 0xFFFF_FFFF_FFFF_FFFF, trace_id, span_id, trace_flags)
    crc = zlib.crc32(body, zlib.crc32(ids, zlib.crc32(prefix)))
    return b"".join((prefix, _CRC.pack(crc), ids, body)).ljust(capacity, b"\0")


def decode_frame(data: bytes | bytearray | memoryview | BytesLike) -> Frame | None:
    """The content of a frame; ``None`` where all bytes are zero (nobody wrote one).

    Args:
        data: The whole frame, padding included: any bytes-like object.

    Raises:
        FrameError: If the bytes are anything else than one intact frame.
    """
    try:
        view = memoryview(data)  # bytes(data) would allocate that many bytes for an int
    except (TypeError, ValueError, BufferError) as error:  # ValueError: released, or dates
        raise FrameError(f"not bytes-like ({error})") from None
    if view.nbytes > MAX_CAPACITY:
        raise FrameError(f"{view.nbytes} bytes are more than {MAX_CAPACITY}")
    raw = view.tobytes()
    if not raw.startswith(_MAGIC):
        if raw.count(0) == len(raw):
            return None
        raise FrameError("it does not start with the magic bytes")
    if len(raw) < HEADER_BYTES:
        raise FrameError(f"{len(raw)} bytes are fewer than a header's {HEADER_BYTES}")
    _, version, flag_bits, body_length = _PREFIX.unpack_from(raw)
    if version != _VERSION:
        raise FrameError(f"version {version} is not {_VERSION}; upgrade the older side")
    end = HEADER_BYTES + body_length
    if end > len(raw):
        raise FrameError(f"its body would end at byte {end} of {len(raw)}")
    (crc,) = _CRC.unpack_from(raw, _CRC_AT)
    if zlib.crc32(memoryview(raw)[_IDS_AT:end], zlib.crc32(raw[:_CRC_AT])) != crc:
        raise FrameError("its checksum does not match")
    if raw.count(0, end) != len(raw) - end:
        raise FrameError("its padding is not zero")
    if flag_bits & ~_KNOWN_FLAGS:
        raise FrameError(f"flags {flag_bits:#04x} are not known to version {_VERSION}")
    sequence, trace_id, span_id, trace_flags = _IDS.unpack_from(raw, _IDS_AT)
    carrier: dict[str, str] = {}
    if (trace_id == _NO_TRACE_ID) != (span_id == _NO_SPAN_ID):
        raise FrameError("only one of trace id and span id is zero")
    if trace_id != _NO_TRACE_ID:
        carrier["traceparent"] = f"00-{trace_id.hex()}-{span_id.hex()}-{trace_flags:02x}"
    if body_length:
        carrier.update(_decode_body(raw[HEADER_BYTES:end]))
    if bool(flag_bits & FrameFlags.NO_CONTEXT) != (not carrier):
        raise FrameError("its NO_CONTEXT flag contradicts its content")
    return Frame(carrier, sequence, FrameFlags(flag_bits))


def _parse_traceparent(header: str) -> tuple[bytes, bytes, int]:
    """Trace id, span id and flags of a version 00 ``traceparent`` (W3C Trace Context 3.2.2)."""
    # bytes.fromhex skips white space, so lengths and case are checked on the text itself.
    parts = header.split("-")
    if [len(part) for part in parts] != [2, 32, 16, 2] or parts[0] != "00":
        raise FrameError(f"traceparent {header!r} is not of version 00")
    try:
        trace_id, span_id, flags = (bytes.fromhex(part) for part in parts[1:])
    except ValueError:
        raise FrameError(f"traceparent {header!r} is not hexadecimal") from None
    if (len(trace_id), len(span_id), len(flags)) != (16, 8, 1) or header != header.lower():
        raise FrameError(f"traceparent {header!r} is not lower-case hexadecimal")
    if trace_id == _NO_TRACE_ID or span_id == _NO_SPAN_ID:
        raise FrameError(f"traceparent {header!r} holds an all-zero id")
    return trace_id, span_id, flags[0]


def _encode_body(headers: dict[str, str], room: int) -> tuple[bytes, FrameFlags]:
    """The headers as msgpack in at most ``room`` bytes, and what was left out for it."""
    for left, dropped in shrinking(headers):
        body: bytes = msgpack.packb(left) if left else b""
        # However much room there is: a receiver refuses a larger carrier whole.
        allowed = len(left) <= _MAX_HEADERS and carrier_size(left) <= _MAX_FURTHER_BYTES
        if allowed and len(body) <= room:
            flags = _NO_FLAGS
            for name in dropped:
                flags |= _DROP_FLAGS.get(name, FrameFlags.DROPPED_OTHER)
            return body, flags
    raise AssertionError("the last of the shrinking carriers is empty, which fits always")


def _decode_body(body: bytes) -> dict[str, str]:
    """The headers of a body, with strict types and sizes."""
    try:
        headers = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            max_map_len=_MAX_HEADERS,
            max_str_len=MAX_CARRIER_BYTES,
            max_array_len=0,
            max_bin_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise FrameError(f"its body is not a map of strings ({error})") from None
    if not isinstance(headers, dict) or not headers or "traceparent" in headers:
        raise FrameError("its body is not a map of further headers")
    for key, value in headers.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise FrameError("its body is not a map of strings to strings")
    return headers
