"""A store of ``torch.distributed`` in which no call waits longer than a deadline of our own.

Its own timeouts do not bound a call: a connection that is cloned connects with the timeout of the
one it is cloned from, and ``check`` and ``get`` wait without any for a server that is stopped or
does not answer. So each call runs on a thread that may be stuck; torch releases the interpreter
lock there. The first call that passes its deadline gives the connection up for good.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

from lens_core.errors import MissingExtraError, ProcessGroupError, StoreError

try:
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["BoundedStore", "KeyStore", "bounded", "group_store"]

T = TypeVar("T")


class KeyStore(Protocol):
    """What is used of a ``torch.distributed.Store``; each kind of store has it."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """The value of a key."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it holds what is expected (empty: nothing yet); what it then holds."""


class _Job(Generic[T]):
    """One call, and what came of it."""

    __slots__ = ("done", "error", "result", "what")

    def __init__(self, what: Callable[[KeyStore], T]) -> None:
        self.what = what
        self.result: T | None = None
        self.error: Exception | None = None
        self.done = threading.Lock()
        self.done.acquire()


class _Connection:
    """A store and the one thread that calls it; the thread ends with this object."""

    def __init__(self, connect: Callable[[], KeyStore]) -> None:
        self.given_up = ""
        self._jobs: SimpleQueue[_Job[object] | None] = SimpleQueue()
        self._connect = connect
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_served = False

    def run(self, what: Callable[[KeyStore], T], wait_s: float) -> T:
        if os.getpid() != self._pid:
            raise StoreError("this process was forked from the one that made the connection")
        if self.given_up:
            raise StoreError(self.given_up)
        if not self._is_served:
            self._serve()
        job = _Job(what)
        self._jobs.put(job)  # type: ignore[arg-type]  # _Job[T]: what it is is the caller's
        if not job.done.acquire(timeout=min(max(0.0, wait_s), threading.TIMEOUT_MAX)):
            self.given_up = self.given_up or f"it did not answer within {wait_s:.3g} s"
            self._jobs.put(None)
            raise StoreError(self.given_up)
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]  # None only where what() gave that

    def _serve(self) -> None:
        with self._lock:
            if self._is_served:
                return
            # A daemon: the process ends also where the thread is stuck. It knows the queue and not
            # this object, which could not be collected otherwise.
            arguments = self._jobs, self._connect
            threading.Thread(target=_answer, args=arguments, name="lens-store", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
            self._is_served = True


def _answer(jobs: SimpleQueue[_Job[object] | None], connect: Callable[[], KeyStore]) -> None:
    store: KeyStore | None = None
    while (job := jobs.get()) is not None:
        try:
            if store is None:
                store = connect()
            job.result = job.what(store)
        except Exception as error:  # noqa: BLE001 - raised again where the call was made
            job.error = error
        job.done.release()


class BoundedStore:
    """A store whose calls return or raise within a deadline, whatever becomes of its server.

    A call that passes its deadline leaves one daemon thread behind until the server answers or the
    process ends; every later one raises at once and starts nothing. Thread-safe. In a forked child
    every call raises: two processes cannot share a connection.

    A call costs two switches of threads, 20 to 45 us, beside the 160 to 240 us that
    ``TCPStore.get`` takes over loopback (2,000 calls of each in a row, two cores, torch 2.13).

    Args:
        connect: Gives the store; called by the first call, within its deadline.
        timeout_s: How long one call may take.

    Raises:
        StoreError: From each method, if the store did not answer in time, now or before, or in a
            forked child. What the store itself raises is raised as it is.
    """

    def __init__(self, connect: Callable[[], KeyStore], *, timeout_s: float) -> None:
        self.timeout_s: Final = timeout_s
        self._connection = _Connection(connect)
        self._end = math.inf

    def until(self, end: float) -> BoundedStore:
        """The same connection, on which no call waits beyond this time of ``time.monotonic``."""
        other = object.__new__(BoundedStore)
        other.__dict__.update(self.__dict__)
        other._end = end
        return other

    def run(self, what: Callable[[KeyStore], T]) -> T:
        """The result of some calls together, in one deadline."""
        return self._connection.run(what, min(self.timeout_s, self._end - time.monotonic()))

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""
        self.run(lambda store: store.set(key, value))

    def get(self, key: str, /) -> bytes:
        """The value of a key."""
        return self.run(lambda store: store.get(key))

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        return self.run(lambda store: store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it holds what is expected (empty: nothing yet); what it then holds."""
        return self.run(lambda store: store.compare_set(key, expected, desired))


def bounded(store: KeyStore, *, timeout_s: float) -> BoundedStore:
    """This store with a deadline for each call; as it is where it has one already."""
    if isinstance(store, BoundedStore):
        return store
    return BoundedStore(lambda: store, timeout_s=timeout_s)


def group_store(group: dist.ProcessGroup | None = None, *, timeout_s: float) -> BoundedStore:
    """A connection of our own to a group's store; made by the first call.

    A blocking call on a store blocks every other user of the same connection; on a clone it blocks
    no one else.

    Args:
        group: The process group; the default one if not given.
        timeout_s: Deadline of each operation, connecting included.

    Raises:
        ProcessGroupError: If there is no process group, or this process is not in it.
    """
    member = dist.group.WORLD if group is None else group
    if member is None or isinstance(member, int):
        raise ProcessGroupError(None, "has no process group; call init_process_group() first")
    shared: KeyStore = member.get_group_store()
    return BoundedStore(lambda: _clone(shared, timeout_s), timeout_s=timeout_s)


def _clone(shared: KeyStore, timeout_s: float) -> KeyStore:
    try:
        own: KeyStore = shared.clone()  # type: ignore[attr-defined]  # not in torch's stubs
    except dist.DistError:
        raise  # the server is gone: the shared connection would only be stuck as well
    except (AttributeError, RuntimeError, NotImplementedError):
        return shared  # a store that cannot be cloned, or a torch before clone(): share it
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        own.set_timeout(timedelta(seconds=timeout_s))  # type: ignore[attr-defined]  # likewise
    return own
