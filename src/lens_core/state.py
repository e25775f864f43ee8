"""The carrier of the current step, for code deep in the call stack.

``broadcast_trace_context`` returns a carrier in the training loop; the pipeline schedule that
needs it is in another module. A :class:`CarrierSlot` keeps it out of every signature in between.

A slot looks in a ``ContextVar`` first, so concurrent asyncio tasks do not overwrite each other, and
then at a process-wide default, so plain threads and autograd's backward threads (which start with
an empty context) see what the training loop set. Setting it inside an asyncio task leaves the
default alone: which task was last says nothing about the thread that asks.

There is no lock: a signal handler may ask while its thread is setting, and a forked child while a
thread of its parent was. What is replaced is one attribute, by a new object each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Final

__all__ = ["CarrierSlot", "SlotToken", "get_pp_trace_carrier", "set_pp_trace_carrier"]

_Value = Mapping[str, str] | None


@dataclass(frozen=True, slots=True, eq=False)
class _Default:
    """What the process holds; compared by identity, so that it says who set it."""

    carrier: _Value


@dataclass(frozen=True, slots=True)
class SlotToken:
    """What :meth:`CarrierSlot.set` replaced; hand it to :meth:`CarrierSlot.reset`."""

    _local: Token[_Value]
    _set: _Default | None
    _previous: _Default


class CarrierSlot:
    """Holds one carrier, per asyncio task and per thread, with a process-wide default."""

    def __init__(self, name: str) -> None:
        self._local: ContextVar[_Value] = ContextVar(name)
        self._default = _Default(None)

    def set(self, carrier: Mapping[str, str] | None) -> SlotToken:
        """Store a copy of the carrier (or ``None``: no carrier); returns a token to undo it."""
        value: _Value = None if carrier is None else dict(carrier)
        previous, default = self._default, None
        if not _in_asyncio_task():
            self._default = default = _Default(value)
        return SlotToken(self._local.set(value), default, previous)

    def reset(self, token: SlotToken) -> None:
        """Restore what was there before the matching :meth:`set`.

        In another thread or task than that of the ``set``, only the process-wide default is
        restored; and that only if nobody set it since. A second time does nothing.
        """
        if token._set is not None and self._default is token._set:
            self._default = token._previous
        try:
            self._local.reset(token._local)
        except (ValueError, RuntimeError):
            # The token was made in another context, where this one's value is another, or it was
            # used before: there is nothing to restore.
            return

    def get(self) -> dict[str, str] | None:
        """A copy of the carrier of this task or thread, else of the process; else ``None``."""
        carrier = self._local.get(self._default.carrier)
        return None if carrier is None else dict(carrier)

    @contextmanager
    def use(self, carrier: Mapping[str, str] | None) -> Iterator[None]:
        """A block in which the slot holds this carrier."""
        token = self.set(carrier)
        try:
            yield
        finally:
            self.reset(token)


def _in_asyncio_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no running event loop
        return False


#: The carrier of the current pipeline step.
_pp_trace_carrier: Final = CarrierSlot("lens_pp_trace_carrier")


def set_pp_trace_carrier(carrier: Mapping[str, str] | None) -> SlotToken:
    """Store the carrier of the current step, for :func:`get_pp_trace_carrier` anywhere below.

    Args:
        carrier: From ``broadcast_trace_context``; ``None`` clears it.

    Returns:
        A token; ignore it in a training loop that sets the carrier anew every step.
    """
    return _pp_trace_carrier.set(carrier)


def get_pp_trace_carrier() -> dict[str, str] | None:
    """The carrier of the current step, or ``None`` where none was set."""
    return _pp_trace_carrier.get()
