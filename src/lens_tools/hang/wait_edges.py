"""Which process waits for which, from what their open spans say.

Three kinds of open span make edges of the wait-for graph:

* a receive waits for its peer, a send for its peer, unless the peer is in the matching receive: a
  sender whose receiver is ready waits for nobody;
* a collective waits for the members of its group that are not in the same operation;
* a span waits for the process in which a child of it is open: that is a remote call. A ``ray.get``
  waits for the processes that run its tasks, or hold them in their queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lens_core.semconv import LENS_STAGE, RAY_ACTOR_ID, RAY_TASK_ID, RAY_WAIT_TASK_IDS
from lens_tools.hang.open_processes import OpenProcess, OpenSpan
from lens_tools.hang.report import Edge, HangReport, Mismatch
from lens_tools.hang.wait_records import Wait

__all__ = ["WaitEdges", "find_mismatches", "main_processes"]

_ACTOR_ID_DIGITS: Final = 32


class WaitEdges:
    """Adds the edges of the wait-for graph to a report whose waits are known."""

    def __init__(self, report: HangReport) -> None:
        self._report = report
        self._processes = report.snapshot.processes
        self._of_rank = main_processes(self._processes)
        self._of_stage = _stages(self._processes)

    def add_all(self) -> None:
        """Add all edges."""
        for name, waits in self._report.waits.items():
            for wait in waits:
                targets = self._members(name, wait) if wait.is_collective else self._peer(wait)
                for target in targets:
                    self._add(name, target, str(wait), wait.span.start_ns)
        for process in self._processes:
            if not process.gone:
                for span in process.innermost:
                    self._add_calls(process, span)

    def _add(self, waiting: str, target: str, why: str, since_ns: int) -> None:
        if waiting != target:
            self._report.edges.append(Edge(waiting, target, why, since_ns))

    def _name(self, rank: int) -> str:
        process = self._of_rank.get(rank)
        return f"rank {rank}" if process is None else process.name

    def _peer(self, wait: Wait) -> list[str]:
        rank = wait.peer
        if rank is None and wait.peer_stage is not None:
            rank = self._of_stage.get(wait.peer_stage)
        if rank is None:
            return []
        name = self._name(rank)
        if not wait.is_receive and any(
            other.is_receive and self._rank_at(other) == self._rank_of_span(wait.span)
            for other in self._report.waits.get(name, ())
        ):
            return []  # the receiver is ready: what is missing is the sender's part
        return [name]

    def _rank_at(self, wait: Wait) -> int | None:
        if wait.peer is None and wait.peer_stage is not None:
            return self._of_stage.get(wait.peer_stage)
        return wait.peer

    def _rank_of_span(self, span: OpenSpan) -> int | None:
        return next((p.rank for p in self._processes if span in p.spans), None)

    def _members(self, name: str, wait: Wait) -> list[str]:
        ranks = wait.ranks
        if ranks is None:
            size = self._report.snapshot.world_size
            ranks = tuple(range(size)) if size is not None else tuple(self._of_rank)
        names = [self._name(rank) for rank in ranks]
        return [other for other in names if other != name and not self._is_there(other, wait)]

    def _is_there(self, name: str, wait: Wait) -> bool:
        return any(_same_operation(wait, other) for other in self._report.waits.get(name, ()))

    def _add_calls(self, caller: OpenProcess, span: OpenSpan) -> None:
        awaited = span.attributes.get(RAY_WAIT_TASK_IDS)
        tasks = {str(task) for task in awaited} if isinstance(awaited, (list, tuple)) else set()
        # The id of an actor's task ends with the actor's id: it may be in the actor's queue.
        actors = {task[-_ACTOR_ID_DIGITS:] for task in tasks}
        for process in self._processes:
            if process is caller:
                continue
            for child in process.spans:
                if child.parent_span_id == span.span_id and child.trace_id == span.trace_id:
                    self._add(caller.name, process.name, f"call {child.name}", span.start_ns)
                elif child.attributes.get(RAY_TASK_ID) in tasks:
                    self._add(caller.name, process.name, f"ray.get {child.name}", span.start_ns)
                elif child.attributes.get(RAY_ACTOR_ID) in actors:
                    why = f"ray.get, behind {child.name}"
                    self._add(caller.name, process.name, why, span.start_ns)


def _same_operation(one: Wait, other: Wait) -> bool:
    if not other.is_collective or (one.op, one.group) != (other.op, other.group):
        return False
    return one.sequence is None or other.sequence is None or one.sequence == other.sequence


def main_processes(processes: Sequence[OpenProcess]) -> dict[int, OpenProcess]:
    """For each rank the process that trains: the first one, not a data loader it forked."""
    found: dict[int, OpenProcess] = {}
    for process in sorted(processes, key=lambda process: process.created_ns):
        if process.rank is not None and (
            process.rank not in found or (found[process.rank].gone and not process.gone)
        ):
            found[process.rank] = process
    return found


def _stages(processes: Sequence[OpenProcess]) -> dict[int, int]:
    found: dict[int, int] = {}
    for process in processes:
        for span in process.spans:
            stage = span.attributes.get(LENS_STAGE)
            if isinstance(stage, int) and process.rank is not None:
                found[stage] = process.rank
    return found


def find_mismatches(report: HangReport) -> list[Mismatch]:
    """Ranks of one group that are in different operations."""
    groups: dict[tuple[str, tuple[int, ...] | None], dict[str, list[str]]] = {}
    for name, waits in report.waits.items():
        for wait in waits:
            if wait.is_collective:
                number = "" if wait.sequence is None else f" #{wait.sequence}"
                operations = groups.setdefault((wait.group, wait.ranks), {})
                operations.setdefault(wait.op + number, []).append(name)
    return [
        Mismatch(group or "default", operations)
        for (group, _), operations in groups.items()
        if len(operations) > 1
    ]
