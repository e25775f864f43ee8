"""What is found out about a run that hangs, or hung."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from lens_tools.hang.open_processes import OpenProcess, Snapshot
from lens_tools.hang.wait_records import Wait

__all__ = ["HANG_AFTER_S", "Edge", "HangReport", "Kind", "Mismatch", "Suspect", "Verdict"]

#: A rank may compute, load data or write a checkpoint for a while, and the others wait for it.
HANG_AFTER_S: Final = 30.0

Kind = Literal[
    "dead", "gave_up", "missing", "stuck", "mismatch", "cycle", "transfer", "outside", "unknown"
]
#: ``unknown``: nothing has moved, and no suspect can be named.
Verdict = Literal["hangs", "nothing", "unknown"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One process waits for another; ``why`` is the operation or the call."""

    waiting: str
    waited_for: str
    why: str
    since_ns: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks of one group that are in different operations.

    Attributes:
        group: Name of the group.
        operations: Operation, with its number, to the processes that are in it.
    """

    group: str
    operations: dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A process, or several that hold each other up, for which others wait.

    Attributes:
        kind: ``dead``; ``gave_up`` (others waited for it until their timeout); ``missing`` (waited
            for, but it has ended); ``unknown`` (waited for, and nothing is known of it); ``stuck``
            (waits for nobody); ``outside`` (its stack is outside of the collective in which those
            of others are); ``mismatch`` (in another operation than its peers); ``cycle`` (wait for
            each other); ``transfer`` (all are there, and the operation does not end).
        names: Names of the processes.
        waiters: Names of the others that wait for them, directly or not.
        progresses: Whether it started or ended a span within the last two seconds.
        hangs: Whether this is a hang, and not only somebody who is slow.
        text: One line that says what is known.
    """

    kind: Kind
    names: tuple[str, ...]
    waiters: tuple[str, ...]
    progresses: bool
    hangs: bool
    text: str


@dataclass(slots=True)
class HangReport:
    """Who waits for whom.

    Attributes:
        snapshot: The processes.
        waits: For each process that waits, by name, its waits.
        edges: The wait-for graph.
        mismatches: Ranks in different operations of one group.
        suspects: The most likely first.
        after_s: How long nothing may move, in seconds, before that counts as a hang.
        idle: Those of the processes that go on which have not moved for so long.
        idle_s: How long the one among all that moved last has not moved; 0 if there is none.
    """

    snapshot: Snapshot
    waits: dict[str, list[Wait]] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    after_s: float = HANG_AFTER_S
    idle: list[OpenProcess] = field(default_factory=list)
    idle_s: float = 0.0

    @property
    def hangs(self) -> bool:
        """Whether any of the suspects hangs."""
        return any(suspect.hangs for suspect in self.suspects)

    @property
    def verdict(self) -> Verdict:
        """``hangs`` where a suspect hangs; ``nothing`` only where something moves, or all ended."""
        if self.hangs:
            return "hangs"
        return "unknown" if self.idle and self.idle_s >= self.after_s else "nothing"
