"""Who is at the other end, and which frame is due from there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final
from weakref import WeakKeyDictionary

from lens_contrib.torch_distributed.frames import arrived_frame, in_turn
from lens_contrib.torch_distributed.groups import GroupFacts, group_facts
from lens_core.errors import MessageError, MissingExtraError, PeerRankError
from lens_core.frame import BytesLike

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["Inlet", "Outlet", "inlet_from", "outlet_to"]


class Outlet:
    """The sending end of a channel.

    Attributes:
        peer: Global rank of the receiver.
        rank: This process's global rank.
        numbers: The next frame's sequence number, from 0.
    """

    __slots__ = ("numbers", "peer", "rank")

    def __init__(self, rank: int, peer: int) -> None:
        self.rank = rank
        self.peer = peer
        self.numbers: Iterator[int] = itertools.count()


class Inlet:
    """The receiving end of a channel.

    A receive takes its turn when it is posted, since that is when messages are matched, and reads
    its frame when it is waited for. After a frame out of turn, the count follows the sender's.

    Attributes:
        peer: Global rank of the sender.
        rank: This process's global rank.
        turns: The next receive's turn, from 0.
    """

    __slots__ = ("_ahead", "peer", "rank", "turns")

    def __init__(self, rank: int, peer: int) -> None:
        self.rank = rank
        self.peer = peer
        self.turns: Iterator[int] = itertools.count()
        self._ahead = 0

    def read(self, data: bytes | BytesLike, turn: int) -> dict[str, str] | None:
        """The carrier in a frame that arrived in this turn; ``None`` where there is none."""
        frame = arrived_frame(data, self._where)
        if frame is None:
            return None
        expected = turn + self._ahead
        if not in_turn(frame, expected, self._where):
            self._ahead += frame.sequence - expected
            return None
        return dict(frame.carrier) or None

    def _where(self) -> str:
        return f"rank {self.rank} receiving from rank {self.peer}"


class _GroupChannels:
    """The channels of one group, by peer and tag."""

    __slots__ = ("inlets", "outlets")

    def __init__(self) -> None:
        self.outlets: dict[tuple[int, int], Outlet] = {}
        self.inlets: dict[tuple[int, int], Inlet] = {}


_channels: Final[WeakKeyDictionary[dist.ProcessGroup, _GroupChannels]] = WeakKeyDictionary()


def outlet_to(
    group: dist.ProcessGroup,
    peer: int | None,
    group_peer: int | None,
    tag: int,
    tensor: torch.Tensor,
) -> Outlet:
    """The channel to a peer, given by its global rank or by its rank within the group.

    Raises:
        ProcessGroupError: If the group is destroyed.
        PeerRankError: If the peer is not in the group, or is given twice or not at all.
        MessageError: If the group does not move tensors of this device.
    """
    facts = group_facts(group)
    rank = _peer_rank(facts, peer, group_peer, "dst")
    key = (rank, _match_tag(facts, tag, tensor))
    outlets = _of(group).outlets
    return outlets.get(key) or outlets.setdefault(key, Outlet(facts.rank, rank))


def inlet_from(
    group: dist.ProcessGroup,
    peer: int | None,
    group_peer: int | None,
    tag: int,
    tensor: torch.Tensor,
) -> Inlet:
    """The channel from a peer, given by its global rank or by its rank within the group.

    Raises:
        ProcessGroupError: If the group is destroyed.
        PeerRankError: If the peer is not in the group, or is given twice or not at all.
        MessageError: If the group does not move tensors of this device.
    """
    facts = group_facts(group)
    rank = _peer_rank(facts, peer, group_peer, "src")
    key = (rank, _match_tag(facts, tag, tensor))
    inlets = _of(group).inlets
    return inlets.get(key) or inlets.setdefault(key, Inlet(facts.rank, rank))


def _of(group: dist.ProcessGroup) -> _GroupChannels:
    channels = _channels.get(group)
    return channels if channels is not None else _channels.setdefault(group, _GroupChannels())


def _match_tag(facts: GroupFacts, tag: int, tensor: torch.Tensor) -> int:
    device_type = tensor.device.type
    backend = facts.backends.get(device_type)
    if backend is None:
        raise MessageError(
            f"rank {facts.rank}: this group moves tensors on {' and '.join(facts.backends)} "
            f"({', '.join(facts.backends.values())}), and the tensor is on {device_type}; "
            "move it with .to(), or use another group"
        )
    # NCCL ignores tags: all messages between two ranks are one sequence.
    return 0 if backend == "nccl" else tag


def _peer_rank(facts: GroupFacts, peer: int | None, group_peer: int | None, name: str) -> int:
    """The peer's global rank, checked."""
    if peer is not None and group_peer is None and peer in facts.group_ranks:
        return peer
    if peer is not None and group_peer is not None:
        raise PeerRankError(facts.rank, peer, f"{name} and group_{name} are both given; give one")
    if peer is None and group_peer is None:
        raise PeerRankError(
            facts.rank,
            None,
            f"give {name}, or group_{name}; receiving from any source is not supported, since the "
            "frame of a paired message must come from the same rank",
        )
    members = list(facts.group_ranks)
    if group_peer is not None and group_peer in range(len(members)):
        return members[group_peer]
    raise PeerRankError(
        facts.rank,
        peer if peer is not None else group_peer,
        f"the group has the global ranks {members}"
        + ("" if peer is not None else f"; group_{name} counts from 0 to {len(members) - 1}"),
    )
