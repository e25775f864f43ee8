"""The context of forward, and of the caller of ``backward()``, inside autograd hooks.

On the CPU ``backward()`` runs hooks on the thread that called it, where everything is as usual.
Nodes on a CUDA device, a ``backward()`` called from another thread and deeply nested ones run on
threads whose context is empty: a span that a hook opens there is a root, in a trace of its own.

    with managed_span("layer", "attention"):
        y = attention(x)
        y.register_hook(in_forward_context(log_gradient))  # its spans are children of "attention"

    def other_hook(gradient):
        with backward_context():  # spans are children of that of whoever called backward()
            ...
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context

from lens_contrib.torch.compat import handed_to_this_thread
from lens_core.current_context import detach

__all__ = ["backward_context", "in_forward_context"]

P = ParamSpec("P")
R = TypeVar("R")

#: Where torch keeps the caller's context variables while ``backward()`` runs, for its own threads.
_KEPT_AS: Final = "context"


def in_forward_context(hook: Callable[P, R]) -> Callable[P, R]:
    """The hook, run under the span and baggage that are current now, on whatever thread.

    For ``Tensor.register_hook``, ``Node.register_hook``, module hooks and functions called from
    ``Function.backward``. What is bound lives as long as the hook: register it anew in each step.

    Args:
        hook: Any callable; its arguments and result pass through.
    """
    forward = otel_context.get_current()

    @functools.wraps(hook)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = otel_context.attach(forward)
        try:
            return hook(*args, **kwargs)
        finally:
            detach(token)

    return call


@contextmanager
def backward_context() -> Iterator[Context]:
    """A block, in a hook, under the context of the thread that called ``backward()``.

    Where a span is current already, nothing changes. Torch 2.13 keeps the caller's context for the
    threads of the engine, but a nested ``backward()`` erases it, and older releases keep none: then
    nothing changes either. :func:`in_forward_context` works in every case.

    Yields:
        The context that is current in the block.
    """
    current = otel_context.get_current()
    caller = None
    if not trace.get_current_span(current).get_span_context().is_valid:
        caller = _caller_context()
    if caller is None:
        yield current
        return
    token = otel_context.attach(caller)
    try:
        yield caller
    finally:
        detach(token)


def _caller_context() -> Context | None:
    kept = handed_to_this_thread(_KEPT_AS)
    if not isinstance(kept, contextvars.Context):
        return None
    # A context can be entered once at a time, and several threads may ask: each has a copy.
    return kept.copy().run(otel_context.get_current)
