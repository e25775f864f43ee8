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

Most messages carry a ``traceparent`` and nothing else. Both functions begin with that case, in as
few calls as can be: code that runs once per message runs with cold caches, and what counts then is
over how many functions it is spread.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Final, Protocol

from lens_core.carrier import Carrier, TraceIds
from lens_core.carrier_size import carrier_size
from lens_core.errors import FrameError
from lens_core.frame_content import (
    NO_SPAN_ID,
    NO_TRACE_ID,
    FrameFlags,
    decode_body,
    encode_body,
    parse_traceparent,
)
from lens_core.native import compiled

__all__ = [
    "BROADCAST_CAPACITY",
    "HEADER_BYTES",
    "MAX_CAPACITY",
    "MAX_SEQUENCE",
    "P2P_CAPACITY",
    "BytesLike",
    "FrameFlags",
    "decode_frame",
    "encode_frame",
]

#: Bytes of a frame in a collective.
BROADCAST_CAPACITY: Final = 1024
#: Bytes of a frame beside a point-to-point message.
P2P_CAPACITY: Final = 256
#: Sequence numbers count from 0 to this, and then from 0 again.
MAX_SEQUENCE: Final = 2**64 - 1

_MAGIC: Final = b"LNSf"
_VERSION: Final = 1
_PREFIX: Final = struct.Struct("<4sBBH")  # magic, version, flags, body length
_CRC: Final = struct.Struct("<I")
_IDS: Final = struct.Struct("<Q16s8sB")  # sequence, trace id, span id, trace flags
_CRC_AT: Final = _PREFIX.size
_IDS_AT: Final = _CRC_AT + _CRC.size
HEADER_BYTES: Final = _IDS_AT + _IDS.size
#: Largest frame: the length of a body is 16 bits.
MAX_CAPACITY: Final = HEADER_BYTES + 0xFFFF

_new: Final = object.__new__
#: The first bytes of every frame that holds a ``traceparent`` and nothing else.
_IDS_ALONE: Final = _PREFIX.pack(_MAGIC, _VERSION, 0, 0)
_CRC_OF_IDS_ALONE: Final = zlib.crc32(_IDS_ALONE)


_NO_IDS: Final = (NO_TRACE_ID, NO_SPAN_ID, 0)


