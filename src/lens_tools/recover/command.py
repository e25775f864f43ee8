"""``lens recover``, ``lens ship`` and ``lens stacks``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console

from lens_core.journal.location import search
from lens_core.journal.recover.recovery import DirectorySink, RecoveryResult, RecoverySink
from lens_core.journal.recover.recovery import recover as recover_journals
from lens_core.journal.recover.sinks import own_directory
from lens_core.telemetry.export.destinations import SPANS, otlp_sink
from lens_core.telemetry.export.endpoints import shown_endpoint
from lens_core.telemetry.journaling import SenderSink
from lens_tools.options import otlp_option, recovered_to_options, seconds_option
from lens_tools.records.read import RunError, run_files
from lens_tools.recover.asking import ask_for_stacks
from lens_tools.recover.sending import SendResult, send_files

__all__ = ["recover", "ship", "stacks"]


def _exit_status(text: str) -> tuple[int, int]:
    pid, _, status = text.partition(":")
    try:
        return int(pid), int(status)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not PID:STATUS") from None


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="DIR...")
@recovered_to_options
@click.option(
    "--exit-status",
    "exit_statuses",
    multiple=True,
    metavar="PID:STATUS",
    help="How a process ended: minus the signal's number, or the exit status. Repeatable.",
)
@click.option(
    "--assume-dead",
    is_flag=True,
    help="Also recover processes that cannot be judged from here, such as those of another host.",
)
def recover(
    runs: Sequence[str],
    output: Path | None,
    otlp: str | None,
    exit_statuses: Sequence[str],
    assume_dead: bool,
) -> None:
    """Turn the journals of dead processes into ordinary telemetry.

    DIR is a run's directory, a directory of journals, or the id of a run on this host. Spans that
    were open get nemo.span.truncated and the reason; live processes are left alone. Running it
    again changes nothing. With --otlp, what the files of a run's directory hold is sent as well,
    each span once.

    Exit status: 1 if something could not be read or delivered, 2 if there is no such run.
    """
    result, sent = _recover(
        runs,
        output,
        otlp,
        exit_statuses=dict(map(_exit_status, exit_statuses)),
        assume_dead=assume_dead,
    )
    console = Console(highlight=False, soft_wrap=True)
    for name, reason in result.processes.items():
        console.print(f"{name}: {reason}", markup=False)
    console.print(
        f"{len(result.processes)} processes recovered: {result.ended} ended spans, "
        f"{result.truncated} that were open; {len(result.alive)} left alone, alive"
    )
    for name in result.busy:
        console.print(f"{name}: somebody else is recovering it", markup=False)
    if otlp is not None and (sent.sent or sent.known):
        console.print(
            f"sent {sent.sent} spans of files to {shown_endpoint(otlp)}; "
            f"{sent.known} had been sent before",
            markup=False,
        )
    for problem in [*result.problems, *sent.problems]:
        console.print(f"not recovered: {problem}", markup=False)
    sys.exit(1 if result.problems or sent.problems else 0)


@click.command()
@click.argument("directory", type=click.Path(file_okay=False), metavar="DIR")
@otlp_option("OTLP/HTTP receiver, if not the configured one.")
def ship(directory: str, otlp: str | None) -> None:
    """Send the spans of a run's directory to a collector, each once.

    The same as ``lens recover DIR --otlp ENDPOINT``. DIR is the directory of a run. Running it
    again sends what has come since.

    Exit status: 1 if something could not be read or sent, 2 if DIR holds no run.
    """
    endpoint = otlp or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    result, sent = _recover([directory], None, endpoint)
    if not (result.processes or result.alive or result.problems or _has_files(directory)):
        click.echo(f"lens: {directory} holds no telemetry; was anything exported there?", err=True)
        sys.exit(2)
    recovered = result.ended + result.truncated
    click.echo(
        f"sent {sent.sent} spans to {shown_endpoint(endpoint)}; {sent.known} had been sent before, "
        f"{recovered} came from journals of processes that were killed"
    )
    for problem in [*result.problems, *sent.problems]:
        click.echo(problem, err=True)
    sys.exit(1 if result.problems or sent.problems else 0)


def _recover(
    runs: Sequence[str],
    output: Path | None,
    otlp: str | None,
    *,
    exit_statuses: Mapping[int, int] | None = None,
    assume_dead: bool = False,
) -> tuple[RecoveryResult, SendResult]:
    """Recover what these runs left; with an endpoint, send it and what is in their files."""
    searched = [search(run) for run in runs]
    directories = [path for one in searched for path in one.directories]
    for note in dict.fromkeys(note for one in searched for note in one.notes):
        click.echo(f"lens: {note}", err=True)
    if not directories:
        # Not "0 recovered": a mistyped name must not read as if nothing had been lost.
        click.echo(
            f"lens: {', '.join(runs)} is neither a directory nor a run with journals on this host; "
            "name NEMO_LENS_JOURNAL_DIR or the run's directory",
            err=True,
        )
        sys.exit(2)

    def sink(meta: Mapping[str, object]) -> RecoverySink:
        if otlp is None:
            return DirectorySink(output or _place_for(meta, runs))
        # Into the files of the run, all of which are sent: they stay whole for who reads them here.
        place = _named_place_of(meta, runs)
        if place is not None:
            return DirectorySink(place)
        return SenderSink(otlp_sink(SPANS, os.environ, otlp))

    result = recover_journals(
        directories,
        sink,
        exit_statuses=exit_statuses,
        assume_dead=assume_dead,
        remove_emptied=True,
    )
    sent = SendResult()
    if otlp is not None:
        for run in filter(_has_files, runs):
            send_files(Path(run), otlp, sent)
    return result, sent


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@seconds_option("timeout", 2.0, "Seconds to wait.")
def stacks(runs: Sequence[str], timeout_s: float) -> None:
    """Show the Python stacks of all threads of a run's live processes on this host.

    RUN is the id of a run, its directory, or a directory of journals. Works also while C code
    holds the interpreter lock.

    Exit status: 1 if a process did not answer, 2 if there is none.
    """
    searched = [search(run) for run in runs]
    directories = [path for one in searched for path in one.directories]
    answers = ask_for_stacks(directories, timeout_s=timeout_s)
    for note in dict.fromkeys(note for one in searched for note in one.notes):
        click.echo(f"lens: {note}", err=True)
    if not answers:
        click.echo(f"lens: no live process has a journal in {', '.join(runs)}", err=True)
        sys.exit(2)
    for answer in answers:
        rank = answer.journal.attributes.get("nv.dl.rank")
        who = "" if rank is None else f"rank {rank}, "
        click.echo(f"--- {who}process {answer.journal.process.pid}")
        click.echo(answer.text.rstrip() if answer.text else f"({answer.problem})")
    sys.exit(1 if any(answer.problem for answer in answers) else 0)


def _place_for(meta: Mapping[str, object], runs: Sequence[str]) -> Path:
    """The directory that the process wrote its files to, or the one that was named if that is not.

    Raises:
        OSError: it is not this user's.
    """
    own = meta.get("output_dir")
    named = next((Path(run) for run in runs if os.path.isdir(run)), None)
    if named is not None and not os.path.isdir(str(own or "")):
        return named  # the journal comes from another host, or the directory was moved
    return own_directory(meta)


def _named_place_of(meta: Mapping[str, object], runs: Sequence[str]) -> Path | None:
    """The directory among those that were named which holds the files of a process, if any."""
    own = str(meta.get("output_dir") or "")
    moved = not os.path.isdir(own)
    for run in filter(os.path.isdir, runs):
        if _has_files(run) if moved else os.path.samefile(run, own):
            return Path(run)
    return None


def _has_files(run: str) -> bool:
    try:
        return os.path.isdir(run) and bool(run_files(run))
    except RunError:
        return False
