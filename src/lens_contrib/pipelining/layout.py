"""Which stages there are, on which ranks, and what hops between them are called."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from opentelemetry.util.types import AttributeValue

from lens_contrib.pipelining.compat import PipelineStage
from lens_core.errors import MissingExtraError
from lens_core.identity import Identity
from lens_core.semconv import (
    LENS_CHUNK,
    LENS_HOP_DIRECTION,
    LENS_MICROBATCH,
    LENS_PEER_STAGE,
)

try:
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["Layout", "current_layout", "members_of", "pipeline_key"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of all stages of one pipeline; the same on all of its ranks.

    Attributes:
        rank_of: Global rank of each stage.
        chunk_of: For each stage, how many earlier stages its rank holds.
    """

    rank_of: tuple[int, ...]
    chunk_of: tuple[int, ...]
    _attributes: dict[tuple[str, int], dict[str, AttributeValue]] = field(
        default_factory=dict, compare=False
    )

    def is_on(self, stage: int, rank: int) -> bool:
        """Whether there is such a stage, and it is on this global rank."""
        return 0 <= stage < len(self.rank_of) and self.rank_of[stage] == rank

    def link_attributes(
        self, identity: Identity, source: int, microbatch: int, direction: str
    ) -> dict[str, AttributeValue]:
        """Attributes of a link to the span that a stage sent under."""
        known = self._attributes.get((direction, source))
        if known is None:
            mesh = identity.mesh
            known = {} if mesh is None else identity.peer_attributes(self.rank_of[source])
            known[LENS_PEER_STAGE] = source
            known[LENS_CHUNK] = self.chunk_of[source]
            known[LENS_HOP_DIRECTION] = direction
            self._attributes[direction, source] = known
        return {**known, LENS_MICROBATCH: microbatch}


def current_layout(stage: PipelineStage, known: Layout | None = None) -> Layout:
    """The layout of the pipeline that a stage belongs to, as it is now.

    A schedule may move stages to other ranks after it was made, as loading it from a CSV file does.

    Args:
        stage: Any stage of the pipeline.
        known: The last one, given back where nothing has changed.
    """
    ranks = members_of(stage)
    group_ranks = [stage.stage_index_to_group_rank[index] for index in range(stage.num_stages)]
    rank_of = tuple(ranks[rank] for rank in group_ranks)
    if known is not None and known.rank_of == rank_of:
        return known
    chunks = tuple(group_ranks[:index].count(rank) for index, rank in enumerate(group_ranks))
    return Layout(rank_of, chunks)


def members_of(stage: PipelineStage) -> tuple[int, ...]:
    """The global ranks of a stage's group, in the order of the group: alike on all of them."""
    group = dist.group.WORLD if stage.group is None else stage.group
    return tuple(dist.get_process_group_ranks(group))


def pipeline_key(name: str, members: tuple[int, ...]) -> str:
    """What tells a pipeline from all others, and is known to each of its ranks.

    The members are part of it: replicas of one pipeline share the name, and a rank may be in
    several groups.
    """
    return f"{name}@{hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()}"
