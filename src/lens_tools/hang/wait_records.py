"""What an open span waits for, read from its attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lens_core.semconv import (
    DL_MICROBATCH_ID,
    LENS_GROUP,
    LENS_GROUP_RANKS,
    LENS_HOP_DIRECTION,
    LENS_HOP_ID,
    LENS_HOP_SEQUENCE,
    LENS_MICROBATCH,
    LENS_OP,
    LENS_PEER_RANK,
    LENS_PEER_STAGE,
    LENS_SEQUENCE,
)
from lens_tools.hang.open_processes import OpenSpan

__all__ = ["Wait", "wait_of"]

_RECEIVES: Final = frozenset({"recv", "irecv", "receive"})
_SENDS: Final = frozenset({"send", "isend"})


@dataclass(frozen=True, slots=True)
class Wait:
    """What one span waits for.

    Attributes:
        span: The span.
        op: ``recv``, ``send`` or the name of a collective.
        peer: Global rank at the other end of a send or receive.
        peer_stage: Pipeline stage at the other end, where its rank is not known.
        group: Name of the process group of a collective.
        ranks: Global ranks of that group; ``None`` if unknown.
        sequence: Which of the operations of the group, or of the pair of ranks, it is.
        microbatch: Which microbatch.
        hop: Name of the hop, the same on both sides.
    """

    span: OpenSpan
    op: str
    peer: int | None = None
    peer_stage: int | None = None
    group: str = ""
    ranks: tuple[int, ...] | None = None
    sequence: int | None = None
    microbatch: int | None = None
    hop: str = ""

    @property
    def is_collective(self) -> bool:
        """Whether all ranks of a group take part."""
        return self.op not in _RECEIVES and self.op not in _SENDS

    @property
    def is_receive(self) -> bool:
        """Whether it waits for a message."""
        return self.op in _RECEIVES

    def __str__(self) -> str:
        parts = [self.op]
        if self.peer is not None:
            parts.append(f"{'from' if self.is_receive else 'to'} rank {self.peer}")
        elif self.peer_stage is not None:
            parts.append(f"{'from' if self.is_receive else 'to'} stage {self.peer_stage}")
        if self.sequence is not None:
            parts.append(f"#{self.sequence}")
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch}")
        if self.group:
            parts.append(f"in group {self.group}")
        return " ".join(parts)


def wait_of(span: OpenSpan) -> Wait | None:
    """What a span says that it waits for; ``None`` where it names no operation."""
    attributes = span.attributes
    op = str(attributes.get(LENS_OP, ""))
    peer = _integer(attributes.get(LENS_PEER_RANK))
    stage = _integer(attributes.get(LENS_PEER_STAGE))
    if not op:
        direction = str(attributes.get(LENS_HOP_DIRECTION, ""))
        if direction in _RECEIVES or direction in _SENDS:
            op = direction
        elif span.name.startswith("recv"):
            op = "recv"  # a schedule's span: its direction says which way the hop goes
        else:
            return None
    is_pair = op in _RECEIVES or op in _SENDS
    if is_pair and peer is None and stage is None:
        return None
    sequence = _integer(attributes.get(LENS_SEQUENCE))
    microbatch = _integer(attributes.get(LENS_MICROBATCH))
    ranks = attributes.get(LENS_GROUP_RANKS)
    return Wait(
        span,
        op,
        peer=peer if is_pair else None,
        peer_stage=stage if is_pair and peer is None else None,
        group=str(attributes.get(LENS_GROUP, "")),
        ranks=_ranks(ranks) if isinstance(ranks, (list, tuple)) and not is_pair else None,
        sequence=_integer(attributes.get(LENS_HOP_SEQUENCE)) if sequence is None else sequence,
        microbatch=_integer(attributes.get(DL_MICROBATCH_ID)) if microbatch is None else microbatch,
        hop=str(attributes.get(LENS_HOP_ID, "")),
    )


def _ranks(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(value for value in values if isinstance(value, int))


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
