"""``lens hang``: the report of a run that hangs, or hung, for the terminal and as JSON."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lens_core.journal.location import search
from lens_tools.hang.analysis import HANG_AFTER_S, HangReport, Suspect, analyse
from lens_tools.hang.open_processes import OpenProcess
from lens_tools.hang.snapshot import take_snapshot
from lens_tools.options import seconds_option
from lens_tools.recover.asking import ask_for_stacks

__all__ = ["hang", "main_stack", "to_json", "to_text"]

_FRAMES = 6
_MAX_SUSPECTS = 5
_MAX_SILENT = 16


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="DIR...")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option(
    "--stacks",
    is_flag=True,
    help="Ask the live processes of this host for their stacks first.",
)
@seconds_option(
    "after",
    HANG_AFTER_S,
    "Seconds that a rank may keep others waiting before that counts as a hang.",
)
def hang(runs: Sequence[str], as_json: bool, stacks: bool, after_s: float) -> None:
    """Show who waits for whom in a run that hangs, or hung when it was killed.

    DIR is a run's directory, a directory of journals (of another host, say), or the id of a run on
    this host. Several are taken together. Only reads, unless --stacks is given.

    Exit status: 1 if something hangs, 0 if nothing does, 2 if there is nothing to read, or nowhere
    to write the report.
    """
    searched = [search(run) for run in runs]
    directories = [path for one in searched for path in one.directories]
    if stacks:
        ask_for_stacks(directories)
    snapshot = take_snapshot(directories)
    snapshot.problems += dict.fromkeys(note for one in searched for note in one.notes)
    if not snapshot.processes:
        for problem in snapshot.problems:
            click.echo(f"lens: {problem}", err=True)
        click.echo(
            f"lens: no journal and no truncated span in {', '.join(runs)}; "
            "name the run's directory or the directory of its journals",
            err=True,
        )
        sys.exit(2)
    report = analyse(snapshot, after_s=after_s)
    _write(json.dumps(to_json(report), indent=2) + "\n" if as_json else _rendered(report))
    sys.exit(1 if report.hangs else 0)


def _rendered(report: HangReport) -> str:
    shown = Console()
    # Of the encoding that it will be written in: that decides what tables are drawn with.
    text = io.TextIOWrapper(io.BytesIO(), encoding=shown.encoding, errors="replace", newline="")
    # Its width is that of a terminal or 80; a table in a file may be wider.
    width = shown.width if shown.is_terminal else 160
    to_text(report, Console(file=text, width=width, force_terminal=shown.is_terminal))
    text.seek(0)
    return text.read()


def _write(text: str) -> None:
    """Write a report; where that cannot be done, no exit status may stand for it."""
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        click.echo(text, nl=False)
    except OSError as error:
        # The interpreter would try again at its end, and make another status of it.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if isinstance(error, BrokenPipeError):
            return  # who reads has seen enough
        click.echo(f"lens: the report cannot be written: {error.strerror or error}", err=True)
        sys.exit(2)


def to_text(report: HangReport, console: Console) -> None:
    """Write the report; its first line names the suspect."""
    snapshot = report.snapshot
    by_name = {process.name: process for process in snapshot.processes}
    if not report.suspects:
        moving = len(snapshot.processes)
        console.print(f"nothing hangs: no process keeps others waiting ({moving} looked at)")
    for suspect in report.suspects[:_MAX_SUSPECTS]:
        _line(console, _headline(suspect))
        for name in suspect.names:
            if name in by_name and (frames := main_stack(by_name[name].stacks)):
                _line(console, f"  {name} is at")
                for frame in frames:
                    _line(console, f"    {frame}")
    if report.suspects and not report.hangs:
        _line(
            console,
            f"not a hang so far: nobody has kept others waiting for {report.after_s:g} s "
            "without a move (--after)",
        )
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
        "hangs": report.hangs,
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


def main_stack(stacks: str) -> list[str]:
    """The innermost frames of the main thread, from what faulthandler or the journal wrote."""
    threads: list[tuple[str, list[str]]] = []
    for line in stacks.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append((line, []))
        elif line.startswith("  File ") and threads:
            threads[-1][1].append(line.strip())
    if not threads:
        return []
    named = [frames for head, frames in threads if "[MainThread]" in head]
    # faulthandler does not name threads; the main one is the oldest, which it writes last.
    return (named[-1] if named else threads[-1][1])[:_FRAMES]


def _line(console: Console, text: str) -> None:
    console.print(_printable(text), soft_wrap=True, markup=False, highlight=False)


def _printable(text: str) -> str:
    """Names come from programs: none may move the cursor or fail to be encoded."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)


def _headline(suspect: Suspect) -> str:
    count = len(suspect.waiters)
    what = "suspect" if suspect.hangs else "slow"
    if not count:
        return f"{what}: {suspect.text}"
    verb = "waits" if count == 1 else "wait"
    return f"{what}: {suspect.text}; {count} {verb} for it: {', '.join(suspect.waiters)}"


def _row(report: HangReport, process: OpenProcess) -> tuple[str, str, str, str, str]:
    now_ns = report.snapshot.now_ns
    state = "alive" if not process.reason else process.reason
    if process.gone:
        state = f"dead ({process.reason or 'silent'})"
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
