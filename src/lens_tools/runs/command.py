"""``lens import``: runs that were recorded elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from lens_core.telemetry.export.files import run_directory
from lens_tools.runs.jaeger import import_from_jaeger
from lens_tools.runs.reading import write_run
from lens_tools.runs.straggler import read_straggler_trace

__all__ = ["import_run"]


@click.command("import")
@click.argument(
    "file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--jaeger", metavar="URL", help="Query service of a Jaeger that has the run.")
@click.option("--run-id", metavar="ID", help="Which run of that Jaeger.")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="The run's directory, which the other commands read; of a Jaeger's by default runs/ID.",
)
def import_run(
    file: Path | None, jaeger: str | None, run_id: str | None, output: Path | None
) -> None:
    """Make a run of what was recorded elsewhere: of FILE, or of a run in a Jaeger.

    FILE is a Parquet trace of pipeline operations, of the form that "Understanding Stragglers in
    Large Model Training Using What-if Analysis" (OSDI 2025) was published with.

    Exit status: 2 if it is no such trace, or the Jaeger does not answer or know the run.
    """
    if jaeger is not None and run_id and file is None:
        target, traces = import_from_jaeger(jaeger, run_id, output or run_directory("runs", run_id))
        click.echo(f"{traces:,} traces; {target}")
    elif jaeger is None and run_id is None and file is not None and output is not None:
        spans = read_straggler_trace(file)
        click.echo(f"{spans.num_rows:,} spans; {write_run(output, spans)}")
    else:
        raise click.UsageError("give FILE -o DIR, or --jaeger URL --run-id ID")
