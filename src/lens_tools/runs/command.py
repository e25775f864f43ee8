"""``lens import``: runs that were recorded elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from lens_tools.runs.reading import write_run
from lens_tools.runs.straggler import read_straggler_trace

__all__ = ["import_run"]


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The run's directory, which every command of lens then reads.",
)
def import_run(file: Path, output: Path) -> None:
    """Make a run of a trace that was recorded elsewhere.

    FILE is a Parquet trace of pipeline operations, of the form that "Understanding Stragglers in
    Large Model Training Using What-if Analysis" (OSDI 2025) was published with.

    Exit status: 2 if it is no such trace.
    """
    spans = read_straggler_trace(file)
    target = write_run(output, spans)
    click.echo(f"{spans.num_rows:,} spans; {target}")
