"""Which ranks of a pipeline do not derive the ids that links to them would need.

With derived links nothing is sent, so no message shows that a rank is not instrumented, or under
another name, and that links to its spans would lead nowhere. So each rank says in the group's store
that it takes part, and looks there, on a thread of its own, for those that it has received from.
The training thread never waits: it reads who is known to be absent.
"""

from __future__ import annotations

import time
import weakref
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final

from lens_contrib.torch.store import BoundedStore, group_store
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import ProcessGroupError

__all__ = ["Membership"]

_OPERATION_S: Final = 5.0
#: Who has sent something in a run was instrumented before; the store may be slow to say so.
_GRACE_S: Final = 2.0
_PAUSE_S: Final = 0.1
#: A rank that is absent may be instrumented later; nobody waits for that.
_ABSENT_PAUSE_S: Final = 10.0


class Membership:
    """The ranks of a pipeline, as far as they are known to be absent.

    Never raises and never waits. Where the store does not answer, nobody is known to be absent.

    Args:
        key: What the pipeline has alone, the same on all of its ranks.
        rank: This process's global rank.

    Attributes:
        absent: Global ranks that take part in runs and derive no ids of this pipeline.
    """

    def __init__(self, key: str, rank: int) -> None:
        self.absent: frozenset[int] = frozenset()
        self._heard: set[int] = set()
        self._told: SimpleQueue[int | None] = SimpleQueue()
        # It knows the queue and not this object, which could not be collected otherwise.
        arguments = weakref.ref(self), self._told, key, rank
        try:
            Thread(target=_call, args=arguments, name="lens-roll-call", daemon=True).start()
        except RuntimeError as error:  # no thread more, or the interpreter ends
            diagnostics.record("pipelining.no_roll_call", describe(error))
        weakref.finalize(self, self._told.put, None).atexit = False

    def heard(self, rank: int) -> None:
        """Something of a run has arrived from a rank."""
        if rank not in self._heard:
            self._heard.add(rank)
            self._told.put(rank)


def _call(
    roll: weakref.ref[Membership],
    told: SimpleQueue[int | None],
    key: str,
    rank: int,
) -> None:
    prefix = f"lens/pipelining/derived/{key}/"
    pending: dict[int, float] = {}  # rank to when it counts as absent
    absent: set[int] = set()
    try:
        group_store(timeout_s=_OPERATION_S).set(f"{prefix}{rank}", "here")
        store: BoundedStore | None = None
        while True:
            if not pending:
                store = None  # its server has a connection less to keep
            pause_s = _PAUSE_S if len(pending) > len(absent) else _ABSENT_PAUSE_S
            try:
                heard = told.get(timeout=pause_s if pending else None)
                if heard is None:
                    return
                pending[heard] = time.monotonic() + _GRACE_S
            except Empty:
                pass
            store = store or group_store(timeout_s=_OPERATION_S)
            for other, due_s in list(pending.items()):
                if store.check([f"{prefix}{other}"]):
                    del pending[other]
                    absent.discard(other)
                elif time.monotonic() >= due_s and other not in absent:
                    absent.add(other)
                    diagnostics.record(
                        "pipelining.absent",
                        f"rank {other} runs in pipeline {key.partition('@')[0]!r}, and derives no "
                        "ids of it",
                        todo="Call instrument_pipelining() on every rank, with the same name and "
                        "links.",
                    )
            listener = roll()
            if listener is None:
                return
            listener.absent = frozenset(absent)
            del listener
    except ProcessGroupError:
        pass  # it was destroyed, and nothing is sent any more
    except Exception as error:  # noqa: BLE001 - a store of the user's may raise anything
        diagnostics.record("pipelining.no_roll_call", describe(error))
