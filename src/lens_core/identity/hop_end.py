"""One end of a hop as a call of ``hop_span`` names it: which hop it is, and what its span says."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Final, NamedTuple

from opentelemetry.util.types import AttributeValue

from lens_core.identity.derive import HopId
from lens_core.identity.scope import StepScope
from lens_core.semconv import (
    LENS_CHUNK,
    LENS_HOP_DIRECTION,
    LENS_HOP_SEQUENCE,
    LENS_MICROBATCH,
    LENS_OP,
    LENS_PEER_RANK,
)

__all__ = ["HopEnd", "hop_end", "parse_operation"]

_ENDS: Final = ("send", "recv")
_DIRECTIONS: Final = ("forward", "backward")


class HopEnd(NamedTuple):
    """One end of a hop, in plain integers, of which both ends make the same ids.

    Attributes:
        operation: ``send`` or ``recv``.
        direction: ``forward`` or ``backward``.
        peer: Global rank at the other end.
        microbatch: Microbatch index; ``None``: hops of this direction and pair are counted.
        chunk: Model chunk of the receiving stage.
    """

    operation: str
    direction: str
    peer: int
    microbatch: int | None
    chunk: int

    def hop(self, scope: StepScope, group: str) -> HopId:
        """The hop in an open step; each call is one more hop."""
        rank, peer = scope.identity.rank, self.peer
        source, destination = (rank, peer) if self.operation == "send" else (peer, rank)
        tag = f"{group}/{self.chunk}"
        if self.microbatch is None:
            counted = HopId(self.direction, source, destination, -1, tag)
            number = scope.count(counted)
            return HopId(self.direction, source, destination, number, tag + "/counted")
        hop = HopId(self.direction, source, destination, self.microbatch, tag)
        repeat = scope.count(hop)
        return hop if not repeat else hop._replace(repeat=repeat)

    def span_attributes(self, hop: HopId | None) -> dict[str, AttributeValue]:
        """Attributes of the span of this end."""
        attributes = self.link_attributes(hop)
        attributes[LENS_OP] = self.operation
        attributes[LENS_PEER_RANK] = self.peer
        return attributes

    def link_attributes(self, hop: HopId | None) -> dict[str, AttributeValue]:
        """What tells the hop from others of this pair of ranks."""
        attributes: dict[str, AttributeValue] = {LENS_HOP_DIRECTION: self.direction}
        if self.chunk:
            attributes[LENS_CHUNK] = self.chunk
        if self.microbatch is not None:
            attributes[LENS_MICROBATCH] = self.microbatch
        elif hop is not None:
            attributes[LENS_HOP_SEQUENCE] = hop.sequence
        return attributes


def hop_end(
    operation: str, direction: str, peer: int, microbatch: int | None, chunk: int
) -> HopEnd:
    """An end of a hop, of integers of any type.

    Raises:
        TypeError: If a number is not an integer.
    """
    number = None if microbatch is None else operator.index(microbatch)
    return HopEnd(operation, direction, operator.index(peer), number, operator.index(chunk))


@lru_cache(maxsize=64)
def parse_operation(operation: str) -> tuple[str, str]:
    """Directions of what is sent and of what is received; both empty where it is no operation."""
    directions = {"send": "", "recv": ""}
    words = operation.split("_")
    for end, direction in zip(words[::2], words[1::2], strict=False):
        if end not in _ENDS or direction not in _DIRECTIONS or directions[end]:
            break
        directions[end] = direction
    else:
        if len(words) in (2, 4):
            return directions["send"], directions["recv"]
    return "", ""
