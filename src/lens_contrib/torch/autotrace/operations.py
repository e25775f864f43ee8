"""One collective, send or receive that is going on, and what a span says of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from lens_core.semconv import (
    LENS_BYTES,
    LENS_GROUP,
    LENS_GROUP_RANKS,
    LENS_OP,
    LENS_PEER_RANK,
    LENS_SEQUENCE,
)

__all__ = ["Operation", "byte_count"]


class Operation:
    """What is known where it begins; names and ranks are looked up when a span needs them.

    Args:
        op: What it is, in the words of ``torch.distributed``.
        group: Its process group.
        began_ns: When it began.
        sequence: Which of the group's it is, the same on all members; ``None`` if unknown.
        peer: Rank within the group at the other end, of a send or receive; ``None`` otherwise.
        bytes_: Bytes of the tensors that it was given.
        waits: Whether the thread waits for others in it, or only begins it.
    """

    __slots__ = (
        "began_ns",
        "bytes",
        "group",
        "is_over",
        "op",
        "opened",
        "peer",
        "sequence",
        "waits",
    )

    def __init__(
        self,
        op: str,
        group: Any,
        began_ns: int,
        sequence: int | None = None,
        peer: int | None = None,
        bytes_: int = 0,
        *,
        waits: bool = True,
    ) -> None:
        self.op: str = op
        self.group: Any = group
        self.began_ns: int = began_ns
        self.sequence: int | None = sequence
        self.peer: int | None = peer
        self.bytes: int = bytes_
        self.is_over: bool = False
        self.waits: bool = waits
        #: Its span, from when it is late; whoever takes it out ends it.
        self.opened: list[Span] = []

    def has_ended(self) -> bool:
        """Whether it has; the thread that it is on may have gone on meanwhile."""
        return self.is_over

    def attributes(self) -> dict[str, AttributeValue]:
        """What a span says of it."""
        said: dict[str, AttributeValue] = {LENS_OP: self.op}
        if self.group is not None:
            said[LENS_GROUP] = str(self.group.group_name)
            ranks = dist.get_process_group_ranks(self.group)
            if self.peer is None:
                said[LENS_GROUP_RANKS] = ranks
            elif self.peer >= 0:
                said[LENS_PEER_RANK] = ranks[self.peer]
        if self.sequence is not None:
            said[LENS_SEQUENCE] = self.sequence
        if self.bytes:
            said[LENS_BYTES] = self.bytes
        return said


def byte_count(tensors: object) -> int:
    """Bytes of a tensor, or of all in a list of tensors or of lists of them."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    if isinstance(tensors, (list, tuple)):
        return byte_count(tensors[0]) if len(tensors) == 1 else sum(map(byte_count, tensors))
    return 0
