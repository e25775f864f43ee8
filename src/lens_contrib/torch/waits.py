"""A span around an operation that waits for other ranks, so that a hang can be explained.

``lens hang`` reads from such a span who is waited for. It is local: no message, no collective.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Span, Tracer
from opentelemetry.util.types import AttributeValue

from lens_contrib.torch.process_groups import group_facts, member_group
from lens_core.compiling import is_compiling
from lens_core.errors import MissingExtraError
from lens_core.links import linked_span
from lens_core.semconv import (
    LENS_GROUP,
    LENS_GROUP_RANKS,
    LENS_MICROBATCH,
    LENS_OP,
    LENS_PEER_RANK,
    LENS_SEQUENCE,
)
from lens_core.spans.switch import span_groups

try:
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["waiting"]

_SCOPE: Final = "lens_contrib.torch_distributed"


class _Counts:
    """How many operations of each kind this process has begun."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int | None], itertools.count[int]] = {}

    def next(self, group: str, op: str, peer: int | None) -> int:
        # All collectives of a group count together: ranks that are in different ones then agree on
        # the number and differ in the name, or the other way round.
        kind = "" if peer is None else op
        return next(self._counts.setdefault((group, kind, peer), itertools.count()))


_counts: Final = _Counts()


@contextmanager
def waiting(
    op: str,
    *,
    peer: int | None = None,
    group: dist.ProcessGroup | None = None,
    microbatch: int | None = None,
    name: str = "",
    tracer: Tracer | None = None,
) -> Iterator[Span]:
    """An open span that says what the block waits for.

    ::

        with waiting("all_reduce", group=group):
            dist.all_reduce(tensor, group=group)

    Every rank of the group must count alike: wrap all collectives of a group, or on all ranks the
    same ones.

    Args:
        op: The operation, by torch's name for it: ``all_reduce``, ``send``, ``recv``, ...
        peer: Global rank at the other end, of a send or receive.
        group: Process group; the default one if not given.
        microbatch: Microbatch that a send or receive carries.
        name: Name of the span; that of the operation if not given.
        tracer: Tracer for the span; one of the global provider if not given.

    Yields:
        The span. An exception of the block is recorded on it and propagates.
    """
    if "communication" in span_groups.removed or is_compiling():
        yield trace.INVALID_SPAN
        return
    attributes: dict[str, AttributeValue] = {LENS_OP: op}
    member = member_group(group)
    if member is not None:
        attributes[LENS_GROUP] = str(getattr(member, "group_name", ""))
        if peer is None:
            attributes[LENS_GROUP_RANKS] = group_facts(member).members
    if peer is not None:
        attributes[LENS_PEER_RANK] = peer
    if microbatch is not None:
        attributes[LENS_MICROBATCH] = microbatch
    attributes[LENS_SEQUENCE] = _counts.next(str(attributes.get(LENS_GROUP, "")), op, peer)
    used = trace.get_tracer(_SCOPE) if tracer is None else tracer
    with linked_span(used, name or op, span_attributes=attributes) as span:
        yield span
