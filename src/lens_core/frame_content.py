"""What a frame holds: the ids of a ``traceparent``, the other headers, and what was left out."""

from __future__ import annotations

from enum import IntFlag
from typing import Final

import msgpack

from lens_core.carrier import TraceIds
from lens_core.carrier_size import MAX_CARRIER_BYTES, carrier_size, shrinking
from lens_core.errors import FrameError

__all__ = [
    "NO_SPAN_ID",
    "NO_TRACE_ID",
    "FrameFlags",
    "decode_body",
    "encode_body",
    "parse_traceparent",
]

NO_TRACE_ID: Final = bytes(16)
NO_SPAN_ID: Final = bytes(8)
_MAX_HEADERS: Final = 64
#: What ``traceparent`` leaves of the largest carrier: its name, and 55 characters of version 00.
_MAX_FURTHER_BYTES: Final = MAX_CARRIER_BYTES - len("traceparent") - 55


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


_DROP_FLAGS: Final = {
    "baggage": FrameFlags.DROPPED_BAGGAGE,
    "tracestate": FrameFlags.DROPPED_TRACESTATE,
}


def parse_traceparent(header: str) -> TraceIds:
    """What a ``traceparent`` of version 00 says (W3C Trace Context 3.2.2)."""
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
    if trace_id == NO_TRACE_ID or span_id == NO_SPAN_ID:
        raise FrameError(f"traceparent {header!r} holds an all-zero id")
    return (trace_id, span_id, flags[0])


def encode_body(headers: dict[str, str], room: int) -> tuple[bytes, FrameFlags]:
    """The headers as msgpack in at most ``room`` bytes, and what was left out for it."""
    for left, dropped in shrinking(headers):
        body: bytes = msgpack.packb(left) if left else b""
        # However much room there is: a receiver refuses a larger carrier whole.
        allowed = len(left) <= _MAX_HEADERS and carrier_size(left) <= _MAX_FURTHER_BYTES
        if allowed and len(body) <= room:
            flags = FrameFlags(0)
            for name in dropped:
                flags |= _DROP_FLAGS.get(name, FrameFlags.DROPPED_OTHER)
            return body, flags
    raise AssertionError("the last of the shrinking carriers is empty, which fits always")


def decode_body(body: bytes) -> dict[str, str]:
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
