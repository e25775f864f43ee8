"""How large a carrier may be, and what is left out of one that is larger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, cast

from lens_core.errors import CarrierError

__all__ = ["MAX_CARRIER_BYTES", "carrier_size", "check_carrier", "fit_carrier", "shrinking"]

#: Largest carrier, in UTF-8 bytes of all keys and values, that is accepted from outside. W3C
#: Baggage asks for at least 8,192 bytes of baggage (section "Limits"), and W3C Trace Context for at
#: least 512 of tracestate (section 3.3.1.5); twice their sum leaves room for other headers.
MAX_CARRIER_BYTES: Final = 16_384


def carrier_size(carrier: object) -> int:
    """Bytes of all keys and values of a carrier, in UTF-8.

    Raises:
        CarrierError: If it is not a mapping of strings to strings, or cannot be encoded.
    """
    if not isinstance(carrier, Mapping):
        raise CarrierError(f"expected a mapping, got {type(carrier).__name__}")
    size = 0
    for key, value in carrier.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise CarrierError(
                f"expected str -> str, got {type(key).__name__} -> {type(value).__name__}"
            )
        try:
            size += len(key.encode()) + len(value.encode())
        except UnicodeEncodeError as error:
            raise CarrierError(f"{key!r} cannot be encoded as UTF-8: {error.reason}") from None
    return size


def check_carrier(carrier: object) -> Mapping[str, str]:
    """The carrier itself, when it is one that may come from outside.

    Raises:
        CarrierError: If it is not a mapping of strings to strings, or is larger than
            :data:`MAX_CARRIER_BYTES`.
    """
    size = carrier_size(carrier)
    if size > MAX_CARRIER_BYTES:
        raise CarrierError(f"{size} bytes are more than {MAX_CARRIER_BYTES}")
    return cast("Mapping[str, str]", carrier)


def shrinking(carrier: Mapping[str, str]) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """The carrier, then ever smaller ones, for a place where it does not fit.

    ``baggage`` goes first, then ``tracestate``, then all other headers, but never ``traceparent``.

    Yields:
        What is left, and the names of the headers that were left out.
    """
    left = dict(carrier)
    dropped: list[str] = []
    yield dict(left), ()
    others = tuple(name for name in left if name not in ("traceparent", "tracestate", "baggage"))
    for names in (("baggage",), ("tracestate",), others):
        gone = [name for name in names if left.pop(name, None) is not None]
        if gone:
            dropped += gone
            yield dict(left), tuple(dropped)


def fit_carrier(
    carrier: Mapping[str, str], max_bytes: int = MAX_CARRIER_BYTES
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The most of a carrier that fits, and the names of the headers that were left out.

    Args:
        carrier: The headers.
        max_bytes: Most bytes of keys and values.

    Raises:
        CarrierError: If it is not a mapping of strings to strings, or its ``traceparent`` alone
            does not fit.
    """
    carrier_size(carrier)
    for left, dropped in shrinking(carrier):
        if carrier_size(left) <= max_bytes:
            return left, dropped
    raise CarrierError(f"its traceparent alone is larger than {max_bytes} bytes")
