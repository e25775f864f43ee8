"""OTLP JSON Lines as they are read: what this project and the Collector's file exporter write.

One message per line. A line that a killed process left unfinished, or that is not OTLP, is reported
and passed over; the rest is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeVar, cast

from lens_core.diagnostics import describe
from lens_core.otlp.json_spans import JsonObject
from lens_core.shared_files import open_regular

__all__ = ["json_list", "json_object", "read_lines", "span_groups"]

T = TypeVar("T")

#: Largest line that is read: the Collector's file exporter writes a batch per line.
_MAX_LINE_BYTES: Final = 256 * 1024 * 1024


def read_lines(
    path: Path,
    decode: Callable[[JsonObject], T],
    problems: list[str],
    *,
    unfinished: bool = True,
) -> Iterator[T]:
    """What the lines of a file mean, each decoded as a whole or not at all.

    Args:
        path: The file.
        decode: What a message means. A line for which it raises ``ValueError``, ``TypeError``,
            ``KeyError`` or ``AttributeError`` is one of another form.
        problems: Gets a line for each piece that could not be read:
            ``"file:line: what is wrong"``.
        unfinished: Whether a last line without an end is looked at: it may still be written to.
    """
    try:
        with open_regular(path) as file:
            for number, line in enumerate(_lines(file), 1):
                whole = line.endswith(b"\n")
                if not line.strip() or not (whole or unfinished):
                    continue
                try:
                    decoded = decode(json_object(json.loads(line)))
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    torn = "" if whole else " (unfinished: the writer was killed)"
                    problems.append(f"{path}:{number}: {_describe(error)}{torn}")
                    continue
                yield decoded
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}")


def span_groups(message: JsonObject) -> Iterator[tuple[JsonObject, JsonObject, list[JsonObject]]]:
    """Resource group, scope group and spans of each scope of a message.

    Raises:
        TypeError: it is not of that form.
    """
    for group in map(json_object, json_list(message.get("resourceSpans", ()))):
        for scope in map(json_object, json_list(group.get("scopeSpans", ()))):
            yield group, scope, [json_object(span) for span in json_list(scope.get("spans", ()))]


def json_object(value: object) -> JsonObject:
    """A value that is an object.

    Raises:
        TypeError: it is another one.
    """
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return cast("JsonObject", value)


def json_list(value: object) -> list[object]:
    """A value that is an array; that of a name which is missing is ``()``.

    Raises:
        TypeError: it is another one.
    """
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected an array, got {type(value).__name__}")
    return list(value)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.readline(_MAX_LINE_BYTES), b"")


def _describe(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos}"
    return f"not OTLP: {describe(error)}"
