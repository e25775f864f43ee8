"""The report of a run that hangs, or hung, as text and as JSON."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lens_tools.hang.evidence import cause_of, main_stack
from lens_tools.hang.open_processes import OpenProcess
from lens_tools.hang.report import HangReport, Suspect

__all__ = ["to_json", "to_text"]

_MAX_SUSPECTS: Final = 5
_MAX_SILENT: Final = 16


def to_text(report: HangReport, console: Console, *, stacks: bool = False) -> None:
    """Write the report; its first line is the verdict, with the suspect if there is one.

    Args:
        report: The report.
        console: Where to.
        stacks: Whether to show the stacks of all processes, not only of suspects.
    """
    snapshot = report.snapshot
    by_name = {process.name: process for process in snapshot.processes}
    first = report.verdict == "unknown" or not report.suspects
    if first:
        _line(console, _verdict(report))
    shown: list[str] = []
    for suspect in report.suspects[:_MAX_SUSPECTS]:
        _line(console, _headline(suspect))
        for name in suspect.names:
            if name in by_name:
                shown.append(name)
                _stack(console, by_name[name])
    if not first and not report.hangs:
        _line(console, _verdict(report))
    still = report.idle if report.verdict == "unknown" else snapshot.processes if stacks else []
    for process in still:
        if process.name not in shown:
            _stack(console, process)
    table = Table("process", "state", "innermost open span", "since", "waits for")
    for process in snapshot.processes:
        table.add_row(*(Text(_printable(cell)) for cell in _row(report, process)))
    console.print(table)
    for mismatch in report.mismatches:
        parts = [f"{', '.join(names)} in {what}" for what, names in mismatch.operations.items()]
        _line(console, f"group {mismatch.group}: different operations: {'; '.join(parts)}")
    if snapshot.world_size is not None:
        ranks = {process.rank for process in snapshot.processes}
        silent = [str(rank) for rank in range(snapshot.world_size) if rank not in ranks]
        if len(silent) > _MAX_SILENT:
            silent[_MAX_SILENT:] = [f"and {len(silent) - _MAX_SILENT} more"]
        if silent:
            console.print(f"no open spans of rank {', '.join(silent)} are here", highlight=False)
    for problem in snapshot.problems:
        _line(console, f"not read: {problem}")


def to_json(report: HangReport) -> dict[str, object]:
    """The report as JSON objects; times are nanoseconds since the epoch."""
    snapshot = report.snapshot
    return {
        "now_ns": snapshot.now_ns,
        "is_live": snapshot.is_live,
        "verdict": report.verdict,
        "hangs": report.hangs,
        "idle_s": report.idle_s,
        "after_s": report.after_s,
        "suspects": [
            {
                "kind": suspect.kind,
                "processes": list(suspect.names),
                "waiters": list(suspect.waiters),
                "progresses": suspect.progresses,
                "hangs": suspect.hangs,
                "text": suspect.text,
            }
            for suspect in report.suspects
        ],
        "waits": [
            {
                "process": edge.waiting,
                "for": edge.waited_for,
                "why": edge.why,
                "since_ns": edge.since_ns,
            }
            for edge in report.edges
        ],
        "mismatches": [
            {"group": mismatch.group, "operations": mismatch.operations}
            for mismatch in report.mismatches
        ],
        "processes": [_process_json(process) for process in snapshot.processes],
        "problems": snapshot.problems,
    }


def _line(console: Console, text: str) -> None:
    console.print(_printable(text), soft_wrap=True, markup=False, highlight=False)


def _printable(text: str) -> str:
    """Names come from programs: none may move the cursor or fail to be encoded."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)


def _verdict(report: HangReport) -> str:
    count = len(report.snapshot.processes)
    if report.verdict == "unknown":
        more = "" if report.suspects else ", and no span says what it waits for"
        return f"cannot tell: nobody has moved for {report.idle_s:.1f} s{more} ({count} looked at)"
    if report.suspects:
        return (
            f"not a hang so far: nobody has kept others waiting for {report.after_s:g} s "
            "without a move (--after)"
        )
    return f"nothing hangs: no process keeps others waiting ({count} looked at)"


def _stack(console: Console, process: OpenProcess) -> None:
    frames = main_stack(process.stacks)
    if frames:
        _line(console, f"  {process.name} is at")
    for frame in frames:
        _line(console, f"    {frame}")


def _headline(suspect: Suspect) -> str:
    count = len(suspect.waiters)
    what = "suspect" if suspect.hangs else "unknown" if suspect.kind == "unknown" else "slow"
    if not count:
        return f"{what}: {suspect.text}"
    verb = "waits" if count == 1 else "wait"
    return f"{what}: {suspect.text}; {count} {verb} for it: {', '.join(suspect.waiters)}"


def _row(report: HangReport, process: OpenProcess) -> tuple[str, str, str, str, str]:
    now_ns = report.snapshot.now_ns
    state = f"dead ({cause_of(process)})" if process.gone or process.reason else "alive"
    spans = process.innermost
    if not spans:
        return process.name, state, "none", "", ""
    paths = [" > ".join(part.name for part in process.path_to(span)) for span in spans]
    ages = [f"{(now_ns - span.start_ns) / 1e9:.1f} s" for span in spans]
    waits = [str(wait) for wait in report.waits.get(process.name, ())]
    called = [
        f"{edge.waited_for} ({edge.why})"
        for edge in report.edges
        if edge.waiting == process.name and edge.why.startswith(("call ", "ray.get"))
    ]
    return process.name, state, "\n".join(paths), "\n".join(ages), "\n".join([*waits, *called])


def _process_json(process: OpenProcess) -> dict[str, object]:
    innermost = {span.span_id for span in process.innermost}
    return {
        "name": process.name,
        "rank": process.rank,
        "host": process.host,
        "pid": process.pid,
        "gone": process.gone,
        "reason": process.reason,
        "alive_ns": process.alive_ns,
        "activity_ns": process.activity_ns,
        "source": str(process.source),
        "stack": main_stack(process.stacks),
        "open_spans": [
            {
                "trace_id": span.trace_id,
                "span_id": span.span_id,
                "parent_span_id": span.parent_span_id,
                "name": span.name,
                "start_ns": span.start_ns,
                "innermost": span.span_id in innermost,
                "attributes": dict(span.attributes),
            }
            for span in process.spans
        ],
    }
