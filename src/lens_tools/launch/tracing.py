"""What ``lens run --trace`` tells the processes that it starts, through their environment alone."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Final

import lens_contrib.bootstrap
from lens_contrib.traced_report import TracedReport
from lens_core.identity.run import resolve_run_identity
from lens_core.identity.run_key import RUN_KEY_VARIABLE
from lens_core.telemetry.config import NemoLensConfig

__all__ = ["trace_children", "untraced"]

_NOTHING_TRACED: Final = (
    "nothing was traced: no process trained with a torch that this reaches. It needs lens-otel[sdk]"
    " in the environment of the command's own Python, which must not run with -S, -E or -I; a "
    "PYTHONPATH that the command sets must keep the first entry of the one that it got"
)
#: Options of torchrun that speak of other nodes: their ranks cannot know what is drawn here.
_OTHER_NODES: Final = ("--nnodes", "--node", "--rdzv")


def trace_children(
    arguments: Sequence[str], environ: MutableMapping[str, str]
) -> TracedReport | None:
    """Have the Python processes of a command trace torch, with settings that the user did not make.

    Args:
        arguments: The command.
        environ: The environment that it will have; changed.

    Returns:
        What tells whether any of them was traced; ``None`` where the user has switched it off.
    """
    here = str(Path(lens_contrib.bootstrap.__file__).parent)
    # Nothing but the one module of that directory: what else they import stays theirs.
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, environ.get("PYTHONPATH", ""))))
    environ.setdefault("NEMO_LENS_ENABLED", "1")
    environ.setdefault("NEMO_LENS_LIVE_SPAN_GROUPS", "1")
    # A script that changes its directory still writes beside those that do not.
    environ["NEMO_LENS_OUTPUT_DIR"] = str(
        Path(environ.get("NEMO_LENS_OUTPUT_DIR", "runs")).absolute()
    )
    if not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in environ):
        environ.setdefault("NEMO_LENS_EXPORTER", "file")
    if not any(argument.startswith(_OTHER_NODES) for argument in arguments):
        environ.setdefault(RUN_KEY_VARIABLE, secrets.token_hex(16))
        if resolve_run_identity(environ=environ, is_used=False).source == "random":
            environ["NEMO_LENS_RUN_ID"] = time.strftime(f"trace-%Y%m%d-%H%M%S-{os.getpid()}")
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or not NemoLensConfig.from_env(environ=environ).enabled:
        return None
    return TracedReport(environ)


def untraced(report: TracedReport | None) -> list[str]:
    """What to say where nothing was traced, when the command has ended."""
    return [] if report is None or report.close() else [_NOTHING_TRACED]
