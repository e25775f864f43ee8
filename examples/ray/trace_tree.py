"""Prints a run's spans as the tree that their parents make, with counts for repeated spans."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from lens_tools.records import SpanRecord, read_records


def print_trees(directory: Path) -> None:
    """One tree a trace, and one line per name and process kind under the same parent name."""
    spans = read_records(directory).spans
    by_id = {span.key: span for span in spans}
    paths = Counter(_path(span, by_id) for span in spans)
    for path in sorted(paths):
        count = f"  x{paths[path]}" if paths[path] > 1 else ""
        print(f"{'  ' * (len(path) - 1)}{path[-1]}{count}")
    links = sum(len(span.links) for span in spans)
    traces = len({span.trace_id for span in spans})
    files = len(list(directory.glob("*.jsonl")))
    print(f"\n{len(spans)} spans, {traces} traces, {links} links, {files} files in {directory}")


def _path(span: SpanRecord, by_id: dict[tuple[str, str], SpanRecord]) -> tuple[str, ...]:
    names = [span.name]
    while span.parent_span_id and (span.trace_id, span.parent_span_id) in by_id:
        span = by_id[(span.trace_id, span.parent_span_id)]
        names.append(span.name)
    return tuple(reversed(names))
