"""The receiver that a command is given."""

from __future__ import annotations

from urllib.parse import urlsplit

import click

__all__ = ["check_endpoint"]


def check_endpoint(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The value of ``--otlp``; it is refused at once where spans could never be sent to it.

    Raises:
        click.BadParameter: it is no URL of HTTP.
    """
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
