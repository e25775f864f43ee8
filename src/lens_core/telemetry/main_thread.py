"""Have the main thread do what only it may, such as to install a signal handler."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Final

__all__ = ["on_main_thread"]

_to_do: Final[list[Callable[[], None]]] = []

# Of a forked child nothing is asked that its parent was asked.
os.register_at_fork(after_in_child=_to_do.clear)


def _run_what_is_to_do(_: int | None) -> int:
    while _to_do:
        with contextlib.suppress(Exception):
            _to_do.pop(0)()
    return 0


#: It must stay as long as the interpreter may call it.
_PENDING_CALL: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_what_is_to_do)


def on_main_thread(action: Callable[[], None]) -> None:
    """Have the main thread do this between two of its bytecodes, as it runs signal handlers.

    In the order of the calls, and once however often it is asked for while the thread is stuck.
    """
    if action not in _to_do:
        _to_do.append(action)
    # Always: the interpreter keeps a bounded number of calls and says no when it has no room.
    ctypes.pythonapi.Py_AddPendingCall(_PENDING_CALL, None)
