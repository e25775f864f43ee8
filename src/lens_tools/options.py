"""Options that several commands share, checked alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

__all__ = ["otlp_option", "recovered_to_options", "seconds_option"]

F = TypeVar("F", bound=Callable[..., Any])


def otlp_option(text: str, *, required: bool = False) -> Callable[[F], F]:
    """``--otlp ENDPOINT``, as ``otlp``; refused at once where nothing could ever be sent to it.

    Args:
        text: Its help.
        required: Whether the command cannot do without.
    """
    return click.option(
        "--otlp", metavar="ENDPOINT", callback=_check_endpoint, help=text, required=required
    )


def seconds_option(name: str, default: float, text: str) -> Callable[[F], F]:
    """A time in seconds, as ``NAME_s``: not negative, and no longer than a thread can wait.

    Args:
        name: Its name, without the dashes before it.
        default: Its value where it is not given.
        text: Its help.
    """
    return click.option(
        f"--{name}",
        f"{name}_s",
        type=float,
        callback=_check_seconds,
        default=default,
        show_default=True,
        help=text,
    )


def recovered_to_options(command: F) -> F:
    """``--output`` and ``--otlp``: where recovered spans go, if not to the run's own directory."""
    output = click.option(
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        help="Directory for the recovered spans, instead of the run's own.",
    )
    return output(otlp_option("Send them to this OTLP/HTTP receiver instead.")(command))


def _check_endpoint(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        # The port is read for its own check.
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        known = False
    if not known or value != "".join(value.split()):
        raise click.BadParameter(f"{value!r} is no URL such as http://127.0.0.1:4318")
    return value


def _check_seconds(ctx: click.Context, param: click.Parameter, value: float) -> float:
    # Not a range of click's, all of which nan passes.
    if not 0 <= value <= threading.TIMEOUT_MAX:
        raise click.BadParameter(f"{value} is no number of seconds")
    return value
