"""A run, read from the OTLP JSON Lines files in its directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from lens_core.errors import LensError
from lens_core.otlp.lines import read_lines
from lens_core.otlp.span_records import SpanRecord, span_records

__all__ = ["RunError", "RunRecords", "read_records", "run_files"]


class RunError(LensError, ValueError):
    """A directory that holds no run."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"{directory}: {problem}")
        self.directory = directory
        self.problem = problem


@dataclass(frozen=True, slots=True)
class RunRecords:
    """What the files of a run hold.

    Attributes:
        directory: Where they are.
        files: The files that were read, sorted.
        spans: Every span once, by start time. A span that stands in several files or lines (a
            batch that was sent again) is kept once.
        problems: One line per piece that could not be read: ``"file:line: what is wrong"``.
        repeated: How many further copies of spans were passed over.
    """

    directory: Path
    files: Sequence[Path]
    spans: Sequence[SpanRecord]
    problems: Sequence[str] = field(default_factory=tuple)
    repeated: int = 0


def run_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The ``.jsonl`` files below a directory, sorted.

    Raises:
        RunError: If there is no such directory, or no such file below it.
    """
    root = Path(directory)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise RunError(root, "there is no such directory")
    files = sorted(path for path in root.rglob("*.jsonl") if path.is_file())
    if not files:
        raise RunError(root, "no .jsonl file is in it or below it; was anything exported there?")
    return files


def read_records(directory: str | os.PathLike[str]) -> RunRecords:
    """The run in a directory, or in a single file.

    Raises:
        RunError: If nothing there can be a run.
    """
    files = run_files(directory)
    problems: list[str] = []
    spans: dict[tuple[str, str], SpanRecord] = {}
    repeated = 0
    for path in files:
        lines = read_lines(path, partial(span_records, source=path), problems)
        for span in chain.from_iterable(lines):
            known = spans.get(span.key)
            if known is None:
                spans[span.key] = span
            else:
                repeated += 1
                # The same span ended by its own code is truer than the one lens ended for it.
                if known.truncated and not span.truncated:
                    spans[span.key] = span
    ordered = sorted(spans.values(), key=lambda span: (span.start_ns, span.span_id))
    return RunRecords(Path(directory), files, ordered, problems, repeated)
