"""What must travel to the workers so that they trace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from lens_contrib.ray.compat import job_variables
from lens_core.telemetry.config import NemoLensConfig
from lens_core.telemetry.handle import current_telemetry

__all__ = ["runtime_env"]

_PREFIXES: Final = ("NEMO_LENS_", "OTEL_")
_RUN_ID: Final = "NEMO_LENS_RUN_ID"
_OUTPUT: Final = "NEMO_LENS_OUTPUT_DIR"
_JOURNAL: Final = "NEMO_LENS_JOURNAL_DIR"


def runtime_env(
    existing: Mapping[str, object] | None = None, *, config: NemoLensConfig | None = None
) -> dict[str, object]:
    """A Ray ``runtime_env`` that gives the workers this process's telemetry settings.

    Pass it to ``ray.init``, to a task or to an actor; workers read the settings at their first
    traced call. They are the environment variables ``NEMO_LENS_*`` and ``OTEL_*`` of this process,
    and the run id of its telemetry, so that all processes belong to one run. Directories are made
    absolute, because workers run elsewhere. What is in a ``runtime_env`` can be read on Ray's
    dashboard: give secrets such as ``OTEL_EXPORTER_OTLP_HEADERS`` to the cluster instead.

    Under ``ray job submit`` variables that the job's own ``runtime_env`` sets are left out, for Ray
    refuses to merge two that name the same ones. Workers have those from the job, as it set them.

    Args:
        existing: A ``runtime_env`` of yours; it is not changed, and its own variables win.
        config: Settings that are not in the environment; they win over it.

    Raises:
        TypeError: If ``env_vars`` of yours is no mapping.
    """
    merged = dict(existing or {})
    own = merged.get("env_vars") or {}
    if not isinstance(own, Mapping):
        raise TypeError(f"env_vars must be a mapping, not {type(own).__name__}")
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    if config is not None:
        variables.update(_as_variables(config))
    telemetry = current_telemetry()
    if telemetry is not None and not variables.get(_RUN_ID):
        variables[_RUN_ID] = telemetry.run_id
    variables[_OUTPUT] = os.path.abspath(variables.get(_OUTPUT) or NemoLensConfig().output_dir)
    if journal := variables.get(_JOURNAL):
        variables[_JOURNAL] = os.path.abspath(journal)
    of_job = job_variables()
    variables = {name: value for name, value in variables.items() if name not in of_job}
    merged["env_vars"] = {**variables, **own}
    return merged


def _as_variables(config: NemoLensConfig) -> dict[str, str]:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {
        f"NEMO_LENS_{name.upper()}": str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if value != ""
    }
