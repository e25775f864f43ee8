"""What telemetry does in the middle of a schedule cannot raise into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lens_core.diagnostics import describe, diagnostics

__all__ = ["guarded"]

P = ParamSpec("P")
R = TypeVar("R")


def guarded(action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """The action's result; ``None`` where it raised, which is counted: training goes on."""
    try:
        return action(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - a foreign tracer or sampler may raise anything
        diagnostics.record("pipelining.failed", describe(error))
        return None
