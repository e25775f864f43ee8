"""What became of one attempt to send a batch, and a batch in parts that a receiver can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypeVar

from lens_core.diagnostics import diagnostics

__all__ = ["MAX_REQUEST_BYTES", "ExportResult", "Outcome", "failed_export", "send_in_parts"]

T = TypeVar("T")

#: Largest request, before compression: what gRPC servers take unless told otherwise (4 MiB), less
#: what frames it. The Collector's HTTP receiver takes 20 MiB.
MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024 - 4096
#: Halvings of one batch: enough to find one or two records among 512 that are refused. A receiver
#: that refuses everything must not be asked a thousand times.
_MAX_HALVINGS: Final = 20


class Outcome(Enum):
    """What became of one attempt to send a batch."""

    SENT = "sent"
    #: Not sent now; the same batch may succeed later.
    RETRY = "retry"
    #: Not sent, and it would not help to try again.
    REFUSED = "refused"
    #: Not sent as one: it is too large, or something in it is refused. Its halves may be sent.
    SPLIT = "too large, or refused as one"


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What a receiver answered.

    Attributes:
        outcome: What became of the batch.
        rejected: Records that the receiver did not take out of a batch that it took.
        retry_after_s: How long it asks to be left alone.
        why: What was wrong, and what to do about it; empty where nothing was.
    """

    outcome: Outcome
    rejected: int = 0
    retry_after_s: float | None = None
    why: str = ""


def failed_export(outcome: Outcome, kind: str, what: str, todo: str) -> ExportResult:
    """The result of a batch that was not sent; counted and logged as a diagnostic of this kind."""
    diagnostics.record(kind, what, todo=todo)
    return ExportResult(outcome, why=f"{what}. {todo}")


def send_in_parts(
    batch: Sequence[T], send: Callable[[Sequence[T]], ExportResult]
) -> Iterator[tuple[Sequence[T], ExportResult]]:
    """Send a batch, halved as often as it must be; each part, in order, with what became of it.

    Args:
        batch: The records.
        send: Sends some of them.
    """
    waiting = [batch]
    halvings = _MAX_HALVINGS
    while waiting:
        part = waiting.pop()
        result = send(part)
        if result.outcome is Outcome.SPLIT and len(part) > 1 and halvings:
            halvings -= 1
            half = len(part) // 2
            waiting += [part[half:], part[:half]]
        elif result.outcome is Outcome.SPLIT:
            yield part, replace(result, outcome=Outcome.REFUSED)
        else:
            yield part, result
