"""What a span says of an exception that left a Ray call.

Errors that another task raised are named, but recorded with their stack only where they were born:
Ray puts the whole remote traceback into the text of the exception, and it would be written down
again at every hop. Leaving an actor and being cancelled are no errors.
"""

from __future__ import annotations

import asyncio
from typing import Final

from opentelemetry.trace import Span, StatusCode
from ray.exceptions import RayTaskError

from lens_contrib.ray.compat import leaves_actor
from lens_core.diagnostics import diagnostics
from lens_core.semconv import ERROR_TYPE, RAY_TASK_CANCELLED
from lens_core.spans.status import error_type, mark_ordinary_end, one_line, record_error

__all__ = ["record_failure"]

#: How Ray cancels: a sync task, an async one, a generator that streams.
_CANCELLATIONS: Final = (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)


def record_failure(span: Span, error: BaseException, *, cancels: bool = False) -> None:
    """Say on the span what the code under it raised. Never raises.

    Args:
        span: The span, which is not ended.
        error: What was raised.
        cancels: Whether an exception of the kinds with which Ray cancels means that it did.
    """
    try:
        if leaves_actor(error):
            mark_ordinary_end(error)
            return
        if cancels and isinstance(error, _CANCELLATIONS):
            mark_ordinary_end(error)
            span.set_attribute(RAY_TASK_CANCELLED, True)
        elif isinstance(error, RayTaskError):
            _name(span, error)
        else:
            record_error(span, error)
    except Exception as failure:  # noqa: BLE001 - must not replace the user's exception
        diagnostics.record("span.record_failed", f"{type(failure).__name__}: {failure}")


def _name(span: Span, error: RayTaskError) -> None:
    cause: object = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if not isinstance(cause, BaseException):
        record_error(span, error)
        return
    kind, line = error_type(cause), one_line(cause)
    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(StatusCode.ERROR, f"{kind}: {line}" if line else kind)
