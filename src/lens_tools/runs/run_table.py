"""A run as a table: what its files hold, and what of them could not be read."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from lens_tools.runs.schema import STEP_TIMES

__all__ = ["ReadingReport", "Run"]

#: Problems told one by one; all are counted.
_TOLD: Final = 100
_SHOWN: Final = 10


@dataclass(slots=True)
class ReadingReport:
    """What was found where the run is, and what of it is damaged or missing.

    Attributes:
        files: Files that were read.
        cached: Of those, the ones whose spans came from the cache.
        counts: How often each kind of thing was met: ``"half lines"``, ``"repeated spans"``,
            ``"links to spans that are not there"``, ... Zero is not listed.
        problems: What could not be read, ``"file:place: what is wrong"``; the first hundred.
        runs: Spans of each run that the files hold, by its id.
    """

    files: int = 0
    cached: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)

    def found(self, kind: str, times: int = 1, problem: str = "") -> None:
        """Count something, and tell it where there is room."""
        if times:
            self.counts[kind] += times
        if problem and len(self.problems) < _TOLD:
            self.problems.append(problem)

    def add(self, counts: Mapping[str, int], problems: Sequence[str]) -> None:
        """Add what one file's reader found."""
        self.counts.update(counts)
        self.problems += problems[: _TOLD - len(self.problems)]

    def lines(self) -> list[str]:
        """The report for people, a line each; empty where nothing is wrong."""
        told = [f"{count:,} {kind}" for kind, count in self.counts.most_common()]
        if len(self.runs) > 1:
            others = ", ".join(f"{run or '(no id)'}: {spans:,}" for run, spans in self.runs.items())
            told.append(f"{len(self.runs)} runs are here (spans: {others})")
        return told + self.problems


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """One run, read.

    Attributes:
        path: Where it was read from.
        spans: One row a span, by start time: :data:`lens_tools.runs.SPANS`. Each span once.
        reading: What was damaged or missing.
        step_times: Own time by rank, step and phase, where it was recorded:
            :data:`lens_tools.runs.STEP_TIMES`.
    """

    path: Path
    spans: pa.Table
    reading: ReadingReport
    step_times: pa.Table = field(default_factory=STEP_TIMES.empty_table)

    @property
    def run_id(self) -> str:
        """Id of the run; empty where none was recorded."""
        ids = pc.unique(self.spans["run"]).drop_null()
        return str(ids[0].as_py()) if len(ids) else ""

    @property
    def attempts(self) -> list[int]:
        """The attempts whose spans are here, in order."""
        return self._distinct("attempt")

    @property
    def ranks(self) -> list[int]:
        """The global ranks whose spans are here, in order."""
        return self._distinct("rank")

    @property
    def steps(self) -> list[int]:
        """The training steps whose spans are here, in order."""
        return self._distinct("step")

    def _distinct(self, column: str) -> list[int]:
        return sorted(int(value.as_py()) for value in pc.unique(self.spans[column]).drop_null())

    def _facts(self) -> list[tuple[str, str]]:
        bounds = pc.min_max(self.spans["start_ns"]).as_py()
        last_ns = pc.max(self.spans["end_ns"]).as_py()
        facts = [
            ("spans", f"{self.spans.num_rows:,}"),
            ("ranks", f"{len(self.ranks):,}"),
            ("steps", f"{len(self.steps):,}"),
            ("attempts", f"{len(self.attempts):,}"),
        ]
        if bounds["min"] is not None and last_ns is not None:
            facts.append(("seconds", f"{(last_ns - bounds['min']) / 1e9:,.1f}"))
        facts += [("noticed", line) for line in self.reading.lines()[:_SHOWN]]
        return facts

    def __repr__(self) -> str:
        told = ", ".join(f"{value} {name}" for name, value in self._facts() if name != "noticed")
        noticed = sum(self.reading.counts.values())
        return f"<Run {self.run_id or self.path}: {told}; {noticed:,} things noticed in reading>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return (
            f"<table><caption>{html.escape(self.run_id or str(self.path))}</caption>{rows}</table>"
        )
