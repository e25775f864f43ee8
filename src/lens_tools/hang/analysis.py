"""Who waits for whom in a run that hangs, and who keeps the others waiting.

Each process is a node of the wait-for graph; an edge leads to a process that must act before this
one can go on. Whoever is waited for and waits for nobody is the suspect. Where the graph has no
such node, it has a cycle that waits for itself: ranks that called different operations, or sent in
a circle. Where no open span tells, waits that have failed and the stacks of those that do not move
are evidence too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from lens_tools.hang.evidence import given_up, outside_of_a_collective, where_is
from lens_tools.hang.open_processes import OpenProcess, Snapshot
from lens_tools.hang.report import HANG_AFTER_S, HangReport, Kind, Suspect
from lens_tools.hang.wait_edges import WaitEdges, find_mismatches
from lens_tools.hang.wait_graph import components, cycle_through, reaching
from lens_tools.hang.wait_records import wait_of

__all__ = ["analyse"]

#: A process that started or ended a span this recently goes on.
_PROGRESS_NS: Final = 2_000_000_000
#: A live process writes a sign of life twice a second.
_SILENT_S: Final = 3.0
#: Where as many wait for one as for another, the more certain finding comes first.
_CERTAINTY: Final[tuple[Kind, ...]] = (
    "dead",
    "mismatch",
    "cycle",
    "gave_up",
    "missing",
    "stuck",
    "transfer",
    "outside",
    "unknown",
)


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
    WaitEdges(report).add_all()
    report.mismatches = find_mismatches(report)
    running = [p for p in snapshot.processes if not p.gone and not p.ended_in_order]
    # A driver may be idle, or go on, for reasons of its own.
    running = [process for process in running if process.rank is not None] or running
    idle_s = {p.name: (snapshot.now_ns - p.activity_ns) / 1e9 for p in running}
    report.idle = [process for process in running if idle_s[process.name] >= after_s]
    report.idle_s = min(idle_s.values(), default=0.0)
    report.suspects = _suspects(report)
    return report


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
        gone = process is not None and process.gone and not process.ended_in_order
        if not leaves and (waiters or len(members) > 1 or gone):
            found.append(_judge(report, by_name, graph, members, waiters))
    if not found:
        found = _transfers(report, by_name)
    found += given_up(report)
    if not any(suspect.hangs for suspect in found):
        found += outside_of_a_collective(report)
    found.sort(key=lambda suspect: _order(suspect, by_name))
    return found


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
        if not any(name == f"rank {rank}" for rank in report.snapshot.seen_ranks):
            text = (
                f"{name} is waited for, and nothing is known of it: it keeps no journal that can "
                "be seen from here, or never started"
            )
            return Suspect("unknown", names, after, False, False, text)
        text = f"{name} is waited for, but has no open span: it has ended"
        since_ns = min(edge.since_ns for edge in report.edges if edge.waited_for == name)
        hangs = now_ns - since_ns >= report.after_s * 1e9
        return Suspect("missing", names, after, False, hangs, text)
    where = where_is(process)
    if process.gone:
        ago = (now_ns - process.alive_ns) / 1e9
        text = f"{name} died ({process.reason}) {ago:.1f} s ago {where}"
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
