"""What must travel to the workers so that they trace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

__all__ = ["runtime_env"]

_PREFIXES: Final = ("NEMO_LENS_", "OTEL_")


def runtime_env(existing: Mapping[str, object] | None = None) -> dict[str, object]:
    """A Ray ``runtime_env`` that gives the workers this process's telemetry settings.

    Pass it to ``ray.init``, to a task or to an actor. The settings are the environment variables
    ``NEMO_LENS_*`` and ``OTEL_*`` of this process; workers read them at their first traced call.
    A relative ``NEMO_LENS_OUTPUT_DIR`` is made absolute, because workers run in other directories.

    Args:
        existing: A ``runtime_env`` of yours; it is not changed, and its own variables win.
    """
    merged = dict(existing or {})
    own = merged.get("env_vars") or {}
    if not isinstance(own, Mapping):
        raise TypeError(f"env_vars must be a mapping, not {type(own).__name__}")
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    if output := variables.get("NEMO_LENS_OUTPUT_DIR"):
        variables["NEMO_LENS_OUTPUT_DIR"] = os.path.abspath(output)
    merged["env_vars"] = {**variables, **own}
    return merged