class BytesLike(Protocol):
    """Anything with the buffer protocol: bytes, bytearray, memoryview, a NumPy array."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


_KNOWN_FLAGS: Final = FrameFlags(15)


_MAX_LAYOUTS: Final = 64


class _Layouts(dict[int, tuple[struct.Struct, bytes]]):
    """By capacity: a whole frame as one struct (prefix, CRC, ids, padding), and its padding."""

    def __missing__(self, capacity: int) -> tuple[struct.Struct, bytes]:
        if not HEADER_BYTES <= capacity <= MAX_CAPACITY:
            raise FrameError(f"capacity {capacity} is outside {HEADER_BYTES}..{MAX_CAPACITY} bytes")
        rest = capacity - HEADER_BYTES
        layout = struct.Struct(f"<{_CRC_AT}sI{_IDS.size}s{rest}s"), bytes(rest)
        if len(self) < _MAX_LAYOUTS:  # a job has two or three; what is received may be of any size
            self[capacity] = layout
        return layout


_layouts: Final = _Layouts()


@compiled()
def encode_frame(
    carrier: Mapping[str, str], *, capacity: int, sequence: int | None = None
) -> bytes:
    """The carrier as exactly ``capacity`` bytes.

    A carrier that is too large, for the frame or for
    :data:`~lens_core.carrier_size.MAX_CARRIER_BYTES`, loses ``baggage`` first, then
    ``tracestate``, then every other header, but never ``traceparent``; the flags say so.

    Args:
        carrier: Headers; an empty one gives a frame marked ``NO_CONTEXT``.
        capacity: Size of the frame in bytes, from :data:`HEADER_BYTES` to :data:`MAX_CAPACITY`.
        sequence: Count of frames on this channel, modulo 2**64; a
            :class:`~lens_core.carrier.Carrier`'s own if not given.

    Raises:
        CarrierError: If the carrier is not ``str -> str``.
        FrameError: If the capacity is out of range, or ``traceparent`` is not one of version 00
            of W3C Trace Context.
    """
    layout, padding = _layouts[capacity]
    ids: TraceIds | None = None
    if type(carrier) is Carrier:
        ids = carrier.ids
        if sequence is None:
            sequence = carrier.sequence
    number = (sequence or 0) & MAX_SEQUENCE
    if ids is not None:
        packed = _IDS.pack(number, *ids)
        return layout.pack(_IDS_ALONE, zlib.crc32(packed, _CRC_OF_IDS_ALONE), packed, padding)
    ids, flags, body, headers = _NO_IDS, FrameFlags(0), b"", {}
    if type(carrier) is not Carrier or carrier:
        carrier_size(carrier)  # checks the types; how much fits is decided below
        headers = dict(carrier)
    traceparent = headers.pop("traceparent", None)
    if traceparent is not None:
        ids = parse_traceparent(traceparent)
    if headers:
        body, flags = encode_body(headers, capacity - HEADER_BYTES)
    if ids is _NO_IDS and not body:
        flags |= FrameFlags.NO_CONTEXT
    prefix = _PREFIX.pack(_MAGIC, _VERSION, flags, len(body))
    packed = _IDS.pack(number, *ids)
    crc = zlib.crc32(body, zlib.crc32(packed, zlib.crc32(prefix)))
    return layout.pack(prefix, crc, packed, body)


@compiled()
def decode_frame(data: bytes | bytearray | memoryview | BytesLike) -> Carrier:
    """The carrier in a frame, with its sequence number. Never raises.

    Where all bytes are zero (nobody wrote a frame) it is empty and has no sequence number; where
    the sender had no context it is empty and has one. Bytes that are anything else than one intact
    frame give a refused carrier, which says why.

    Args:
        data: The whole frame, padding included: any bytes-like object.
    """
    try:
        view = memoryview(data)  # bytes(data) would allocate that many bytes for an int
    except (TypeError, ValueError, BufferError) as error:  # ValueError: released, or dates
        return Carrier.refused(f"not bytes-like ({error})")
    size = view.nbytes
    if HEADER_BYTES <= size <= MAX_CAPACITY and view.c_contiguous:
        layout, padding = _layouts[size]
        prefix, crc, packed, rest = layout.unpack_from(view)
        if (
            prefix == _IDS_ALONE
            and rest == padding
            and zlib.crc32(packed, _CRC_OF_IDS_ALONE) == crc
        ):
            sequence, trace_id, span_id, flags = _IDS.unpack(packed)
            if trace_id != NO_TRACE_ID and span_id != NO_SPAN_ID:
                carrier = _new(Carrier)
                carrier.ids, carrier.sequence = (trace_id, span_id, flags), sequence
                carrier._headers = carrier._context = carrier._judgement = None
                return carrier
    elif size > MAX_CAPACITY:
        return Carrier.refused(f"{size} bytes are more than {MAX_CAPACITY}")
    try:
        return _decode_any(view.tobytes())
    except FrameError as error:
        return Carrier.refused(error.problem)


def _decode_any(raw: bytes) -> Carrier:
    if not raw.startswith(_MAGIC):
        if raw.count(0) == len(raw):
            return Carrier()
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
    if (trace_id == NO_TRACE_ID) != (span_id == NO_SPAN_ID):
        raise FrameError("only one of trace id and span id is zero")
    headers: dict[str, str] = {}
    if trace_id != NO_TRACE_ID:
        headers["traceparent"] = f"00-{trace_id.hex()}-{span_id.hex()}-{trace_flags:02x}"
    if body_length:
        headers.update(decode_body(raw[HEADER_BYTES:end]))
    if bool(flag_bits & FrameFlags.NO_CONTEXT) != (not headers):
        raise FrameError("its NO_CONTEXT flag contradicts its content")
    truncated = bool(flag_bits & ~FrameFlags.NO_CONTEXT)
    return Carrier(headers, sequence=sequence, truncated=truncated)
