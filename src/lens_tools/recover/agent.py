"""``lens agent``: one process per host that delivers the spans of all others."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import click

from lens_core.telemetry.export.destinations import SPANS, otlp_sink
from lens_core.telemetry.journaling import SenderSink
from lens_tools.options import otlp_option, seconds_option
from lens_tools.recover.shipping import Round, Shipper

__all__ = ["agent"]


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@otlp_option("OTLP/HTTP receiver.", required=True)
@seconds_option("interval", 1.0, "Seconds between rounds.")
@click.option("--once", is_flag=True, help="Do one round and end.")
def agent(directory: Path, otlp: str, interval_s: float, once: bool) -> None:
    """Deliver the spans of all processes of this host that have a journal below DIR.

    For processes with NEMO_LENS_EXPORTER=journal and NEMO_LENS_JOURNAL_DIR=DIR, which then hold no
    network connection themselves. Processes that have died are recovered. Ends on SIGTERM or
    SIGINT, after a last round; whatever is left then is delivered by the next agent.

    Exit status: 1 if the last round could not deliver all.
    """
    shipper = Shipper(directory, SenderSink(otlp_sink(SPANS, os.environ, otlp)))
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    said = ""
    while not once and not stop.is_set():
        said = _say(shipper.round(), said)
        stop.wait(interval_s)
    last = shipper.round()
    _say(last, said)
    sys.exit(1 if last.problems else 0)


def _say(result: Round, before: str) -> str:
    """Write what changed; a problem that persists is written once."""
    for name, reason in result.recovered.processes.items():
        click.echo(f"{name}: {reason}")
    if result.recovered.processes:
        click.echo(
            f"recovered {result.recovered.ended} ended spans and "
            f"{result.recovered.truncated} that were open"
        )
    problems = "\n".join(result.problems)
    if problems and problems != before:
        click.echo(problems, err=True)
    return problems
