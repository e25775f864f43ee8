"""One decision that all ranks share, made once at set-up through a store, within a deadline.

Every rank reports; rank 0 gathers the reports and judges. The verdict is one key of the store that
is written by an atomic compare-and-set: by rank 0 with its judgement, or by the first rank whose
time is up, as *void*. So no rank can give up while another goes ahead: whoever comes second reads
what the first one wrote. No collective is used.

Nothing waits longer than its deadline, also where the store's server is dead, stopped or slow
(:mod:`lens_contrib.torch.store`). Where it stops answering in the very write of the verdict, the
writer cannot know whether others will read it, and gives up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from lens_contrib.torch.store import KeyStore, bounded, group_store
from lens_core.diagnostics import describe
from lens_core.errors import AgreementError

__all__ = ["Facts", "KeyStore", "agree", "group_store", "wait_for_key"]

#: What a rank reports, and what a verdict holds.
Facts: TypeAlias = Mapping[str, str | int | bool | Sequence[int]]

_VOID: Final = "void"
_FIRST_PAUSE_S: Final = 0.002
#: A store has one server thread, so waiting ranks ask it ever more rarely.
_LONGEST_PAUSE_S: Final = 0.25
#: The least that a call to the store may take, whatever the deadline for the reports.
_OPERATION_S: Final = 1.0


def agree(
    store: KeyStore,
    topic: str,
    *,
    rank: int,
    world_size: int,
    report: Facts,
    judge: Callable[[Mapping[int, Facts]], Facts],
    timeout_s: float,
) -> Facts:
    """The verdict on a topic, the same on every rank.

    Every rank of the store calls it with the same topic. Rank 0 waits until ``timeout_s`` for the
    reports of all, the others until twice that for the verdict, so that a rank which never reports
    costs the others the deadline and not the agreement. Where the store's server stops answering,
    each of them waits ``timeout_s``, at least 1 s, for that; then it gives up.

    Args:
        store: A store that all ranks share; best a connection of our own, see :func:`group_store`.
        topic: What is agreed on; a new one for each agreement, the same on all ranks.
        rank: This process's rank, from 0.
        world_size: Number of ranks.
        report: What this rank reports.
        judge: On rank 0, makes the verdict from the reports that came in, by rank.
        timeout_s: Deadline for the reports.

    Raises:
        AgreementError: If the deadline passed without a verdict, another rank's deadline did, or
            the store failed.
    """
    key = f"lens/{topic}/verdict"
    operation_s = max(timeout_s, _OPERATION_S)
    # Slow answers add up: all together have a deadline too.
    end = time.monotonic() + timeout_s * (1 if rank == 0 else 2) + operation_s
    store = bounded(store, timeout_s=operation_s).until(end)
    try:
        store.set(f"lens/{topic}/report/{rank}", json.dumps(dict(report)))
        if rank == 0:
            reports = _gather(store, topic, world_size, time.monotonic() + timeout_s)
            content = json.dumps(dict(judge(reports)))
        elif wait_for_key(store, key, 2 * timeout_s):
            content = ""
        else:
            content = json.dumps({_VOID: f"rank {rank} had no verdict after {2 * timeout_s:g} s"})
        # Whoever writes first decides for all; with no content this only reads.
        final = store.compare_set(key, "", content) if content else store.get(key)
        verdict = json.loads(final)
    except (RuntimeError, ValueError, TypeError) as error:  # a store's own errors are RuntimeErrors
        raise AgreementError(topic, rank, describe(error)) from error
    if not isinstance(verdict, dict) or _VOID in verdict:
        problem = verdict[_VOID] if isinstance(verdict, dict) else "the verdict is not readable"
        raise AgreementError(topic, rank, str(problem))
    return verdict


def _gather(store: KeyStore, topic: str, world_size: int, deadline: float) -> dict[int, Facts]:
    """The reports that come in until the deadline, by rank."""
    reports: dict[int, Facts] = {}
    for rank in range(world_size):
        key = f"lens/{topic}/report/{rank}"
        if wait_for_key(store, key, max(0.0, deadline - time.monotonic())):
            report = json.loads(store.get(key))
            if isinstance(report, dict):
                reports[rank] = report
    return reports


def wait_for_key(store: KeyStore, key: str, timeout_s: float) -> bool:
    """Whether the key is there, now or before the deadline.

    By asking, not by ``Store.wait``: that logs a warning from C++ at each timeout, and a file store
    waits a second at least.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while not store.check([key]):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
    return True
