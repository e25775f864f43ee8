"""Reading runs back: what the processes of a run wrote, put together."""

from __future__ import annotations

from lens_core.otlp.span_records import SpanRecord
from lens_core.telemetry.export.files import run_directory
from lens_tools.runs.hops import HopResolution, resolve_hops
from lens_tools.runs.read import Run, RunError, read_run, run_files

__all__ = [
    "HopResolution",
    "Run",
    "RunError",
    "SpanRecord",
    "read_run",
    "resolve_hops",
    "run_directory",
    "run_files",
]
