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
    problem_of,
    process_group_class,
    sequence_of,
    work_class,
)
from lens_contrib.torch.autotrace.operations import Operation, byte_count
from lens_contrib.torch.autotrace.patches import Patches, never_raises
from lens_contrib.torch.autotrace.recorder import recorder

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
    return sequence_of(group, _works.p2p_counts.get(group.group_name, 0))


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
    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_live:
                return inner(self, *args, **kwargs)
            operation = _begin_collective(op, self, args, kwargs)
            work = None
            try:
                work = inner(self, *args, **kwargs)
                return work
            finally:
                _begun_collective(operation, work)

        return method

    return around


@never_raises
def _begin_collective(
    op: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Operation, bool]:
    options = kwargs.get("opts") or (args[-1] if args else None)
    is_sync = not getattr(options, "asyncOp", True)
    tensors = args[0] if args else next(iter(kwargs.values()), None)
    size = byte_count(tensors)
    operation = Operation(op, group, time.time_ns(), next_sequence(group), bytes_=size)
    recorder.collectives += 1
    recorder.bytes += size
    recorder.enter_operation(operation, waits=is_sync)
    return operation, is_sync


@never_raises
def _begun_collective(begun: tuple[Operation, bool] | None, work: Any) -> None:
    if begun is None:
        return
    operation, is_sync = begun
    if is_sync and work is not None:
        _works.now[threading.get_ident()] = (work, operation)
        return
    recorder.leave_operation(operation, waits=is_sync)
    if work is not None:
        _works.of[work] = operation


def _around_p2p(op: str, *, has_peer: bool) -> Callable[..., Any]:
    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_live:
                return inner(self, tensors, *args, **kwargs)
            peer = next(iter((*args, *kwargs.values())), -1) if has_peer else -1
            operation = _begin_p2p(op, self, tensors, peer)
            work = None
            try:
                work = inner(self, tensors, *args, **kwargs)
                return work
            finally:
                _begun_collective(operation, work)

        return method

    return around


@never_raises
def _begin_p2p(op: str, group: Any, tensors: Any, peer: int) -> tuple[Operation, bool]:
    name = group.group_name
    _works.p2p_counts[name] = _works.p2p_counts.get(name, 0) + 1
    size = byte_count(tensors)
    operation = Operation(op, group, time.time_ns(), peer=peer, bytes_=size)
    recorder.p2p += 1
    recorder.bytes += size
    recorder.enter_operation(operation, waits=False)
    return operation, False


def _around_wait(inner: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_live:
            return inner(self, *args, **kwargs)
        operation = _begin_wait(self)
        try:
            return inner(self, *args, **kwargs)
        finally:
            if operation is not None:
                _end_wait(operation)

    return wait


@never_raises
def _begin_wait(work: Any) -> Operation | None:
    of, operation = _works.now.pop(threading.get_ident(), (None, None))
    if of is work:
        return operation
    if operation is not None:
        recorder.leave_operation(operation, waits=True)  # nobody waited for it
    begun = _works.of.pop(work, None)
    if begun is None:
        return None
    waited = Operation(
        begun.op, begun.group, time.time_ns(), begun.sequence, begun.peer, begun.bytes
    )
    recorder.enter_operation(waited, waits=True)
    return waited


@never_raises
def _end_wait(operation: Operation) -> None:
    recorder.leave_operation(operation, waits=True)
