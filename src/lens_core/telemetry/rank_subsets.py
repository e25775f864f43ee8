"""Which ranks export: rules that every rank can evaluate by itself, the same in every run.

For ``config.enabled = config.enabled and last_rank(rank, world_size)`` and the like. A rule never
decides whether a rank takes part in a collective.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["covers_topology", "every_nth_rank", "last_rank", "one_rank_per_node"]


def last_rank(rank: int, world_size: int) -> bool:
    """Whether this is the last rank: one view of the job, from the last pipeline stage."""
    return rank == world_size - 1


def every_nth_rank(rank: int, n: int) -> bool:
    """Whether the rank is a multiple of ``n``.

    Raises:
        ValueError: ``n`` is not positive.
    """
    if n < 1:
        raise ValueError(f"every n-th rank needs n >= 1, not {n}")
    return rank % n == 0


def one_rank_per_node(
    local_rank: int | None = None, *, environ: Mapping[str, str] | None = None
) -> bool:
    """Whether this is the first rank of its machine.

    Args:
        local_rank: Rank on the machine; from ``LOCAL_RANK`` or ``SLURM_LOCALID`` if not given.
        environ: The environment; that of the process if not given.
    """
    if local_rank is not None:
        return local_rank == 0
    source = os.environ if environ is None else environ
    text = source.get("LOCAL_RANK") or source.get("SLURM_LOCALID") or "0"
    return text.strip() == "0"


def covers_topology(rank: int, *, tensor: int = 1, data: int = 1, pipeline: int = 1) -> bool:
    """Whether the rank is of a small subset with a member in every parallel group.

    Each pipeline stage, each tensor-parallel group and each data-parallel group has at least one
    member; per stage, ``max(tensor, data)`` ranks are chosen, the least that can be. Ranks are laid
    out as Megatron and torch's device meshes do: tensor varies fastest, then data, then pipeline.

    Args:
        rank: Global rank.
        tensor: Size of tensor parallelism.
        data: Size of data parallelism.
        pipeline: Number of pipeline stages.

    Raises:
        ValueError: the rank is not below the product of the sizes.
    """
    if not 0 <= rank < tensor * data * pipeline:
        raise ValueError(f"rank {rank} is not in a world of {tensor} x {data} x {pipeline}")
    tensor_rank = rank % tensor
    data_rank = rank // tensor % data
    # A diagonal meets every row and every column of the tensor x data grid.
    if tensor >= data:
        return tensor_rank % data == data_rank
    return data_rank % tensor == tensor_rank
