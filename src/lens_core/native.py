"""The compiled part: whether there is one, why there is none, and what is bound to it.

``_native.c``, beside this module, is a C extension for the limited API, which the build makes where
there is a compiler. Everything works without it, a few microseconds a message slower
(``benchmarks/bench_broadcast.py``). ``LENS_NATIVE=0`` leaves it out, ``LENS_NATIVE=1`` refuses to
go on without it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, Protocol, TypeVar

from lens_core.carrier import Carrier
from lens_core.errors import LensError

__all__ = ["NATIVE", "NativeCoreError", "compiled", "in_python", "signal_watch"]

#: With what it makes a carrier of ids: the type and its slots.
_CARRIER: Final = (Carrier, *Carrier.__slots__)
_F = TypeVar("_F", bound=Callable[..., Any])


class NativeCoreError(LensError, ImportError):
    """``LENS_NATIVE=1``, where the compiled part is not there or cannot be loaded."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"LENS_NATIVE=1, and the compiled part cannot be used: {problem}; install lens-otel "
            "where there is a C compiler, or leave LENS_NATIVE out"
        )
        self.problem = problem


def _load() -> tuple[ModuleType | None, str]:
    wanted = os.environ.get("LENS_NATIVE", "").strip()
    if wanted == "0":
        return None, "LENS_NATIVE=0"
    try:
        native = importlib.import_module("lens_core._native")
    except ImportError as error:
        if wanted == "1":
            raise NativeCoreError(str(error)) from error
        return None, str(error)
    return native, ""


_native, _why_not = _load()

#: ``"compiled code"``, or why it is not: what ``lens doctor`` says.
NATIVE: Final = f"plain Python ({_why_not})" if _native is None else "compiled code"


class SignalWatch(Protocol):
    """Has a signal's number written to a descriptor at once, whatever the main thread does."""

    def watch_signal(self, signum: int, fd: int, /) -> bool:
        """Begin with that; false where Python has no handler for the signal."""

    def unwatch_signal(self, fd: int, /) -> None:
        """End it, if it is this descriptor."""


#: ``None`` in plain Python.
signal_watch: Final[SignalWatch | None] = _native
#: The contract of each compiled function, in Python, by its name.
in_python: Final[dict[str, Callable[..., Any]]] = {}


def compiled(*kept: object) -> Callable[[_F], _F]:
    """A decorator: the compiled function of the same name, where there is one.

    It does the frequent case and calls the decorated function, which is the contract, for all else.

    Args:
        kept: What the compiled function needs beside its arguments and a carrier's parts, as
            ``_native.c`` lists it.
    """

    def decorate(function: _F) -> _F:
        in_python[function.__name__] = function
        if _native is None:
            return function
        fast: _F = _native.bind(function.__name__, function, *_CARRIER, *kept)
        return fast

    return decorate
