"""OpenTelemetry's current context, without the layers of functions around it.

The API keeps it in a :class:`~contextvars.ContextVar`; its functions reach that through two Python
functions each. Where a context is made current for each call that arrives, with cold caches, they
are a part of what a call costs (``benchmarks/bench_ray.py``). Where the API keeps it elsewhere
(``OTEL_PYTHON_CONTEXT``), these are the API's functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry.context import Context

__all__ = ["attach_context", "detach", "get_current_context"]


def _variable() -> ContextVar[Context] | None:
    before = otel_context.get_current()
    token = otel_context.attach(before)
    otel_context.detach(token)
    variable = token.var if isinstance(token, Token) else None
    try:
        return variable if variable is not None and variable.get() is before else None
    except LookupError:
        return None


_current: Final = _variable()

#: The current context.
get_current_context: Final[Callable[[], Context]] = (
    otel_context.get_current if _current is None else _current.get
)
#: Makes a context current; the token is for :func:`detach`.
attach_context: Final[Callable[[Context], Token[Context]]] = (
    otel_context.attach if _current is None else _current.set
)


def detach(token: Token[Context]) -> None:
    """Restore what was current before ``opentelemetry.context.attach`` gave this token.

    Unlike ``opentelemetry.context.detach``, logs no traceback where the block ends in another
    context than it began in. That is no mistake: an async generator that is left half-way is closed
    by the event loop, in a task of its own, where nothing has to be restored.
    """
    try:
        token.var.reset(token)
    except (ValueError, RuntimeError):  # another context, or taken back already
        return
    except AttributeError:  # kept elsewhere, as OTEL_PYTHON_CONTEXT says
        otel_context.detach(token)
