"""What the processes of a run are doing, or were doing when they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.util.types import AttributeValue

__all__ = ["OpenProcess", "OpenSpan", "Snapshot"]


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span that has not ended; ids in hex, ``start_ns`` since the epoch."""

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    start_ns: int
    attributes: Mapping[str, AttributeValue]


@dataclass(slots=True)
class OpenProcess:
    """One process.

    Attributes:
        name: How it is called in the report, such as ``rank 3``.
        rank: Its global rank, where it has one.
        host: Its host.
        pid: Its process id.
        gone: Whether it ended while others went on.
        reason: How it ended; empty while it is not known to have.
        created_ns: When its journal begins.
        alive_ns: The last moment at which it is known to have lived.
        activity_ns: When one of its spans last started, changed or ended.
        spans: Its open spans, by start.
        stacks: Stacks of its threads; empty if nobody has written them.
        resource: Its resource attributes.
        source: The file that this was read from.
    """

    name: str
    rank: int | None
    host: str
    pid: int
    gone: bool
    reason: str
    created_ns: int
    alive_ns: int
    activity_ns: int
    spans: Sequence[OpenSpan]
    stacks: str
    resource: Mapping[str, AttributeValue]
    source: Path

    @property
    def innermost(self) -> list[OpenSpan]:
        """The open spans that have no open child in this process, latest first."""
        parents = {span.parent_span_id for span in self.spans}
        return [span for span in reversed(self.spans) if span.span_id not in parents]

    def path_to(self, span: OpenSpan) -> list[OpenSpan]:
        """The open spans of this process from the outermost to this one."""
        by_id = {candidate.span_id: candidate for candidate in self.spans}
        path = [span]
        while (parent := by_id.get(path[-1].parent_span_id)) is not None and parent not in path:
            path.append(parent)
        return path[::-1]


@dataclass(slots=True)
class Snapshot:
    """All processes at one moment.

    Attributes:
        now_ns: That moment: now if any of them lives, else the last at which one of them did.
        processes: By rank, then by name.
        world_size: How many ranks there should be; ``None`` if unknown.
        is_live: Whether any of them lives.
        problems: One line per file that could not be read.
    """

    now_ns: int
    processes: list[OpenProcess]
    world_size: int | None = None
    is_live: bool = False
    problems: list[str] = field(default_factory=list)
