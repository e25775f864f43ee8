"""Attribute values that OpenTelemetry accepts, from values that training code has.

Numbers of NumPy and torch, ``Decimal``, ``Enum`` and paths become numbers and strings; what would
have to wait for a device never does. Values under keys that hold secrets or user text are replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal
from enum import Enum
from itertools import islice, takewhile
from numbers import Integral, Real
from os import PathLike, fspath
from typing import Final

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from lens_core.diagnostics import describe, diagnostics
from lens_core.spans.secrets import (
    DEFAULT_REDACT_KEYS,
    MAX_TEXT,
    REDACTED,
    Secrecy,
    redact_text,
    secrecy_of,
    to_utf8,
)

__all__ = [
    "DEFAULT_REDACT_KEYS",
    "REDACTED",
    "clean_attributes",
    "redact_text",
    "redact_value",
    "safe_set_span_attributes",
    "to_number",
    "to_utf8",
]

_TOO_MUCH: Final = "..."
_MAX_DEPTH: Final = 6
_MAX_ITEMS: Final = 256
#: Values that are looked into below one attribute, whatever its shape.
_MAX_VALUES: Final = 1024
#: Texts up to this length repeat (phases, names), so what redaction makes of them is remembered.
_SHORT: Final = 64
_PLAIN: Final = frozenset({str, bool, int, float})
_INT64: Final = range(-(2**63), 2**63)


def safe_set_span_attributes(
    span: Span | None,
    attributes: Mapping[str, object],
    redact_keys: Collection[str] = DEFAULT_REDACT_KEYS,
) -> None:
    """Set attributes on a span, cleaned and redacted. Never raises.

    Nothing happens for ``None`` and for a span that is not recording or has ended.
    """
    try:
        if span is not None and span.is_recording():
            span.set_attributes(clean_attributes(attributes, redact_keys))
    except Exception as error:  # noqa: BLE001 - a foreign span may raise anything
        diagnostics.record("attributes.failed", describe(error))


def clean_attributes(
    attributes: Mapping[str, object], redact_keys: Collection[str] = DEFAULT_REDACT_KEYS
) -> dict[str, AttributeValue]:
    """Attributes that OpenTelemetry accepts, with secrets replaced. Never raises."""
    cleaned: dict[str, AttributeValue] = {}
    secrecy = secrecy_of(redact_keys)
    for key, value in attributes.items():
        kind = type(value)
        try:
            # The common cases first: this runs once per span, in the training step.
            if (kind is int and value in _INT64) or kind is float or kind is bool:
                cleaned[key] = REDACTED if secrecy(key) is Secrecy.WHOLE else value  # type: ignore[assignment]
            elif kind is str and len(value) <= _SHORT:  # type: ignore[arg-type]
                cleaned[key] = REDACTED if secrecy(key) else _redact_short(value)
            else:
                simple = _simplify(redact_value(str(key), value, redact_keys))
                if simple is not None:
                    cleaned[to_utf8(str(key))] = simple
        except Exception as error:  # noqa: BLE001 - a value's own methods may raise anything
            diagnostics.record("attributes.failed", f"{key}: {describe(error)}")
    return cleaned


def redact_value(
    key: str, value: object, redact_keys: Collection[str] = DEFAULT_REDACT_KEYS
) -> object:
    """The value, or :data:`REDACTED` where the key holds a secret or a user's text.

    Mappings are looked into, also inside of sequences; secrets inside of strings (``token=...``,
    ``Bearer ...``) are replaced too. Of a mapping or sequence at most 1,024 values are looked at
    and kept.
    """
    return _Redaction(redact_keys).redact(key, value, 0)


@functools.lru_cache(maxsize=1024)
def _redact_short(text: str) -> str:
    return redact_text(text)


def to_number(value: object) -> int | float | None:
    """The value as a number; ``None`` where it is none, or would have to wait for a device."""
    if isinstance(value, (bool, int, float)):
        return value
    if _on_device(value):
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, (Real, Decimal)):
        try:
            return float(value)
        except (ValueError, ArithmeticError):  # a signalling NaN; a fraction beyond floats
            return None
    if getattr(value, "shape", None) in ((), (1,)) and callable(
        item := getattr(value, "item", None)
    ):
        number = item()
        return number if isinstance(number, (bool, int, float)) else None
    return None


def _holds_text(value: object) -> bool:
    """Whether there is anything but numbers in it: a count of tokens is no token."""
    if isinstance(value, Mapping):
        value = list(islice(value.values(), _MAX_ITEMS))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_text(item) for item in islice(value, _MAX_ITEMS))
    return value is not None and to_number(value) is None and not hasattr(value, "shape")


class _Redaction:
    """One walk through a value, which may be huge or hold itself."""

    __slots__ = ("_left", "_secrecy")

    def __init__(self, redact_keys: Collection[str]) -> None:
        self._secrecy = secrecy_of(redact_keys)
        self._left = _MAX_VALUES

    def redact(self, key: str, value: object, depth: int) -> object:
        self._left -= 1
        secrecy = self._secrecy(key)
        if secrecy and value is not None and (secrecy is Secrecy.WHOLE or _holds_text(value)):
            return REDACTED
        if isinstance(value, str):
            return redact_text(value)
        if isinstance(value, bytes):
            return value[:MAX_TEXT]
        if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
            return value
        if depth >= _MAX_DEPTH:
            return _TOO_MUCH
        if isinstance(value, Mapping):
            items = takewhile(lambda _: self._left > 0, value.items())
            return {
                to_utf8(str(name)): self.redact(str(name), item, depth + 1) for name, item in items
            }
        return [
            self.redact("", item, depth + 1) for item in takewhile(lambda _: self._left > 0, value)
        ]


def _simplify(value: object) -> AttributeValue | None:
    if type(value) is int:
        return _int64_or_text(value)
    if value is None or type(value) in _PLAIN or isinstance(value, (str, bytes)):
        return value  # type: ignore[return-value]
    if isinstance(value, Enum):
        return _simplify(value.value) if isinstance(value.value, (str, int)) else value.name
    if (number := to_number(value)) is not None:
        return _int64_or_text(number)
    if _on_device(value):
        # Reading it would wait for all work queued on the device.
        return f"<{type(value).__name__} on {getattr(value, 'device', '?')}>"
    if isinstance(value, PathLike):
        return str(fspath(value))
    if isinstance(value, Mapping):
        return _text(_leaves(value))
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sequence(value)
    if (
        callable(tolist := getattr(value, "tolist", None))
        and getattr(value, "size", None) is not None
    ):
        size = value.size() if callable(value.size) else value.size  # type: ignore[attr-defined]
        count = size if isinstance(size, int) else _product(size)
        # A NumPy scalar that is no number gives an object of Python, such as a date.
        items = tolist() if count <= _MAX_ITEMS and not _is_sparse(value) else None
        return _sequence(items) if isinstance(items, list) else _text(value)
    return _text(value)


def _int64_or_text(number: int | float) -> AttributeValue:
    """OTLP's integers have 64 bits; a larger one would make the whole batch unsendable."""
    if not isinstance(number, int) or isinstance(number, bool) or number in _INT64:
        return number
    try:
        return str(number)
    except ValueError:  # more digits than Python writes in decimal
        return _text(hex(number))


def _sequence(values: Iterable[object]) -> AttributeValue:
    items = [_simplify_item(value) for value in islice(values, _MAX_ITEMS)]
    # OpenTelemetry wants one type per sequence.
    if all(isinstance(item, bool) for item in items):
        return [item for item in items if isinstance(item, bool)]
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [item for item in items if isinstance(item, int)]
    if all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in items):
        return [float(item) for item in items if isinstance(item, (int, float))]
    return [str(item) for item in items]


def _simplify_item(value: object) -> AttributeValue | None:
    nested = isinstance(value, (list, tuple, set, frozenset))
    return _text(_leaves(value)) if nested else _simplify(value)


def _leaves(value: object) -> object:
    """What is nested, with simple values at its ends: its text must not wait for a device."""
    if isinstance(value, Mapping):
        return {name: _leaves(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_leaves(item) for item in value]
    return _simplify(value)


def _text(value: object) -> str:
    text = redact_text(str(value))
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def _product(sizes: Iterable[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _is_sparse(value: object) -> bool:
    return bool(getattr(value, "is_sparse", False))


def _on_device(value: object) -> bool:
    kind = getattr(getattr(value, "device", None), "type", None)
    return isinstance(kind, str) and kind != "cpu"
