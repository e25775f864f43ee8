"""What a journal keeps, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["JournalSettings", "Keeps"]

#: ``open``: spans until they end. ``all``: until they are exported. ``ship``: until they are in a
#: spill file, from where another process ships them.
Keeps = Literal["open", "all", "ship"]


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """What a journal keeps, and where.

    Attributes:
        directory: Where the files are.
        keeps: Which spans.
        blocks: Number of blocks of the table.
        attributes: The resource attributes of the process.
        schema_url: Schema of those attributes.
        details: What else a reader should know: the run, where its telemetry goes.
    """

    directory: Path
    keeps: Keeps = "open"
    blocks: int = 8192
    attributes: Mapping[str, object] = field(default_factory=dict)
    schema_url: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
