"""Sees every collective, send and receive that Python code begins, and the waits for them.

The methods of the pybind classes are replaced and no public function is: ``P2POp`` and coalescing
compare those by identity, and functional collectives are found by them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from lens_contrib.torch.autotrace.compat import (
    COLLECTIVES,
    P2P,
    leave_uncompiled,
    problem_of,
    process_group_class,
    sequence_of,
    work_class,
)
from lens_contrib.torch.autotrace.operations import Operation, byte_count
from lens_contrib.torch.autotrace.patches import Patches, never_raises
from lens_contrib.torch.autotrace.recorder import recorder
from lens_core.diagnostics import describe, diagnostics

__all__ = ["forget_groups", "hook_operations", "next_sequence"]


class _Works:
    """Which operation a work object is of, and whether its launch counts as waiting."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Any, Operation] = weakref.WeakKeyDictionary()
        #: Thread to its synchronous operation, whose wait follows at once.
        self.now: dict[int, tuple[Any, Operation]] = {}
        self.p2p_counts: dict[str, int] = {}
        self.has_sequence = not problem_of("sequence")


_works: Final = _Works()


def next_sequence(group: Any) -> int | None:
    """The number of the collective that a group is about to begin; ``None`` if unknown."""
    if not _works.has_sequence:
        return None
    counts = _works.p2p_counts
    return sequence_of(group, counts.get(group.group_name, 0) if counts else 0)


def forget_groups() -> None:
    """The process groups so far are gone; new ones may have their names."""
    _works.p2p_counts.clear()


def hook_operations(patches: Patches) -> None:
    """Have the recorder told of operations."""
    owner = process_group_class()
    for name, op in COLLECTIVES.items():
        if hasattr(owner, name):
            patches.wrap([owner], name, _around_collective(op))
    for name, op in P2P.items():
        patches.wrap([owner], name, _around_p2p(op, has_peer=name != "recv_anysource"))
    patches.wrap([work_class()], "wait", _around_wait)


def _around_collective(op: str) -> Callable[..., Any]:
    def begin(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        options = kwargs.get("opts") or (args[-1] if args else None)
        size = byte_count(args[0] if args else next(iter(kwargs.values()), None))
        recorder.collectives += 1
        recorder.bytes += size
        is_sync = not getattr(options, "asyncOp", True)
        sequence = next_sequence(group)
        return Operation(op, group, time.time_ns(), sequence, None, size, waits=is_sync)

    return _around(begin)


def _around_p2p(op: str, *, has_peer: bool) -> Callable[..., Any]:
    def begin(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        given = (*args, *kwargs.values())
        peer = given[1] if has_peer and len(given) > 1 else -1
        size = byte_count(given[0])
        recorder.p2p += 1
        recorder.bytes += size
        name = group.group_name
        _works.p2p_counts[name] = _works.p2p_counts.get(name, 0) + 1
        return Operation(op, group, time.time_ns(), None, peer, size, waits=False)

    return _around(begin)


def _around(begin: Callable[..., Operation]) -> Callable[..., Any]:
    leave_uncompiled(begin, with_calls=True)

    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        # Guarded here and not by never_raises: a function more is a microsecond of each operation.
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_live:
                return inner(self, *args, **kwargs)
            operation = work = None
            try:
                operation = begin(self, args, kwargs)
                recorder.enter_operation(operation)
            except Exception as error:  # noqa: BLE001 - the operation goes on
                _failed(error)
            try:
                work = inner(self, *args, **kwargs)
                return work
            finally:
                if operation is not None:
                    _begun(operation, work)

        return method

    return around


@never_raises
def _begun(operation: Operation, work: Any) -> None:
    if operation.waits and work is not None:
        _works.now[threading.get_ident()] = (work, operation)
        return
    recorder.leave_operation(operation)
    if work is not None:
        _works.of[work] = operation


def _around_wait(inner: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_live:
            return inner(self, *args, **kwargs)
        operation = _begin_wait(self)
        try:
            return inner(self, *args, **kwargs)
        finally:
            if operation is not None:
                try:
                    recorder.leave_operation(operation)
                except Exception as error:  # noqa: BLE001 - the wait is over
                    _failed(error)

    return wait


@never_raises
def _begin_wait(work: Any) -> Operation | None:
    of, operation = _works.now.pop(threading.get_ident(), (None, None))
    if of is work:
        return operation
    if operation is not None:
        recorder.leave_operation(operation)  # nobody waited for it
    begun = _works.of.pop(work, None)
    if begun is None:
        return None
    waited = Operation(
        begun.op, begun.group, time.time_ns(), begun.sequence, begun.peer, begun.bytes
    )
    recorder.enter_operation(waited)
    return waited


def _failed(error: Exception) -> None:
    diagnostics.record("autotrace.failed", describe(error))
