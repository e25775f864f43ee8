"""Who waits for whom in a run that hangs, and who keeps the others waiting.

Each process is a node of the wait-for graph; an edge leads to a process that must act before this
one can go on. Three kinds of open span make edges:

* a receive waits for its peer, a send for its peer, unless the peer is in the matching receive: a
  sender whose receiver is ready waits for nobody;
* a collective waits for the members of its group that are not in the same operation;
* a span waits for the process in which a child of it is open: that is a remote call. A ``ray.get``
  waits for the processes that run its tasks, or hold them in their queue.

Whoever is waited for and waits for nobody is the suspect. Where the graph has no such node, it has
a cycle that waits for itself: ranks that called different operations, or sent in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from lens_core.semconv import LENS_STAGE, RAY_ACTOR_ID, RAY_TASK_ID, RAY_WAIT_TASK_IDS
from lens_tools.hang.open_processes import OpenProcess, OpenSpan, Snapshot
from lens_tools.hang.wait_graph import components, cycle_through, reaching
from lens_tools.hang.wait_records import Wait, wait_of

__all__ = ["HANG_AFTER_S", "Edge", "HangReport", "Kind", "Mismatch", "Suspect", "analyse"]

#: A rank may compute, load data or write a checkpoint for a while, and the others wait for it.
HANG_AFTER_S: Final = 30.0
#: A process that started or ended a span this recently goes on.
_PROGRESS_NS: Final = 2_000_000_000
#: A live process writes a sign of life twice a second.
_SILENT_S: Final = 3.0
_ACTOR_ID_DIGITS: Final = 32

Kind = Literal["dead", "missing", "stuck", "mismatch", "cycle", "transfer"]
#: Where as many wait for one as for another, the more certain finding comes first.
_CERTAINTY: Final[tuple[Kind, ...]] = (
    "dead",
    "mismatch",
    "cycle",
    "missing",
    "stuck",
    "transfer",
)


@dataclass(frozen=True, slots=True)
class Edge:
    """One process waits for another; ``why`` is the operation or the call."""

    waiting: str
    waited_for: str
    why: str
    since_ns: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks of one group that are in different operations.

    Attributes:
        group: Name of the group.
        operations: Operation, with its number, to the processes that are in it.
    """

    group: str
    operations: dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A process, or several that hold each other up, for which others wait.

    Attributes:
        kind: ``dead``; ``missing`` (waited for, but it has no open span here); ``stuck`` (waits for
            nobody); ``mismatch`` (in another operation than its peers); ``cycle`` (wait for each
            other); ``transfer`` (all are there, and the operation does not end).
        names: Names of the processes.
        waiters: Names of the others that wait for them, directly or not.
        progresses: Whether it started or ended a span within the last two seconds.
        hangs: Whether this is a hang, and not only somebody who is slow.
        text: One line that says what is known.
    """

    kind: Kind
    names: tuple[str, ...]
    waiters: tuple[str, ...]
    progresses: bool
    hangs: bool
    text: str


@dataclass(slots=True)
class HangReport:
    """Who waits for whom.

    Attributes:
        snapshot: The processes.
        waits: For each process that waits, by name, its waits.
        edges: The wait-for graph.
        mismatches: Ranks in different operations of one group.
        suspects: The most likely first.
        after_s: How long nothing may move, in seconds, before that counts as a hang.
    """

    snapshot: Snapshot
    waits: dict[str, list[Wait]] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    after_s: float = HANG_AFTER_S

    @property
    def hangs(self) -> bool:
        """Whether any of the suspects hangs."""
        return any(suspect.hangs for suspect in self.suspects)


def analyse(snapshot: Snapshot, *, after_s: float = HANG_AFTER_S) -> HangReport:
    """Who waits for whom in a snapshot.

    Args:
        snapshot: What the processes are doing.
        after_s: How long a process may keep others waiting without a move of its own, in seconds,
            before that counts as a hang. Ranks that wait for each other, or for one that died, can
            only hang, and do so at once, or after two seconds.
    """
    report = HangReport(snapshot, after_s=after_s)
    for process in snapshot.processes:
        if not process.gone:
            waits = [wait for span in process.innermost if (wait := wait_of(span)) is not None]
            if waits:
                report.waits[process.name] = waits
    _Edges(report).add_all()
    report.mismatches = _mismatches(report)
    report.suspects = _suspects(report)
    return report


class _Edges:
    def __init__(self, report: HangReport) -> None:
        self._report = report
        self._processes = report.snapshot.processes
        self._of_rank = _main_processes(self._processes)
        self._of_stage = _stages(self._processes)

    def add_all(self) -> None:
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


def _main_processes(processes: Sequence[OpenProcess]) -> dict[int, OpenProcess]:
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


def _mismatches(report: HangReport) -> list[Mismatch]:
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


def _suspects(report: HangReport) -> list[Suspect]:
    graph: dict[str, set[str]] = {process.name: set() for process in report.snapshot.processes}
    for edge in report.edges:
        graph.setdefault(edge.waiting, set()).add(edge.waited_for)
        graph.setdefault(edge.waited_for, set())
    by_name = {process.name: process for process in report.snapshot.processes}
    found: list[Suspect] = []
    for members in components(graph):
        leaves = any(graph[name] - members for name in members)
        waiters = reaching(graph, members)
        process = by_name.get(next(iter(members)))
        gone = process is not None and process.gone and not _ended_in_order(process)
        if not leaves and (waiters or len(members) > 1 or gone):
            found.append(_judge(report, by_name, graph, members, waiters))
    if not found:
        found = _transfers(report, by_name)
    found.sort(key=lambda suspect: _order(suspect, by_name))
    return found


def _ended_in_order(process: OpenProcess) -> bool:
    return process.reason in ("shutdown", "exit")


def _order(suspect: Suspect, by_name: dict[str, OpenProcess]) -> tuple[object, ...]:
    # Of several that died, the first: the others may have died of it.
    first_ns = min((by_name[name].alive_ns for name in suspect.names if name in by_name), default=0)
    return (
        not suspect.hangs,
        suspect.progresses,
        -len(suspect.waiters) - len(suspect.names) + 1,
        _CERTAINTY.index(suspect.kind),
        first_ns,
    )


def _judge(
    report: HangReport,
    by_name: dict[str, OpenProcess],
    graph: dict[str, set[str]],
    members: set[str],
    waiters: set[str],
) -> Suspect:
    now_ns = report.snapshot.now_ns
    names = tuple(sorted(members, key=list(graph).index))
    after = tuple(sorted(waiters, key=list(graph).index))
    if len(members) > 1:
        # A moment ago one of them may have been ahead of the others, and no more.
        least_ns = min(_PROGRESS_NS, int(report.after_s * 1e9))
        stands = all(
            now_ns - by_name[member].activity_ns >= least_ns
            for member in members
            if member in by_name
        )
        odd = _odd_ones(report, members)
        if odd:
            rest = tuple(name for name in names if name not in odd)
            text = "; ".join(f"{name} is in {what}" for name, what in odd.items())
            others = _others(report, rest)
            return Suspect("mismatch", tuple(odd), (*rest, *after), False, stands, text + others)
        circle = cycle_through(graph, members)
        why = {(edge.waiting, edge.waited_for): edge.why for edge in report.edges}
        steps = [
            f"{one} ({why[one, other]})"
            for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)
        ]
        text = "wait for each other: " + " -> ".join([*steps, circle[0]])
        return Suspect("cycle", names, after, False, stands, text)
    name = names[0]
    process = by_name.get(name)
    if process is None:
        text = f"{name} is waited for, but has no open span: it has ended, or never started"
        since_ns = min(edge.since_ns for edge in report.edges if edge.waited_for == name)
        hangs = now_ns - since_ns >= report.after_s * 1e9
        return Suspect("missing", names, after, False, hangs, text)
    where = _where(process)
    if process.gone:
        ago = (now_ns - process.alive_ns) / 1e9
        text = f"{name} died ({process.reason or 'unknown'}) {ago:.1f} s ago {where}"
        return Suspect("dead", names, after, False, True, text)
    idle_s = (now_ns - process.activity_ns) / 1e9
    progresses = now_ns - process.activity_ns < _PROGRESS_NS
    said = "goes on" if progresses else f"has not moved for {idle_s:.1f} s"
    silent_s = (now_ns - process.alive_ns) / 1e9
    if silent_s >= _SILENT_S:
        said += f" (no sign of life for {silent_s:.1f} s: stopped, or C code holds its interpreter)"
    text = f"{name} waits for nobody and {said} {where}"
    return Suspect("stuck", names, after, progresses, idle_s >= report.after_s, text)


def _transfers(report: HangReport, by_name: dict[str, OpenProcess]) -> list[Suspect]:
    """Operations that have all of their ranks and do not end."""
    stuck: dict[str, list[str]] = {}
    idle_s: dict[str, float] = {}
    for name, waits in report.waits.items():
        idle_s[name] = (report.snapshot.now_ns - by_name[name].activity_ns) / 1e9
        if idle_s[name] >= _PROGRESS_NS / 1e9:
            for wait in waits:
                stuck.setdefault(str(wait), []).append(name)
    return [
        Suspect(
            "transfer",
            tuple(names),
            (),
            False,
            min(idle_s[name] for name in names) >= report.after_s,
            f"{', '.join(names)}: all ranks are in {what}, and it does not end",
        )
        for what, names in stuck.items()
    ]


def _odd_ones(report: HangReport, members: set[str]) -> dict[str, str]:
    """The processes among these that are in another operation than most of their group."""
    odd: dict[str, str] = {}
    for mismatch in report.mismatches:
        sizes = Counter({what: len(names) for what, names in mismatch.operations.items()})
        ((most, size),) = sizes.most_common(1)
        for what, names in mismatch.operations.items():
            if what != most or list(sizes.values()).count(size) > 1:
                odd.update((name, what) for name in names if name in members)
    return odd


def _others(report: HangReport, names: Sequence[str]) -> str:
    waits = Counter(str(wait) for name in names for wait in report.waits.get(name, ()))
    if not waits:
        return ""
    ((most, _),) = waits.most_common(1)
    return f", while {', '.join(names)} are in {most}"


def _where(process: OpenProcess) -> str:
    if not process.innermost:
        return "outside of all spans"
    path = process.path_to(process.innermost[0])
    return "in " + " > ".join(span.name for span in path)
