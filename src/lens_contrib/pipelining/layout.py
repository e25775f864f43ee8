"""Which stages there are, on which ranks, and what hops between them are called."""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.util.types import AttributeValue

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
    from torch.distributed.pipelining.stage import _PipelineStageBase
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["Layout", "layout_of"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of all stages of one pipeline; the same on all of its ranks.

    Attributes:
        rank_of: Global rank of each stage.
        chunk_of: For each stage, how many earlier stages its rank holds.
        first_rank: Global rank of the first member of the group: no other pipeline has it, so it
            tells the pipelines of data-parallel replicas apart.
    """

    rank_of: tuple[int, ...]
    chunk_of: tuple[int, ...]
    first_rank: int
    _attributes: dict[tuple[str, int], dict[str, AttributeValue]] = field(
        default_factory=dict, compare=False
    )

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


def layout_of(stage: _PipelineStageBase) -> Layout:
    """The layout of the pipeline that a stage belongs to."""
    group = dist.group.WORLD if stage.group is None else stage.group
    ranks = dist.get_process_group_ranks(group)
    group_ranks = [stage.stage_index_to_group_rank[index] for index in range(stage.num_stages)]
    chunks = tuple(group_ranks[:index].count(rank) for index, rank in enumerate(group_ranks))
    return Layout(tuple(ranks[rank] for rank in group_ranks), chunks, ranks[0])
