"""The one reader of runs: files to one table of spans."""

from __future__ import annotations

from lens_core.errors import MissingExtraError

try:
    from lens_tools.runs.schema import SCHEMA_VERSION, SPANS, STEP_TIMES
except ModuleNotFoundError as error:
    raise MissingExtraError("pyarrow", "tools") from error

from lens_tools.runs.reading import read_run
from lens_tools.runs.run_table import ReadingReport, Run

__all__ = ["ReadingReport", "Run", "SCHEMA_VERSION", "SPANS", "STEP_TIMES", "read_run"]
