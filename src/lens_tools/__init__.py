"""What the command ``lens`` does: it runs, examines and reads back jobs that trace."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lens_tools.runs import Run, read_run

__all__ = ["Run", "read_run"]


def __getattr__(name: str) -> object:
    # Most commands of lens do without the table, and start without pyarrow.
    if name in __all__:
        return getattr(importlib.import_module("lens_tools.runs"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
