"""``lens hang``: the report of a run that hangs, or hung, for the terminal and as JSON."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence

import click
from rich.console import Console

from lens_core.journal.location import search
from lens_tools.hang.analysis import analyse
from lens_tools.hang.rendering import to_json, to_text
from lens_tools.hang.report import HANG_AFTER_S, HangReport
from lens_tools.hang.snapshot import take_snapshot
from lens_tools.options import seconds_option
from lens_tools.recover.asking import ask_for_stacks

__all__ = ["hang"]


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

    The first line is the verdict: a suspect, "nothing hangs", or "cannot tell" where nobody moves
    and no evidence says who keeps the others waiting.

    Exit status: 1 if something hangs or that cannot be told, 0 if nothing does, 2 if there is
    nothing to read, or nowhere to write the report.
    """
    searched = [search(run) for run in runs]
    directories = [path for one in searched for path in one.directories]
    if stacks:
        ask_for_stacks(directories)
    snapshot = take_snapshot(directories)
    snapshot.problems += dict.fromkeys(note for one in searched for note in one.notes)
    if not snapshot.processes and not snapshot.failed:
        if snapshot.span_count:
            click.echo(
                f"nothing hangs: {', '.join(runs)} has ended; "
                f"none of its {snapshot.span_count} spans was cut off"
            )
            sys.exit(0)
        for problem in snapshot.problems:
            click.echo(f"lens: {problem}", err=True)
        click.echo(
            f"lens: no journal and no truncated span in {', '.join(runs)}; "
            "name the run's directory or the directory of its journals",
            err=True,
        )
        sys.exit(2)
    report = analyse(snapshot, after_s=after_s)
    _write(json.dumps(to_json(report), indent=2) + "\n" if as_json else _rendered(report, stacks))
    sys.exit(0 if report.verdict == "nothing" else 1)


def _rendered(report: HangReport, stacks: bool) -> str:
    shown = Console()
    # Of the encoding that it will be written in: that decides what tables are drawn with.
    text = io.TextIOWrapper(io.BytesIO(), encoding=shown.encoding, errors="replace", newline="")
    # Its width is that of a terminal or 80; a table in a file may be wider.
    width = shown.width if shown.is_terminal else 160
    to_text(
        report, Console(file=text, width=width, force_terminal=shown.is_terminal), stacks=stacks
    )
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
