"""What the processes of a run are doing, or were doing when they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.util.types import AttributeValue

__all__ = ["FailedSpan", "OpenProcess", "OpenSpan", "Snapshot"]


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span that has not ended; ids in hex, ``start_ns`` since the epoch, 0 for no ``thread``."""

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    start_ns: int
    attributes: Mapping[str, AttributeValue]
    thread: int = 0


@dataclass(frozen=True, slots=True)
class FailedSpan:
    """A span that ended with an error, after which its process started no other.

    Attributes:
        rank: Global rank of its process.
        span: The span.
        end_ns: Its end.
    """

    rank: int
    span: OpenSpan
    end_ns: int


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
        main_thread: Its main thread, as spans name it; 0 if unknown.
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
    main_thread: int = 0

    @property
    def innermost(self) -> list[OpenSpan]:
        """The open spans that have no open child in this process.

        Those of the main thread come first: they say where the rank is. Of each, the latest first.
        """
        parents = {span.parent_span_id for span in self.spans}
        leaves = [span for span in reversed(self.spans) if span.span_id not in parents]
        return sorted(leaves, key=lambda span: span.thread != self.main_thread)

    @property
    def ended_in_order(self) -> bool:
        """Whether it came to its end by itself."""
        return self.reason in ("shutdown", "exit")

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
        failed: Spans that ended with an error, and were the last of their process.
        seen_ranks: Ranks of which there is any span in the files.
        span_count: How many spans there are in the files.
    """

    now_ns: int
    processes: list[OpenProcess]
    world_size: int | None = None
    is_live: bool = False
    problems: list[str] = field(default_factory=list)
    failed: Sequence[FailedSpan] = ()
    seen_ranks: frozenset[int] = frozenset()
    span_count: int = 0
