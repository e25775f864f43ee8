"""Reading runs back: what the processes of a run wrote, put together."""

from __future__ import annotations

from lens_core.otlp.span_records import SpanRecord
from lens_core.telemetry.export.files import run_directory
from lens_tools.records.hops import HopResolution, resolve_hops
from lens_tools.records.read import RunError, RunRecords, read_records, run_files

__all__ = [
    "HopResolution",
    "RunRecords",
    "RunError",
    "SpanRecord",
    "read_records",
    "resolve_hops",
    "run_directory",
    "run_files",
]
