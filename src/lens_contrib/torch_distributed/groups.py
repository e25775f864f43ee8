"""What a call needs to know about a process group, asked before any message is sent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from lens_core.errors import MissingExtraError, ProcessGroupError, SourceRankError

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["GroupFacts", "group_facts", "member_group", "source_of"]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What does not change while a group lives.

    Attributes:
        rank: This process's global rank.
        group_ranks: Global rank to rank within the group, of every member.
        backends: Device type to the name of the back end that moves its tensors.
    """

    rank: int
    group_ranks: Mapping[int, int]
    backends: Mapping[str, str]

    def tags_matter(self, device_type: str) -> bool:
        """Whether messages match by tag. NCCL ignores tags: there they match in order alone."""
        return self.backends.get(device_type) != "nccl"

    def frame_device(self) -> torch.device:
        """Where a collective's frame must be for this group.

        The host wherever the group moves host tensors: it costs no device synchronization.
        """
        if "cpu" in self.backends:
            return torch.device("cpu")
        device_type = next(iter(self.backends))
        return torch.device(device_type, torch.get_device_module(device_type).current_device())


_facts: Final[WeakKeyDictionary[dist.ProcessGroup, GroupFacts]] = WeakKeyDictionary()


def member_group(group: dist.ProcessGroup | int | None) -> dist.ProcessGroup | None:
    """The group itself, or the default one; ``None`` where this process is in no such group."""
    if group is None:
        default: dist.ProcessGroup | None = dist.group.WORLD
        return default
    # new_group() returns this marker, an int, on the ranks that it leaves out.
    return None if isinstance(group, int) else group


def group_facts(group: dist.ProcessGroup) -> GroupFacts:
    """What is known about a group that this process is a member of.

    Raises:
        ProcessGroupError: If the group is destroyed, or is none of ``torch.distributed``.
    """
    known = _facts.get(group)
    try:
        if known is None:
            known = _facts[group] = _ask(group)
        else:
            dist.get_group_rank(group, known.rank)  # raises once the group is destroyed
    except (ValueError, KeyError, TypeError, RuntimeError):
        raise ProcessGroupError(
            _own_rank(), "the process group is destroyed, or was not made by torch.distributed"
        ) from None
    return known


def source_of(facts: GroupFacts, src_rank: int, group_src: int | None) -> int:
    """The global rank that is the source, checked.

    Args:
        facts: The group.
        src_rank: Global rank, used where ``group_src`` is not given.
        group_src: Rank within the group.

    Raises:
        SourceRankError: If the source is not a member of the group, or is given twice.
    """
    if group_src is None and src_rank in facts.group_ranks:
        return src_rank
    members = list(facts.group_ranks)  # in the order of the group
    if group_src is not None:
        if src_rank != 0:
            raise SourceRankError(src_rank, f"group_src={group_src} is given too; give one of them")
        if group_src not in range(len(members)):
            raise SourceRankError(
                group_src, f"group_src counts within the group, from 0 to {len(members) - 1}"
            )
        return members[group_src]
    raise SourceRankError(
        src_rank,
        f"on rank {facts.rank}: the group has the global ranks {members}; "
        "name one of them, or use group_src",
    )


def _ask(group: dist.ProcessGroup) -> GroupFacts:
    ranks = dist.get_process_group_ranks(group)
    config: str = dist.get_backend_config(group)
    backends = dict(pair.split(":", 1) for pair in config.split(","))
    return GroupFacts(
        dist.get_rank(), {rank: position for position, rank in enumerate(ranks)}, backends
    )


def _own_rank() -> int | None:
    """This process's global rank, for messages; ``None`` where nobody can tell."""
    if dist.is_initialized():
        rank: int = dist.get_rank()
        return rank
    declared = os.environ.get("RANK", "")
    return int(declared) if declared.isdecimal() else None
