"""Who is at the other end, and which frame is due from there."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Final

from lens_contrib.torch.frames import MAX_SEQUENCE, Turns
from lens_contrib.torch.process_groups import GroupFacts, group_facts, require_alive
from lens_core.errors import MessageError, MissingExtraError, PeerRankError

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["Inlet", "Outlet", "inlet_from", "outlet_to"]


class Outlet:
    """The sending end of a channel.

    Attributes:
        rank: This process's global rank.
        peer: Global rank of the receiver.
        group_peer: Its rank within the group.
        numbers: The next frame's sequence number, from 0.
    """

    __slots__ = ("group_peer", "numbers", "peer", "rank")

    def __init__(self, facts: GroupFacts, peer: int) -> None:
        self.rank = facts.rank
        self.peer = peer
        self.group_peer = facts.group_ranks[peer]
        self.numbers: Iterator[int] = itertools.count()


class Inlet(Turns):
    """The receiving end of a channel.

    A receive takes its turn when it is posted, since that is when messages are matched, and reads
    its frame when it is waited for.

    Attributes:
        rank: This process's global rank.
        peer: Global rank of the sender.
        group_peer: Its rank within the group.
        turns: The next receive's turn, from 0.
    """

    __slots__ = ("group_peer", "peer", "rank", "turns")

    def __init__(self, facts: GroupFacts, peer: int) -> None:
        super().__init__(lambda: f"rank {facts.rank} receiving from rank {peer}")
        self.rank = facts.rank
        self.peer = peer
        self.group_peer = facts.group_ranks[peer]
        self.turns: Iterator[int] = itertools.count()

    def carrier(self, raw: bytes | memoryview, turn: int) -> dict[str, str] | None:
        """The carrier in the frame that arrived in this turn; ``None`` where there is none."""
        return self.read(raw, (turn + self.ahead) & MAX_SEQUENCE)


#: What a caller names a channel by: global rank, rank within the group, tag, device type.
_Call = tuple[int | None, int | None, int, str]


class _GroupChannels:
    """The channels of one group: by what they are, and by how calls name them."""

    __slots__ = ("facts", "group", "inlets", "inlets_by_call", "outlets", "outlets_by_call")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.facts = group_facts(group)
        key = id(group)
        self.group = weakref.ref(group, lambda _: _by_group.pop(key, None))
        self.outlets: dict[tuple[int, int], Outlet] = {}
        self.inlets: dict[tuple[int, int], Inlet] = {}
        self.outlets_by_call: dict[_Call, Outlet] = {}
        self.inlets_by_call: dict[_Call, Inlet] = {}


#: By ``id`` of the group, which is faster than a ``WeakKeyDictionary``; gone with the group.
_by_group: Final[dict[int, _GroupChannels]] = {}


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
    channels = _of(group)
    try:
        call = (peer, group_peer, tag, tensor.device.type)
    except AttributeError:
        raise _not_a_tensor(tensor) from None
    known = channels.outlets_by_call.get(call)
    if known is None:
        facts = channels.facts
        rank = _peer_rank(facts, peer, group_peer, "dst")
        key = (rank, _match_tag(facts, tag, tensor))
        known = channels.outlets.setdefault(key, Outlet(facts, rank))
        channels.outlets_by_call[call] = known
    return known


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
    channels = _of(group)
    try:
        call = (peer, group_peer, tag, tensor.device.type)
    except AttributeError:
        raise _not_a_tensor(tensor) from None
    known = channels.inlets_by_call.get(call)
    if known is None:
        facts = channels.facts
        rank = _peer_rank(facts, peer, group_peer, "src")
        key = (rank, _match_tag(facts, tag, tensor))
        known = channels.inlets.setdefault(key, Inlet(facts, rank))
        channels.inlets_by_call[call] = known
    return known


def _of(group: dist.ProcessGroup) -> _GroupChannels:
    channels = _by_group.get(id(group))
    if channels is None or channels.group() is not group:
        channels = _by_group[id(group)] = _GroupChannels(group)
    elif group is not dist.group.WORLD:
        require_alive(group, channels.facts.rank)
    return channels


def _not_a_tensor(message: object) -> MessageError:
    return MessageError(f"expected a torch.Tensor, got {type(message).__name__}")


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
    members = facts.members
    if group_peer is not None and group_peer in range(len(members)):
        return members[group_peer]
    raise PeerRankError(
        facts.rank,
        peer if peer is not None else group_peer,
        f"the group has the global ranks {members}"
        + ("" if peer is not None else f"; group_{name} counts from 0 to {len(members) - 1}"),
    )
