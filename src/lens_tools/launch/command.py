"""``lens run``: starts a command, and recovers what its killed processes left when it has ended."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import click

from lens_core.diagnostics import describe
from lens_core.journal.location import search_roots
from lens_core.journal.recover.recovery import (
    DirectorySink,
    RecoveryResult,
    RecoverySink,
    recover,
)
from lens_core.journal.recover.sinks import own_directory
from lens_core.telemetry.export.destinations import SPANS, otlp_sink
from lens_core.telemetry.journaling import SenderSink
from lens_tools.launch.child import (
    adopt_orphans,
    end_like,
    let_go_of_streams,
    reap,
    start,
    start_error,
)
from lens_tools.launch.signals import (
    WATCHED,
    Relay,
    Witness,
    block_signals,
    is_interrupt,
    stop,
    taken_so_far,
)
from lens_tools.launch.tracing import trace_children, untraced
from lens_tools.launch.watch import ExitWatch
from lens_tools.options import recovered_to_options, seconds_option

__all__ = ["run"]

_CHECK_S: Final = 1.0
_POLL_S: Final = 0.05
_MAX_NAMED: Final = 8


@dataclass(slots=True)
class _Options:
    journals: Sequence[Path]
    output: Path | None
    otlp: str | None
    grace_s: float
    timeout_s: float
    quiet: bool
    trace: bool


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND..."
)
@click.option(
    "--journals",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of journals that the command is given in its code. Repeatable.",
)
@recovered_to_options
@seconds_option(
    "grace",
    2.0,
    "Seconds to wait, once the command has ended, for those of its processes that have not.",
)
@seconds_option(
    "timeout", 30.0, "Seconds that recovery may take; what is left then is for lens recover."
)
@click.option("--quiet", is_flag=True, help="Write nothing.")
@click.option("--trace", is_flag=True, help="Trace torch in the command's Python processes.")
def run(
    arguments: Sequence[str],
    journals: Sequence[Path],
    output: Path | None,
    otlp: str | None,
    grace_s: float,
    timeout_s: float,
    quiet: bool,
    trace: bool,
) -> None:
    """Run a command, such as torchrun, and recover the spans of those of its processes that die.

    How each of them ended is noted beside its journal at once, so that a rank that was killed by
    SIGKILL is known to have been. The command has this terminal, these files and the signals that
    come; a second Ctrl-C ends recovery.

    Exit status: that of the command, or its signal; 127 if there is no such command, 126 if it
    cannot be executed.
    """
    _run(arguments, _Options(journals, output, otlp, grace_s, timeout_s, quiet, trace))


def _run(arguments: Sequence[str], options: _Options) -> NoReturn:
    report = trace_children(arguments, os.environ) if options.trace else None
    mask = block_signals()
    adopt_orphans()
    witness = Witness(arguments)
    early = taken_so_far()
    try:
        child = start(arguments, mask)
    except OSError as error:
        text, status = start_error(arguments[0], error)
        untraced(report)
        witness.end()
        _say(text)
        end_like(status)
    let_go_of_streams()
    relay = Relay(child, witness)
    for number in early:
        relay.send(number)  # it would have got it, had it been there
    watch = ExitWatch([*map(Path.absolute, options.journals), *search_roots()], os.getpid())
    watch.start()
    status = _attend(child, relay, watch)
    witness.end()
    lines: list[str] = []
    watch.look_again()
    if _wait(options.grace_s, lambda: watch.has_looked and not watch.living, watch):
        watch.stop(_CHECK_S)
        lines = _recover(options, watch)
    lines += untraced(report)
    if not options.quiet:
        for line in lines:
            _say(line)
    end_like(status)


def _attend(child: int, relay: Relay, watch: ExitWatch) -> int:
    """Wait until the command has ended; its status, or minus the number of its signal."""
    while True:
        # Woken by SIGCHLD; the time is for the case that one got lost.
        info = signal.sigtimedwait(WATCHED, _CHECK_S)
        if info is not None and info.si_signo != signal.SIGCHLD:
            relay.pass_on(info)
        for ended in reap():
            relay.lose_witness(ended.pid)
            watch.note(ended)
            if ended.pid == child:
                return ended.status


def _wait(timeout_s: float, is_done: Callable[[], bool], watch: ExitWatch) -> bool:
    """Wait until something is done or the time is over; false if an interrupt came first."""
    deadline = time.monotonic() + timeout_s
    while not is_done() and time.monotonic() < deadline:
        info = signal.sigtimedwait(WATCHED, _POLL_S)
        if info is not None and is_interrupt(info.si_signo):
            return False
        if info is not None and info.si_signo == signal.SIGTSTP:
            stop()
        for ended in reap():
            watch.note(ended)
    return True


def _recover(options: _Options, watch: ExitWatch) -> list[str]:
    """Recover what is there to recover; what to say of it."""
    found: list[RecoveryResult] = []
    places: dict[Path, None] = {}

    def sink(meta: Mapping[str, object]) -> RecoverySink:
        if options.otlp is not None:
            return SenderSink(otlp_sink(SPANS, os.environ, options.otlp))
        if options.output is None and meta.get("exporter") == "otlp":
            return SenderSink(otlp_sink(SPANS, os.environ))  # as the next start of the run would
        place = options.output or own_directory(meta)
        places[place] = None
        return DirectorySink(place)

    def work() -> None:
        try:
            found.append(
                recover(
                    watch.directories,
                    sink,
                    exit_statuses=watch.statuses,
                    remove_emptied=True,
                )
            )
        except Exception as error:  # noqa: BLE001 - the status of the command is what counts
            found.append(RecoveryResult(problems=[describe(error)]))

    thread = threading.Thread(target=work, name="lens-run-recover", daemon=True)
    thread.start()
    finished = _wait(options.timeout_s, lambda: not thread.is_alive(), watch)
    if not finished or not found:
        left = ", ".join(map(str, watch.directories))
        return [f"recovery was {'ended: too long' if finished else 'interrupted'}; see {left}"]
    return _summary(watch, found[0], list(places))


def _summary(watch: ExitWatch, result: RecoveryResult, places: Sequence[Path]) -> list[str]:
    if not watch.found:
        return []
    dead = [one for one in watch.ended if not one.ended_in_order and one.status != 0]
    how = [f"{one.name} {_how(one.status)}" for one in dead]
    count = len(watch.found)
    lines = [
        f"{count} process{'es' if count > 1 else ''} kept a journal; "
        + (f"cut off, the first one first: {_named(how)}" if dead else "none was killed or failed")
    ]
    if result.ended or result.truncated:
        where = f" into {', '.join(map(str, places))}" if places else ""
        lines.append(f"recovered spans: {result.truncated} open, {result.ended} ended{where}")
    if living := watch.living:
        lines.append(f"still running, left to lens recover: {_named([o.name for o in living])}")
    lines += [f"not recovered: {problem}" for problem in result.problems[:_MAX_NAMED]]
    if dead and places:
        lines.append(f"to see who waited for whom: lens hang {shlex.quote(str(places[0]))}")
    return lines


def _how(status: int | None) -> str:
    if status is None:
        return "unknown"
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _say(text: str) -> None:
    line = "".join(sign if sign.isprintable() else "?" for sign in f"lens run: {text}")
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode("utf-8", "replace"))
