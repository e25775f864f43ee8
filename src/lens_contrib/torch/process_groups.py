"""What a call needs to know about a process group, asked before any message is sent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lens_contrib.torch.compat import default_group
from lens_core.errors import MissingExtraError, ProcessGroupError
from lens_core.whole_number import whole_number

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["GroupFacts", "current_device", "group_facts", "member_group", "require_alive"]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What does not change while a group lives.

    Attributes:
        rank: This process's global rank.
        group_ranks: Global rank to rank within the group, of every member, in the group's order.
        backends: Device type to the name of the back end that moves its tensors.
    """

    rank: int
    group_ranks: Mapping[int, int]
    backends: Mapping[str, str]

    @property
    def members(self) -> list[int]:
        """The global ranks of the members, in the group's order."""
        return list(self.group_ranks)

    def frame_device_type(self) -> str:
        """Where a collective's frame must be for this group.

        The host wherever the group moves host tensors: it costs no device synchronization.
        """
        return "cpu" if "cpu" in self.backends else next(iter(self.backends))


def member_group(group: dist.ProcessGroup | int | None) -> dist.ProcessGroup | None:
    """The group itself, or the default one; ``None`` where this process is in no such group."""
    if group is None:
        return default_group()
    # new_group() returns a marker, which is an int, on the ranks that it leaves out.
    return None if isinstance(group, int) else group


def group_facts(group: dist.ProcessGroup) -> GroupFacts:
    """What is known about a group that this process is a member of.

    Raises:
        ProcessGroupError: If the group is destroyed, or is none of ``torch.distributed``.
    """
    try:
        ranks = dist.get_process_group_ranks(group)
        config: str = dist.get_backend_config(group)
        backends = dict(pair.split(":", 1) for pair in config.split(","))
        return GroupFacts(
            dist.get_rank(), {rank: position for position, rank in enumerate(ranks)}, backends
        )
    except (ValueError, KeyError, TypeError, RuntimeError):
        raise _dead() from None


def require_alive(group: dist.ProcessGroup, rank: int) -> None:
    """Refuse a group that was destroyed since :func:`group_facts` was asked about it.

    Raises:
        ProcessGroupError: If it was.
    """
    if group is dist.group.WORLD:
        return
    try:
        dist.get_group_rank(group, rank)
    except (ValueError, RuntimeError):
        raise _dead() from None


def current_device(device_type: str) -> torch.device:
    """The device of this type that is current in this process."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _dead() -> ProcessGroupError:
    rank: int | None = None
    if dist.is_initialized():
        rank = dist.get_rank()
    else:
        rank = whole_number(os.environ.get("RANK", ""))
    return ProcessGroupError(
        rank, "the process group is destroyed, or was not made by torch.distributed"
    )
