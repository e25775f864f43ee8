"""What is a secret or a user's text: by the words of a key, and inside of texts.

Keys are compared by their words: ``userApiKey`` and ``user-api_key`` are ``user api key``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from enum import IntEnum
from typing import Final

__all__ = [
    "DEFAULT_REDACT_KEYS",
    "MAX_TEXT",
    "REDACTED",
    "Secrecy",
    "redact_text",
    "secrecy_of",
    "to_utf8",
]

REDACTED: Final = "[redacted]"
#: Characters of a text that are looked at and kept.
MAX_TEXT: Final = 16_384
_TOO_MUCH: Final = "..."


class Secrecy(IntEnum):
    """How much of a value its key hides; false where nothing."""

    NONE = 0
    #: Texts: a number under such a key counts or measures them (``mean_token_accuracy``).
    TEXTS = 1
    #: Whatever it is: a password or a PIN may be a number.
    WHOLE = 2


_PASSWORDS: Final = frozenset({"password", "passwd", "passphrase", "passcode", "pin"})
_CREDENTIALS: Final = frozenset(
    {
        "api_key",
        "apikey",
        "access_key",
        "private_key",
        "secret",
        "secret_key",
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
    }
)
_USER_TEXTS: Final = frozenset(
    {"prompt", "prompts", "completion", "completions", "messages", "text"}
)
#: A key is redacted if one of these is among its words, in a row.
DEFAULT_REDACT_KEYS: Final = _PASSWORDS | _CREDENTIALS | _USER_TEXTS
#: Last words that turn a secret's name into a count or a size of it: ``token_count``.
_HARMLESS: Final = frozenset(
    {"count", "counts", "length", "len", "num", "number", "size", "tokens", "total", "id", "ids"}
)
#: Last words that turn the name of users' texts into that of a setting: ``dataset.text_column``.
_SETTINGS: Final = frozenset(
    {"column", "columns", "config", "dtype", "encoder", "field", "fields", "format", "key", "model"}
    | {"name", "path", "type"}
)
#: Tokens of a vocabulary: ``pad_token``.
_SPECIAL: Final = frozenset(
    {"bos", "cls", "end", "eos", "eot", "image", "mask", "pad", "sep", "special", "start", "unk"}
)
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# A name is looked for once per run of its characters, not from each hyphen on: the time must not
# grow with the square of a text such as a-b-c-d-...
_SECRET_IN_TEXT: Final = re.compile(
    r"(?i)(?<![\w-])(?P<name>[\w-]*(?:api[_-]?key|token|secret|password|passwd|authorization"
    r"|credential)s?)"
    r"(?P<between>[\"']?\s*[:=]\s*(?:bearer\s+|basic\s+)?[\"']?)(?!\[redacted)"
    r"(?P<value>[^\s\"',;&)}\]]+)"
    r"|\b(?P<bearer>bearer\s+)[A-Za-z0-9._~+/=-]{8,}"
    r"|\b(?:hf_|sk-|ghp_|glpat-|nvapi-)[A-Za-z0-9_-]{8,}"
)
_NUMBER: Final = re.compile(
    r"(?i)[+-]?[\d_]{1,15}(?:\.\d*)?(?:e[+-]?\d{1,3})?%?|true|false|none|null"
)


def secrecy_of(redact_keys: Collection[str]) -> Callable[[str], Secrecy]:
    """What each key hides: by default, and by keys of the caller's, which hide all."""
    if redact_keys is DEFAULT_REDACT_KEYS:
        return _by_default
    return functools.partial(_by_keys, redact_keys=redact_keys)


def redact_text(text: str) -> str:
    """Text in which what looks like a secret is replaced: ``api_key=...``, ``Bearer ...``.

    Numbers stay (``num_tokens: 131072``), but those of passwords. Of a long text the first 16,384
    characters: a line of 16 MB held its thread for 4 s, and no back end keeps more of an attribute.

    Characters that UTF-8 cannot hold (lone surrogates, of which bytes that were no text leave
    many) become ``?``: one of them would make a whole batch unsendable.
    """
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - len(_TOO_MUCH)] + _TOO_MUCH
    return _SECRET_IN_TEXT.sub(_replaced, to_utf8(text))


def to_utf8(text: str) -> str:
    """The text, with ``?`` for each character that UTF-8 cannot hold."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")


def _replaced(found: re.Match[str]) -> str:
    name = found["name"]
    if name is None:
        return f"{found['bearer'] or ''}{REDACTED}"
    words = _words(name)
    is_number = _NUMBER.fullmatch(found["value"]) is not None
    if (is_number and not _PASSWORDS.intersection(words)) or _is_special(words):
        return found[0]
    return f"{name}{found['between']}{REDACTED}"


def _is_special(words: tuple[str, ...]) -> bool:
    return len(words) > 1 and words[-1] in ("token", "tokens") and words[-2] in _SPECIAL


@functools.lru_cache(maxsize=2048)
def _by_default(key: str) -> Secrecy:
    words = _words(key)
    if _is_harmless(words):
        return Secrecy.NONE
    if _holds(words, _PASSWORDS):
        return Secrecy.WHOLE
    if _holds(words, _CREDENTIALS) and not _is_special(words):
        return Secrecy.TEXTS
    if _holds(words, _USER_TEXTS) and words[-1] not in _SETTINGS:
        return Secrecy.TEXTS
    return Secrecy.NONE


def _by_keys(key: str, redact_keys: Collection[str]) -> Secrecy:
    words = _words(key)
    found = not _is_harmless(words) and _holds(words, redact_keys)
    return Secrecy.WHOLE if found else Secrecy.NONE


def _is_harmless(words: tuple[str, ...]) -> bool:
    return not words or words[-1] in _HARMLESS or words[0] in ("num", "n", "max", "min")


def _holds(words: tuple[str, ...], names: Collection[str]) -> bool:
    joined = f" {' '.join(words)} "
    return any(f" {' '.join(_words(name))} " in joined for name in names)


@functools.lru_cache(maxsize=2048)
def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD.findall(name))
