"""``lens demo``: train, read the run back, and say whether every hop found its true sender."""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path
from typing import Final

import click
from opentelemetry import trace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lens_contrib.demo.driver import DemoError, DemoResult, run_demo
from lens_contrib.demo.training import TrainingPlan, broadcast_hops, point_to_point_hops
from lens_contrib.recovery.endpoint import check_endpoint
from lens_contrib.timeline.hops import HopResolution, resolve_hops
from lens_contrib.timeline.runs import Run, read_run
from lens_core import NemoLensConfig, extract_context, setup_telemetry
from lens_core.boundary import current_carrier
from lens_core.telemetry.files import run_directory

__all__ = ["demo"]

_SHOWN_PROBLEMS: Final = 5


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
@click.option(
    "--otlp",
    metavar="ENDPOINT",
    callback=check_endpoint,
    help="Send the spans to this OTLP/HTTP collector as well, e.g. http://127.0.0.1:4318.",
)
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
    plan = TrainingPlan()
    result = _train(console, plan, ranks, steps, text, directory, otlp)
    run = read_run(directory)
    expected = {
        "ray": result.ray_hops,
        "torch.broadcast": broadcast_hops(ranks, steps),
        "nccl": point_to_point_hops(ranks, steps, plan),
    }
    resolved = _report_hops(console, run, expected)
    learned = _report_training(console, result)
    console.print(f"{time.monotonic() - started:.0f} s; files in {directory}", highlight=False)
    sys.exit(0 if resolved and learned else 1)


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


def _train(
    console: Console,
    plan: TrainingPlan,
    ranks: int,
    steps: int,
    text: str | None,
    directory: Path,
    otlp: str | None,
) -> DemoResult:
    bar = Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
    )
    with setup_telemetry(NemoLensConfig.from_env(), otlp_endpoint=otlp), bar:
        task = bar.add_task("starting", total=steps, loss="")

        def on_step(step: int, loss: float) -> None:
            bar.update(task, completed=step + 1, loss=f"loss {loss:.3f}")

        def on_phase(phase: str) -> None:
            bar.update(task, description=phase)
            if not console.is_terminal:
                console.print(f"{phase} ...", highlight=False)

        result = run_demo(
            plan,
            ranks=ranks,
            steps=steps,
            text=text,
            directory=directory,
            otlp_endpoint=otlp,
            on_step=on_step,
            on_phase=on_phase,
        )
        bar.update(task, description="done")
    return result


def _report_hops(console: Console, run: Run, expected: dict[str, int]) -> bool:
    """Print what the run holds and how each kind of hop fared; whether all is well."""
    processes = {span.source for span in run.spans}
    console.print(
        f"\n{len(processes)} processes, {len(run.spans):,} spans, "
        f"{sum(len(span.links) for span in run.spans):,} links, "
        f"{len({span.trace_id for span in run.spans}):,} traces",
        highlight=False,
    )
    found = resolve_hops(run.spans)
    table = Table("transport", "hops", "received", "resolved to the true sender")
    for column in table.columns[1:]:
        column.justify = "right"
    healthy = not run.problems
    problems = list(run.problems)
    for transport in sorted({*expected, *found}):
        hops = expected.get(transport, 0)
        fared = found.get(transport, HopResolution(transport))
        whole = fared.receivers == hops == fared.resolved
        healthy &= whole
        share = fared.resolved / hops if hops else 0.0
        mark = "green" if whole else "red"
        table.add_row(
            transport,
            f"{hops:,}",
            f"{fared.receivers:,}",
            f"[{mark}]{fared.resolved:,}   {share:.1%}[/]",
        )
        problems += fared.problems
    console.print(table)
    for problem in problems[:_SHOWN_PROBLEMS]:
        console.print(f"[red]{problem}[/]", highlight=False)
    if len(problems) > _SHOWN_PROBLEMS:
        console.print(f"[red]and {len(problems) - _SHOWN_PROBLEMS} more[/]", highlight=False)
    return healthy


def _report_training(console: Console, result: DemoResult) -> bool:
    """Print how the loss went and what the model writes; whether it has learned."""
    tenth = max(1, len(result.losses) // 10)
    first = sum(result.losses[:tenth]) / tenth
    last = sum(result.losses[-tenth:]) / tenth
    learned = last < first
    console.print(
        f"loss {first:.3f} -> {last:.3f} nats per character "
        f"(means of the first and last {tenth} steps)"
        + ("" if learned else "  [red]it did not fall[/]"),
        highlight=False,
    )
    console.print(f"the model writes: {result.sample!r}", highlight=False, markup=False)
    return learned
