"""``lens groups``: switch the span groups of a run that is running."""

from __future__ import annotations

from pathlib import Path

import click

from lens_core.spans.groups import span_registry
from lens_core.telemetry.group_file import read_group_file, write_group_file

__all__ = ["groups"]


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("spec", required=False)
@click.option("--reset", is_flag=True, help="Back to the groups that each process started with.")
def groups(run: Path, spec: str | None, reset: bool) -> None:
    """Switch the span groups of RUN (its directory) to SPEC, such as per_step,communication.

    Each process that was set up with NEMO_LENS_LIVE_SPAN_GROUPS=1 follows within seconds; no signal
    is sent and nothing is restarted. Without SPEC, print what is asked for now. Groups of a library
    that is not imported here are passed on as they are.
    """
    if reset and spec:
        raise click.UsageError("give SPEC or --reset, not both")
    if not spec and not reset:
        click.echo(read_group_file(run) or "(the groups that each process started with)")
        return
    write_group_file(run, spec)
    resolved = span_registry.resolve(spec or "")
    if resolved.unknown:
        click.echo(f"not known here: {', '.join(resolved.unknown)}", err=True)
    click.echo(f"{run}: {'reset' if spec is None else spec}")
