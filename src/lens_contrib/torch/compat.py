"""The private names of torch that the adapters use, behind one self-test."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Final

from lens_core.errors import MissingExtraError

try:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["check_private_names", "default_group"]


def _public_default_group() -> dist.ProcessGroup | None:
    group: dist.ProcessGroup | None = dist.group.WORLD
    return group


def _default_group() -> Callable[[], dist.ProcessGroup | None]:
    world = getattr(distributed_c10d, "_world", None)
    if not hasattr(world, "_default_pg"):
        return _public_default_group
    return functools.partial(operator.attrgetter("_default_pg"), world)


#: The default group; ``dist.group.WORLD`` enters two functions for it, which a broadcast feels.
default_group: Final = _default_group()


def check_private_names() -> list[str]:
    """What is missing of the private names, and what stops working without it; empty if none."""
    if default_group is _public_default_group:
        return [
            "torch.distributed.distributed_c10d._world._default_pg: the default group is asked for "
            "in the public way, which is right and a little slower"
        ]
    return []
