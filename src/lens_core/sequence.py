"""The count of the messages between two ends, by which a skipped or foreign message is noticed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lens_core.frame import MAX_SEQUENCE

__all__ = ["SequenceChecker"]


class SequenceChecker:
    """The count of the messages between two fixed ends, which both keep.

    After a message out of turn the receiver's count follows the sender's, so that one lost message
    costs one context and not all that follow. Channels between the same ends may share one.

    Attributes:
        sent: Number of the next message that leaves.
        posted: Turn of the next receive. A receive takes its turn when it is posted, since that is
            when messages are matched, and its message is read when it has come.
        ahead: How far the sender's count is ahead of the receiver's.
    """

    __slots__ = ("ahead", "posted", "sent")

    def __init__(self) -> None:
        # Counters take one step of the interpreter, so threads need no lock.
        self.sent: Iterator[int] = itertools.count()
        self.posted: Iterator[int] = itertools.count()
        self.ahead = 0

    def put_back(self, number: int) -> None:
        """The message of this number was never sent, so that the next one has it."""
        self.sent = itertools.chain((number,), self.sent)

    def due(self, turn: int) -> int:
        """The sequence number that is due in this turn."""
        return (turn + self.ahead) & MAX_SEQUENCE
