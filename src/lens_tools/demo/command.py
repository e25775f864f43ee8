"""``lens demo``: its arguments, and what must hold before anything is trained."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
import time

import click
from opentelemetry import trace
from rich.console import Console

from lens_core import extract_context
from lens_core.errors import MissingExtraError
from lens_core.propagation import current_carrier
from lens_core.telemetry.export.files import run_directory
from lens_tools.demo.errors import DemoError
from lens_tools.options import otlp_option

__all__ = ["demo"]

# They take seconds to import: not before the arguments are known to be good.
for _needed in ("ray", "torch"):
    if importlib.util.find_spec(_needed) is None:
        raise MissingExtraError(_needed, "all")


@click.command()
@click.option(
    "--ranks",
    default=4,
    show_default=True,
    type=click.IntRange(2, 8),
    help="Pipeline stages, one actor each.",
)
@click.option(
    "--steps",
    default=80,
    show_default=True,
    type=click.IntRange(min=10),
    help="Steps of training.",
)
@click.option(
    "--out",
    default="runs",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Directory that holds one directory per run.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="UTF-8 text to train on, up to its 4,000,000th character.  "
    "[default: the documentation topics inside CPython]",
)
@otlp_option("Send the spans to this OTLP/HTTP collector as well, e.g. http://127.0.0.1:4318.")
def demo(ranks: int, steps: int, out: str, text: str | None, otlp: str | None) -> None:
    """Train a small character transformer over Ray, broadcast and point-to-point sends.

    Every process writes its spans, each of them whatever OTEL_TRACES_SAMPLER says, to an OTLP JSON
    Lines file in OUT/RUN_ID. At the end they are read back: every receiver must point at exactly
    the span that sent to it, and the loss must have fallen. Exit status 1 if not, 2 if the training
    could not run.
    """
    console = Console()
    started = time.monotonic()
    run_id = os.environ.get("NEMO_LENS_RUN_ID") or (
        time.strftime("demo-%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    )
    _require_that_contexts_are_carried()
    # Loads torch and Ray.
    from lens_tools.demo.session import train_and_report  # noqa: PLC0415

    directory = run_directory(os.path.abspath(out), run_id)
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise DemoError(f"{directory} exists; set another NEMO_LENS_RUN_ID or --out") from None
    except OSError as error:
        raise DemoError(
            f"{directory} cannot be made: {error.strerror}; set another --out"
        ) from None
    # Through the environment, since that is where Ray's workers get their settings from.
    os.environ.update(
        NEMO_LENS_ENABLED="1",
        NEMO_LENS_TRACES_ENABLED="1",
        NEMO_LENS_EXPORTER="file",
        NEMO_LENS_RUN_ID=run_id,
        NEMO_LENS_OUTPUT_DIR=os.path.abspath(out),
        # Every hop is looked for at the end, so every span has to be there.
        OTEL_TRACES_SAMPLER="always_on",
    )
    os.environ.setdefault("OTEL_SERVICE_NAME", "lens-demo")
    console.print(f"run [bold]{run_id}[/]: {ranks} stages, {steps} steps", highlight=False)
    healthy = train_and_report(console, ranks, steps, text, directory, otlp)
    console.print(f"{time.monotonic() - started:.0f} s; files in {directory}", highlight=False)
    sys.exit(0 if healthy else 1)


def _require_that_contexts_are_carried() -> None:
    """Refuse an environment in which no hop can resolve, before anything is trained."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise DemoError("OTEL_SDK_DISABLED=true: nothing would be recorded; unset it")
    sent = trace.SpanContext(1, 1, is_remote=True, trace_flags=trace.TraceFlags(1))
    carrier = current_carrier(trace.set_span_in_context(trace.NonRecordingSpan(sent)))
    if trace.get_current_span(extract_context(carrier)).get_span_context() != sent:
        raise DemoError(
            f"OTEL_PROPAGATORS={os.environ.get('OTEL_PROPAGATORS', '')!r} carries no trace "
            "context; unset it, or add tracecontext"
        )
