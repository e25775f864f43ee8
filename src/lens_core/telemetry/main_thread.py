"""Have the main thread do what only it may, such as to install a signal handler."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Final

__all__ = ["on_main_thread"]

_to_do: Final[list[Callable[[], None]]] = []


def _run_what_is_to_do(_: int | None) -> int:
    with contextlib.suppress(Exception):
        while _to_do:
            _to_do.pop()()
    return 0


#: It must stay as long as the interpreter may call it.
_PENDING_CALL: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_what_is_to_do)


def on_main_thread(action: Callable[[], None]) -> None:
    """Have the main thread do this between two of its bytecodes, as it runs signal handlers."""
    if not _to_do:  # else it is stuck, and one call waits for it already
        _to_do.append(action)
        ctypes.pythonapi.Py_AddPendingCall(_PENDING_CALL, None)
