"""Keeps a truncated journal from killing the process.

What it prevents: a store into a mapped page that its file no longer has raises SIGBUS, whose
default is to kill the process, so somebody who truncates a journal (a clean-up job, a full-disk
rescue) would kill a training run at its next span. No file can be kept from being cut short, and
:func:`signal.signal` cannot handle it: its handler would return to the store, which would fault
again, for ever.

So the handler here is set with ``sigaction``. It puts anonymous memory where the mapping was and
returns, and the store goes through; nothing reaches the file any more, which the heartbeat of the
journal notices. It is run by the thread that stores, in the store: that thread holds the
interpreter lock and is inside of nothing else. Any other SIGBUS gets what was installed before.

Only on 64-bit Linux; elsewhere nothing is installed.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import struct
import sys
from typing import Final

__all__ = ["BusErrorGuard", "guard"]

_SUPPORTED: Final = sys.platform == "linux" and struct.calcsize("P") == 8
_SA_SIGINFO: Final = 4
#: Offsets in ``siginfo_t`` of 64-bit Linux.
_SI_CODE_AT: Final = 8
_SI_ADDR_AT: Final = 16
_READ_WRITE: Final = 0x1 | 0x2
_PRIVATE_FIXED_ANONYMOUS: Final = 0x02 | 0x10 | 0x20


class _SigAction(ctypes.Structure):
    # glibc and musl agree on this one on all 64-bit Linux that Python wheels exist for.
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class BusErrorGuard:
    """Watches mappings; the signal handler is installed with the first of them.

    Whoever installs a handler of their own later (``faulthandler.enable()``) replaces it, so the
    heartbeat of a journal calls :meth:`renew` now and then.
    """

    def __init__(self) -> None:
        self._regions: list[tuple[int, int]] = []
        self._before = _SigAction()  # all zero: the default action
        self._action = _SigAction()
        self._callback: object = None

    def watch(self, memory: mmap.mmap) -> tuple[int, int]:
        """Survive the truncation of the file behind a mapping; gives its address and size."""
        view = ctypes.c_char.from_buffer(memory)
        region = ctypes.addressof(view), len(memory)
        del view  # or the mapping could not be closed
        if _SUPPORTED:
            self._regions.append(region)
            if self._callback is None:
                self._prepare()
            self.renew()
        return region

    def renew(self) -> None:
        """Put the handler back where somebody has replaced it; theirs gets what is not ours."""
        if self._callback is None or not self._regions:
            return
        now = _SigAction()
        self._libc.sigaction(signal.SIGBUS, None, ctypes.byref(now))
        if now.handler != self._action.handler:
            self._libc.sigaction(
                signal.SIGBUS, ctypes.byref(self._action), ctypes.byref(self._before)
            )

    def forget(self, region: tuple[int, int]) -> None:
        """Watch it no longer."""
        if region in self._regions:
            self._regions.remove(region)

    def _prepare(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.mmap.restype = ctypes.c_void_p
        # address, size, protection, flags, descriptor, offset
        self._libc.mmap.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
        )
        callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
            self._on_bus_error
        )
        self._action.handler = ctypes.cast(callback, ctypes.c_void_p).value
        # Not on the alternate stack: the one that faulthandler sets up is too small for Python.
        self._action.flags = _SA_SIGINFO
        self._callback = callback

    def _on_bus_error(self, signum: int, info: int, context: int) -> None:
        code = ctypes.c_int.from_address(info + _SI_CODE_AT).value
        address = ctypes.c_void_p.from_address(info + _SI_ADDR_AT).value or 0
        for start, size in self._regions:
            if code > 0 and start <= address < start + size:
                flags = _PRIVATE_FIXED_ANONYMOUS
                if self._libc.mmap(start, size, _READ_WRITE, flags, -1, 0) == start:
                    return
        # Not ours. The store that faulted is tried again and meets the handler from before; a
        # signal that somebody sent has to be sent again. Where that handler in turn hands on to
        # this one, which it found when it was installed, the default action is the end.
        self._libc.sigaction(signum, ctypes.byref(self._before), None)
        self._before = _SigAction()
        if code <= 0:
            signal.raise_signal(signum)


#: One per process, as there is one action per signal.
guard: Final = BusErrorGuard()
