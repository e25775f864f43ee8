"""Attribute values that OpenTelemetry accepts, from values that training code has.

Numbers of NumPy and torch, ``Decimal``, ``Enum`` and paths become numbers and strings; what would
have to wait for a device never does. Values under keys that hold secrets or user text are replaced.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import Decimal
from enum import Enum
from numbers import Integral, Real
from os import PathLike, fspath
from typing import Final

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from lens_core.incidents import incidents

__all__ = [
    "DEFAULT_REDACT_KEYS",
    "REDACTED",
    "clean_attributes",
    "redact_text",
    "redact_value",
    "safe_set_span_attributes",
    "to_number",
]

REDACTED: Final = "[redacted]"
#: Keys are compared by their words (``userApiKey`` and ``user-api_key`` are ``user api key``): a
#: key is redacted if one of these is among its words, in a row.
DEFAULT_REDACT_KEYS: Final = frozenset(
    {
        "api_key",
        "apikey",
        "access_key",
        "private_key",
        "secret",
        "secret_key",
        "password",
        "passwd",
        "passphrase",
        "token",
        "hf_token",
        "access_token",
        "refresh_token",
        "authorization",
        "auth",
        "credential",
        "credentials",
        "cookie",
        "bearer",
        "prompt",
        "prompts",
        "completion",
        "completions",
        "messages",
        "text",
    }
)
#: Words that turn a secret's name into a count or a size of it: ``prompt_tokens``, ``token_count``.
_HARMLESS: Final = frozenset(
    {"count", "counts", "length", "len", "num", "number", "size", "tokens", "total", "id", "ids"}
)
_MAX_DEPTH: Final = 6
_MAX_ITEMS: Final = 256
_MAX_TEXT: Final = 16_384
#: Texts up to this length repeat (phases, names), so what redaction makes of them is remembered.
_SHORT: Final = 64
_PLAIN: Final = frozenset({str, bool, int, float})
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_IN_TEXT: Final = re.compile(
    r"(?i)\b((?:[\w-]*(?:api[_-]?key|token|secret|password|passwd|authorization|credential)s?)"
    r"[\"']?\s*[:=]\s*(?:bearer\s+|basic\s+)?[\"']?)[^\s\"',;&)}\]]+"
    r"|\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}"
    r"|\b(?:hf_|sk-|ghp_|glpat-|nvapi-)[A-Za-z0-9_-]{8,}"
)


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
        incidents.record("attributes.failed", f"{type(error).__name__}: {error}")


def clean_attributes(
    attributes: Mapping[str, object], redact_keys: Collection[str] = DEFAULT_REDACT_KEYS
) -> dict[str, AttributeValue]:
    """Attributes that OpenTelemetry accepts, with secrets replaced. Never raises."""
    cleaned: dict[str, AttributeValue] = {}
    is_secret: Callable[[str], bool] = _is_secret_by_default
    if redact_keys is not DEFAULT_REDACT_KEYS:
        is_secret = functools.partial(_matches, redact_keys=redact_keys)
    for key, value in attributes.items():
        kind = type(value)
        try:
            # The common cases first: this runs once per span, in the training step.
            if kind is int or kind is float or kind is bool:
                cleaned[key] = REDACTED if is_secret(key) else value  # type: ignore[assignment]
            elif kind is str and len(value) <= _SHORT:  # type: ignore[arg-type]
                cleaned[key] = REDACTED if is_secret(key) else _redact_short(value)
            else:
                simple = _simplify(redact_value(str(key), value, redact_keys))
                if simple is not None:
                    cleaned[str(key)] = simple
        except Exception as error:  # noqa: BLE001 - a value's own methods may raise anything
            incidents.record("attributes.failed", f"{key}: {type(error).__name__}: {error}")
    return cleaned


def redact_value(
    key: str, value: object, redact_keys: Collection[str] = DEFAULT_REDACT_KEYS
) -> object:
    """The value, or :data:`REDACTED` where the key holds a secret or a user's text.

    Mappings are looked into, also inside of sequences; secrets inside of strings (``token=...``,
    ``Bearer ...``) are replaced too.
    """
    return _redact(key, value, redact_keys, 0)


def redact_text(text: str) -> str:
    """Text in which what looks like a secret is replaced: ``api_key=...``, ``Bearer ...``."""
    return _SECRET_IN_TEXT.sub(lambda m: f"{m.group(1) or m.group(2) or ''}{REDACTED}", text)


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
        return float(value)
    if getattr(value, "shape", None) in ((), (1,)) and callable(
        item := getattr(value, "item", None)
    ):
        number = item()
        return number if isinstance(number, (bool, int, float)) else None
    return None


def _redact(key: str, value: object, redact_keys: Collection[str], depth: int) -> object:
    if value is not None and _is_secret(key, redact_keys):
        return REDACTED
    if isinstance(value, str):
        return redact_text(value) if len(value) <= _MAX_TEXT else redact_text(value[:_MAX_TEXT])
    if depth >= _MAX_DEPTH:
        return value
    if isinstance(value, Mapping):
        return {
            str(name): _redact(str(name), item, redact_keys, depth + 1)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_redact("", item, redact_keys, depth + 1) for item in value]
    return value


def _is_secret(key: str, redact_keys: Collection[str]) -> bool:
    if redact_keys is DEFAULT_REDACT_KEYS:
        return _is_secret_by_default(key)
    return _matches(key, redact_keys)


@functools.lru_cache(maxsize=2048)
def _is_secret_by_default(key: str) -> bool:
    return _matches(key, DEFAULT_REDACT_KEYS)


def _matches(key: str, redact_keys: Collection[str]) -> bool:
    words = [word.lower() for word in _WORD.findall(key)]
    if not words or words[-1] in _HARMLESS or words[0] in ("num", "n", "max", "min"):
        return False
    joined = f" {' '.join(words)} "
    return any(f" {' '.join(_words(name))} " in joined for name in redact_keys)


@functools.lru_cache(maxsize=512)
def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD.findall(name))


def _simplify(value: object) -> AttributeValue | None:
    if value is None or type(value) in _PLAIN or isinstance(value, (str, bytes)):
        return value  # type: ignore[return-value]
    if isinstance(value, Enum):
        return _simplify(value.value) if isinstance(value.value, (str, int)) else value.name
    if (number := to_number(value)) is not None:
        return number
    if _on_device(value):
        # Reading it would wait for all work queued on the device.
        return f"<{type(value).__name__} on {getattr(value, 'device', '?')}>"
    if isinstance(value, PathLike):
        return str(fspath(value))
    if isinstance(value, Mapping):
        return _text(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sequence(value)
    if (
        callable(tolist := getattr(value, "tolist", None))
        and getattr(value, "size", None) is not None
    ):
        size = value.size() if callable(value.size) else value.size  # type: ignore[attr-defined]
        count = size if isinstance(size, int) else _product(size)
        return _sequence(tolist()) if count <= _MAX_ITEMS else _text(value)
    return _text(value)


def _sequence(values: Iterable[object]) -> AttributeValue:
    items = [_simplify(value) for value in list(values)[:_MAX_ITEMS]]
    # OpenTelemetry wants one type per sequence.
    if all(isinstance(item, bool) for item in items):
        return [item for item in items if isinstance(item, bool)]
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [item for item in items if isinstance(item, int)]
    if all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in items):
        return [float(item) for item in items if isinstance(item, (int, float))]
    return [str(item) for item in items]


def _text(value: object) -> str:
    text = redact_text(str(value))
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def _product(sizes: Iterable[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _on_device(value: object) -> bool:
    kind = getattr(getattr(value, "device", None), "type", None)
    return isinstance(kind, str) and kind != "cpu"
