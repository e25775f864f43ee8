"""The private names of torch that the adapters use, behind one self-test."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Final

from lens_core.errors import MissingExtraError
from lens_core.private_names import PrivateNames, missing_names

try:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["PRIVATE_NAMES", "check_private_names", "default_group", "handed_to_this_thread"]


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


def handed_to_this_thread(key: str) -> object:
    """What the caller of ``backward()`` handed to torch's own threads; ``None`` if nothing."""
    try:
        return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None
    except (AttributeError, RuntimeError):  # not in every release; a public way is only proposed
        return None


PRIVATE_NAMES: Final = (
    PrivateNames(
        "_is_key_in_tls _get_obj_in_tls",
        lambda: torch._C,
        "backward_context() finds no caller on threads of autograd",
    ),
    PrivateNames(
        "_default_pg",
        lambda: distributed_c10d._world,
        "the default group is asked for in the public way, which is right and a little slower",
    ),
)
check_private_names: Final = functools.partial(missing_names, PRIVATE_NAMES)
