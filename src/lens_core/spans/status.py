"""How a span ends: quietly, and saying so if its body raised.

One rule for every place that runs user code under a span: an exception of any kind, also a
``KeyboardInterrupt`` or a cancellation, marks the span as an error, with one event and a one-line
description. Two are ordinary ends and leave the status unset: ``GeneratorExit`` (the consumer
stopped early) and ``SystemExit`` with status 0.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import Final

from opentelemetry.trace import Span, Status, StatusCode

from lens_core.diagnostics import describe, diagnostics
from lens_core.semconv import ERROR_TYPE
from lens_core.spans.attributes import redact_text

__all__ = [
    "end_span",
    "error_type",
    "is_ordinary_end",
    "mark_ordinary_end",
    "one_line",
    "record_error",
]

_MAX_DESCRIPTION: Final = 256


def is_ordinary_end(error: BaseException) -> bool:
    """Whether this exception is a way to end rather than a failure."""
    if isinstance(error, SystemExit):
        return error.code is None or error.code == 0
    return isinstance(error, GeneratorExit)


def mark_ordinary_end(error: BaseException) -> None:
    """Say of an exception that it ends a call as it should, and not the process."""
    with suppress(AttributeError):
        error._lens_ordinary_end = True  # type: ignore[attr-defined]


def error_type(error: BaseException) -> str:
    """The qualified name of the exception's class, for the attribute ``error.type``."""
    kind = type(error)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def one_line(error: BaseException) -> str:
    """The first line of the exception's text, shortened, secrets replaced; never raises."""
    try:
        text = redact_text(str(error))
    except Exception:  # noqa: BLE001 - a broken __str__ must not replace the user's exception
        text = "<str() of the exception failed>"
    line = next((part.strip() for part in text.splitlines() if part.strip()), "")
    return line if len(line) <= _MAX_DESCRIPTION else line[: _MAX_DESCRIPTION - 3] + "..."


def end_span(span: Span) -> None:
    """End the span. Never raises: what a span processor raises is counted, as ``span.failed``."""
    try:
        span.end()
    except Exception as error:  # noqa: BLE001 - must not replace what the user's code raised
        diagnostics.record("span.failed", describe(error))


def record_error(span: Span, error: BaseException) -> None:
    """Mark the span with what its body raised. Never raises; does not end the span."""
    if is_ordinary_end(error):
        return
    try:
        if not span.is_recording():
            return
        kind, line = error_type(error), one_line(error)
        try:
            text = redact_text("".join(traceback.format_exception(error)))
            span.record_exception(
                error,
                {"exception.message": redact_text(str(error)), "exception.stacktrace": text},
            )
        except Exception:  # noqa: BLE001 - the exception's own str() may raise
            span.add_event("exception", {"exception.type": kind, "exception.message": line})
        span.set_attribute(ERROR_TYPE, kind)
        span.set_status(Status(StatusCode.ERROR, f"{kind}: {line}" if line else kind))
    except Exception as failure:  # noqa: BLE001 - a foreign span may raise anything
        diagnostics.record("span.record_failed", describe(failure))
