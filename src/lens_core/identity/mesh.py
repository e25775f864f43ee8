"""Where a rank sits in a multi-dimensional job: its coordinate along dp, pp, tp, cp, ep."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from opentelemetry.util.types import AttributeValue

from lens_core import semconv
from lens_core.errors import ConfigError

__all__ = ["MeshCoordinates"]

_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "dp": (semconv.DL_DATA_PARALLEL_RANK, semconv.DL_DATA_PARALLEL_SIZE),
    "tp": (semconv.DL_TENSOR_PARALLEL_RANK, semconv.DL_TENSOR_PARALLEL_SIZE),
    "pp": (semconv.DL_PIPELINE_PARALLEL_RANK, semconv.DL_PIPELINE_PARALLEL_SIZE),
    "cp": (semconv.DL_CONTEXT_PARALLEL_RANK, semconv.DL_CONTEXT_PARALLEL_SIZE),
    "ep": (semconv.DL_EXPERT_PARALLEL_RANK, semconv.DL_EXPERT_PARALLEL_SIZE),
}


class MeshCoordinates:
    """Coordinates of every rank of a mesh.

    Args:
        sizes: Size of each dimension by name, outermost first, such as ``{"pp": 4, "dp": 8}``.
        ranks: Global ranks in row-major order of the mesh; ``0, 1, 2, ...`` if not given.

    Raises:
        ConfigError: If a size is not an integer from 1, a name is not a string, or the ranks are
            not integers from 0, not as many as the mesh has places, or one comes twice.
    """

    def __init__(self, sizes: Mapping[str, int], ranks: Iterable[int] | None = None) -> None:
        self.sizes: Final = _sizes(sizes)
        places = math.prod(self.sizes.values())
        order: Sequence[int] = range(places) if ranks is None else _ranks(ranks)
        if len(order) != places or len(set(order)) != places:
            raise ConfigError("ranks", list(order), f"{places} different ranks")
        self._place = {rank: place for place, rank in enumerate(order)}

    def of(self, rank: int) -> dict[str, int]:
        """The rank's coordinate in each dimension; empty for a rank outside the mesh."""
        place = self._place.get(rank)
        if place is None:
            return {}
        coordinates: dict[str, int] = {}
        for name, size in reversed(self.sizes.items()):
            place, coordinates[name] = divmod(place, size)
        return {name: coordinates[name] for name in self.sizes}

    def resource_attributes(self, rank: int) -> dict[str, AttributeValue]:
        """The rank's coordinates and the sizes, for ``setup_telemetry(resource_attributes=...)``.

        Named ``dl.data_parallel.rank`` and so on; a dimension ``x`` that has no such name becomes
        ``dl.x.rank``.
        """
        attributes: dict[str, AttributeValue] = {}
        for name, coordinate in self.of(rank).items():
            rank_name, size_name = _NAMES.get(name, (f"dl.{name}.rank", f"dl.{name}.size"))
            attributes[rank_name] = coordinate
            attributes[size_name] = self.sizes[name]
        return attributes

    def link_attributes(self, peer: int) -> dict[str, AttributeValue]:
        """The peer's coordinates for a link: ``lens.peer.pp``, ``lens.peer.dp``, ..."""
        return {f"lens.peer.{name}": value for name, value in self.of(peer).items()}


def _sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    allowed = 'the size of each dimension by name, integers from 1, such as {"pp": 4, "dp": 8}'
    if not isinstance(sizes, Mapping) or not all(isinstance(name, str) for name in sizes):
        raise ConfigError("sizes", sizes, allowed)
    try:
        plain = {name: int(operator.index(size)) for name, size in sizes.items()}
    except TypeError:
        raise ConfigError("sizes", dict(sizes), allowed) from None
    if any(size < 1 for size in plain.values()):
        raise ConfigError("sizes", dict(sizes), allowed)
    return plain


def _ranks(ranks: Iterable[int]) -> list[int]:
    """As plain integers: those of a tensor are equal to no other, and found in no mapping."""
    allowed = "global ranks, integers from 0, such as mesh.flatten().tolist()"
    try:
        plain = [int(operator.index(rank)) for rank in ranks]
    except TypeError:
        raise ConfigError("ranks", ranks, allowed) from None
    if any(rank < 0 for rank in plain):
        raise ConfigError("ranks", plain, allowed)
    return plain
