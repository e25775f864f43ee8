"""Seconds that a command is given."""

from __future__ import annotations

import threading

import click

__all__ = ["check_seconds"]


def check_seconds(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """The value of an option in seconds: not negative, and no longer than a thread can wait.

    Raises:
        click.BadParameter: it is not; ``nan`` neither, which passes every range of click's.
    """
    if not 0 <= value <= threading.TIMEOUT_MAX:
        raise click.BadParameter(f"{value} is no number of seconds")
    return value
