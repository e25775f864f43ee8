"""The command ``lens``: each subcommand lives in the module that it belongs to.

A subcommand's module is imported only when it is run or its help is shown, so that ``lens recover``
on a login node needs neither torch nor Ray. One that lacks a dependency says so in its place.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Final

from lens_core.errors import LensError, MissingExtraError

try:
    import click
except ImportError as error:
    raise MissingExtraError("click", "tools") from error

__all__ = ["main"]

#: Subcommand to ``(module, attribute)`` of its click command.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "agent": ("lens_tools.recover.agent", "agent"),
    "groups": ("lens_tools.groups.command", "groups"),
    "hang": ("lens_tools.hang.command", "hang"),
    "import": ("lens_tools.runs.command", "import_run"),
    "recover": ("lens_tools.recover.command", "recover"),
    "run": ("lens_tools.launch.command", "run"),
    "ship": ("lens_tools.recover.command", "ship"),
    "stacks": ("lens_tools.recover.command", "stacks"),
    "demo": ("lens_tools.demo.command", "demo"),
    "doctor": ("lens_tools.doctor.command", "doctor"),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            missing = error.name or "a dependency"
            if missing.partition(".")[0] in ("lens_core", "lens_contrib"):
                raise
            return _unavailable(cmd_name, MissingExtraError(missing, "all"))
        except MissingExtraError as error:
            return _unavailable(cmd_name, error)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is not a click command")
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except LensError as error:
            # What the caller did wrong is one line, not a traceback.
            click.echo(f"lens: {error}", err=True)
            ctx.exit(2)


def _unavailable(name: str, missing: MissingExtraError) -> click.Command:
    """What stands for a command that cannot be imported: it takes any arguments, and says why."""

    def refuse() -> None:
        raise missing

    return click.Command(
        name,
        callback=refuse,
        short_help=f"(needs {missing.module}, which is not installed)",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lens-otel", prog_name="lens")
def main() -> None:
    """OpenTelemetry trace context for distributed machine learning."""


if __name__ == "__main__":
    sys.exit(main())
