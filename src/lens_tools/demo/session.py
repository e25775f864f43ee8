"""One run of the demo: train, read it back, and say whether every hop found its true sender."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lens_core import NemoLensConfig, setup_telemetry
from lens_tools.demo.driver import DemoResult, run_demo
from lens_tools.demo.training import TrainingPlan, broadcast_hops, point_to_point_hops
from lens_tools.records.hops import HopResolution, resolve_hops
from lens_tools.records.read import RunRecords, read_records

__all__ = ["report_hops", "train_and_report"]

_SHOWN_PROBLEMS: Final = 5


def train_and_report(
    console: Console,
    ranks: int,
    steps: int,
    text: str | None,
    directory: Path,
    otlp: str | None,
) -> bool:
    """Train, and print how the hops and the loss fared; the settings are in the environment.

    Args:
        console: Where progress and results go.
        ranks: Pipeline stages, one actor each.
        steps: Steps of training.
        text: Path of the text; ``None`` for the one that ships with CPython.
        directory: The run directory; the spans are read back from it.
        otlp: Base URL of a collector that gets the spans as well.

    Returns:
        Whether every hop resolved to its true sender, and the loss fell.

    Raises:
        TextError: If nothing can be trained on the text.
        DemoError: If an actor fails or does not answer.
    """
    plan = TrainingPlan()
    result = _train(console, plan, ranks, steps, text, directory, otlp)
    expected = {
        "ray": result.ray_hops,
        "torch.broadcast": broadcast_hops(ranks, steps),
        "nccl": point_to_point_hops(ranks, steps, plan),
    }
    resolved = report_hops(console, read_records(directory), expected)
    learned = _report_training(console, result)
    return resolved and learned


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


def report_hops(console: Console, run: RunRecords, expected: dict[str, int]) -> bool:
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
