"""Evidence beyond open waits: waits that have failed, and the stacks of those that do not move."""

from __future__ import annotations

from typing import Final

from lens_tools.hang.open_processes import FailedSpan, OpenProcess
from lens_tools.hang.report import HangReport, Suspect
from lens_tools.hang.wait_edges import main_processes
from lens_tools.hang.wait_records import Wait, wait_of

__all__ = ["cause_of", "given_up", "main_stack", "outside_of_a_collective", "where_is"]

_FRAMES: Final = 6
#: Frames of a thread that waits for other ranks. The last is that of a backward pass, in which
#: DistributedDataParallel waits for its all-reduce in C++.
_COLLECTIVE_FRAMES: Final = ("/torch/distributed/", "_engine_run_backward")


def given_up(report: HangReport) -> list[Suspect]:
    """Those for whom others waited until the group's timeout."""
    by_rank = main_processes(report.snapshot.processes)
    groups: dict[tuple[object, ...], dict[int, tuple[FailedSpan, Wait]]] = {}
    for failed in report.snapshot.failed:
        wait = wait_of(failed.span)
        if wait is not None:
            key = (wait.op, wait.group, wait.ranks, wait.sequence, wait.peer)
            groups.setdefault(key, {})[failed.rank] = (failed, wait)
    found = []
    for waits in groups.values():
        failed, wait = max(waits.values(), key=lambda one: one[0].end_ns)
        absent = [rank for rank in _members(report, wait) if rank not in waits]
        absent = [rank for rank in absent if not _is_in(by_rank.get(rank), wait)]
        if not absent:
            continue  # all came, and it failed for another reason
        gave_up_s = (failed.end_ns - failed.span.start_ns) / 1e9
        gave_up = ", ".join(str(rank) for rank in sorted(waits))
        plural = "s" if len(waits) > 1 else ""
        text = f"rank{plural} {gave_up} gave up after {gave_up_s:.1f} s in {wait}"
        for rank in absent:
            process = by_rank.get(rank)
            text += f"; rank {rank} never came"
            if process is not None and process.gone:
                text += f": it died ({cause_of(process)}) {where_is(process)}"
            elif process is not None:
                text += f": it {'is' if report.snapshot.is_live else 'was'} {where_is(process)}"
        names = tuple(by_rank[rank].name if rank in by_rank else f"rank {rank}" for rank in absent)
        waiters = tuple(f"rank {rank}" for rank in sorted(waits))
        found.append(Suspect("gave_up", names, waiters, False, True, text))
    return found


def outside_of_a_collective(report: HangReport) -> list[Suspect]:
    """Where nothing moves: those whose stack is outside of the collective that others are in."""
    idle = report.idle
    if report.idle_s < report.after_s:
        return []
    stacks = {process.name: main_stack(process.stacks, frames=100) for process in idle}
    inside = {
        name
        for name, frames in stacks.items()
        if any(part in frame for frame in frames for part in _COLLECTIVE_FRAMES)
    }
    outside = [process for process in idle if stacks[process.name] and process.name not in inside]
    if not inside or not outside:
        return []
    trains = main_processes(report.snapshot.processes).values()  # not a data loader's worker
    outside = [process for process in outside if process in trains] or outside
    waiters = tuple(process.name for process in idle if process.name in inside)
    return [
        Suspect(
            "outside",
            (process.name,),
            waiters,
            False,
            True,
            f"{process.name} has not moved for {_idle_s(report, process):.1f} s {where_is(process)}"
            f", and its stack is outside of torch.distributed, in which others are",
        )
        for process in outside
    ]


def where_is(process: OpenProcess) -> str:
    """Where a process is, by its open spans; its main thread's, if that has any."""
    if not process.innermost:
        return "outside of all spans"
    path = process.path_to(process.innermost[0])
    return "in " + " > ".join(span.name for span in path)


def cause_of(process: OpenProcess) -> str:
    """How a dead process ended."""
    return "cause unknown" if process.reason in ("", "unknown") else process.reason


def main_stack(stacks: str, *, frames: int = _FRAMES) -> list[str]:
    """The innermost frames of the main thread, from what faulthandler or the journal wrote."""
    threads: list[tuple[str, list[str]]] = []
    for line in stacks.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append((line, []))
        elif line.startswith("  File ") and threads:
            threads[-1][1].append(line.strip())
    if not threads:
        return []
    named = [lines for head, lines in threads if "[MainThread]" in head]
    # faulthandler does not name threads; the main one is the oldest, which it writes last.
    return (named[-1] if named else threads[-1][1])[:frames]


def _members(report: HangReport, wait: Wait) -> list[int]:
    if not wait.is_collective:
        return [] if wait.peer is None else [wait.peer]
    if wait.ranks is not None:
        return list(wait.ranks)
    size = report.snapshot.world_size
    return [] if size is None else list(range(size))


def _is_in(process: OpenProcess | None, wait: Wait) -> bool:
    """Whether a process is in the operation, or was when it ended."""
    waits = [wait_of(span) for span in process.innermost] if process is not None else []
    return any(
        other is not None
        and (other.op, other.group, other.sequence) == (wait.op, wait.group, wait.sequence)
        for other in waits
    )


def _idle_s(report: HangReport, process: OpenProcess) -> float:
    return (report.snapshot.now_ns - process.activity_ns) / 1e9
