"""Takes a context back without complaint."""

from __future__ import annotations

from contextvars import Token

from opentelemetry import context as otel_context
from opentelemetry.context import Context

__all__ = ["detach"]


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
