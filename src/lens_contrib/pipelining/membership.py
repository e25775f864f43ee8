"""Which ranks of a pipeline take part in its links.

Before a byte is added to a user's group, every rank of it says that it will do so too
(:func:`shake_hands`). With derived links nothing is sent, so no message shows that a rank is not
instrumented, or under another name, and that links to its spans would lead nowhere. So each rank
says in the group's store that it takes part, and looks there, on a thread of its own, for those
that it has received from (:class:`Membership`). The training thread never waits for that: it reads
who is known to be absent.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final

from lens_contrib.pipelining.wire_links import WIRE_VERSION
from lens_contrib.torch.agreement import Facts, KeyStore, agree
from lens_contrib.torch.store import BoundedStore, group_store
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import AgreementError, MissingExtraError, ProcessGroupError
from lens_core.frame import P2P_CAPACITY

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["Membership", "shake_hands"]

_OPERATION_S: Final = 5.0
#: Who has sent something in a run was instrumented before; the store may be slow to say so.
_GRACE_S: Final = 2.0
_PAUSE_S: Final = 0.1
#: A rank that is absent may be instrumented later; nobody waits for that.
_ABSENT_PAUSE_S: Final = 10.0


def shake_hands(
    pipeline: str,
    group: dist.ProcessGroup | None,
    *,
    timeout_s: float,
    store: KeyStore | None = None,
) -> None:
    """Return only if every rank of the group adds the same frames to this pipeline.

    Through the group's store, with one verdict for all (:mod:`lens_contrib.torch.agreement`).
    After a refusal all ranks may try again, also those that had missed it: which attempt it is, is
    not counted in each process, but read off the store.

    Raises:
        AgreementError: If a rank did not come by the deadline, or differs in version, capacity,
            torch release or pipeline; on every rank that did come. Nothing was changed.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    shared = group_store(group, timeout_s=timeout_s) if store is None else store
    topic = _open_topic(shared, rank)
    mine: Facts = {
        "pipeline": pipeline,
        "wire version": WIRE_VERSION,
        "frame bytes": P2P_CAPACITY,
        "torch": ".".join(torch.__version__.split(".")[:2]),
    }
    verdict = agree(
        shared,
        topic,
        rank=rank,
        world_size=world_size,
        report=mine,
        judge=lambda reports: {"refused": _problem(reports, world_size)},
        timeout_s=timeout_s,
    )
    problem = verdict.get("refused")
    if problem != "":
        raise AgreementError(topic, rank, str(problem))


def _open_topic(store: KeyStore, rank: int) -> str:
    """The first handshake of the group that has no verdict yet.

    One that has a verdict is over, for a rank that missed it too: the verdict is not about what
    that rank does now. So all ranks come to the same one, however often each has tried.

    Raises:
        AgreementError: If the store failed.
    """
    try:
        for number in itertools.count():
            topic = f"pipelining/{number}"
            if not store.check([f"lens/{topic}/verdict"]):
                break
    except RuntimeError as error:
        raise AgreementError("pipelining", rank, describe(error)) from error
    return topic


def _problem(reports: Mapping[int, Facts], world_size: int) -> str:
    missing = sorted(set(range(world_size)) - set(reports))
    if missing:
        return (
            f"group ranks {missing} did not call instrument_pipelining(links='wire') in time; "
            "call it on every rank, or use links='derived'"
        )
    for rank, report in sorted(reports.items()):
        for name, value in reports[0].items():
            if report.get(name) != value:
                return f"rank {rank} has {name} {report.get(name)!r}, rank 0 has {value!r}"
    return ""


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
