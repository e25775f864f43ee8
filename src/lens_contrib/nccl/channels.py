"""Who is at the other end of a send or receive, and the count of the messages between the two."""

from __future__ import annotations

import weakref
from typing import Final

from lens_contrib.nccl.messages import TensorMessage
from lens_contrib.nccl.transports import Mode, TensorTransport, auto_mode, transport_of
from lens_contrib.torch.process_groups import GroupFacts, group_facts, require_alive
from lens_core.channel import Channel
from lens_core.errors import MessageError, MissingExtraError, PeerRankError
from lens_core.sequence import SequenceChecker

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["RECEIVING", "SENDING", "PeerChannels", "peer_channels"]


class TensorChannel(Channel[TensorMessage]):
    """A channel of tensors."""

    __slots__ = ()
    transport: TensorTransport


class PeerChannels:
    """The channels to or from one peer: one a mode, with one count of messages.

    Attributes:
        rank: This process's global rank.
        peer: Global rank of the other end.
        group_peer: Its rank within the group.
        sequence: The count of the messages, whichever transport they take.
    """

    __slots__ = ("_channels", "group_peer", "peer", "rank", "sequence")

    def __init__(self, facts: GroupFacts, peer: int) -> None:
        self.rank = facts.rank
        self.peer = peer
        self.group_peer = facts.group_ranks[peer]
        self.sequence = SequenceChecker()
        self._channels: dict[Mode, TensorChannel] = {}

    def by(self, mode: Mode, tensor: torch.Tensor) -> TensorChannel:
        """The channel by which this tensor travels in a mode.

        Raises:
            MessageError: If there is no such mode.
        """
        if mode == "auto":
            mode = auto_mode(tensor)
        channel = self._channels.get(mode)
        if channel is None:
            channel = self._channels[mode] = TensorChannel(
                transport_of(mode),
                self.sequence,
                where=lambda: f"rank {self.rank} and rank {self.peer}",
            )
        return channel


#: What a caller names a channel by: global rank, rank within the group, tag, device type.
_Call = tuple[int | None, int | None, int, str]


class GroupChannels:
    """The channels of one group in one direction: by what they are, and by how calls name them."""

    __slots__ = ("by_call", "facts", "group", "known")

    def __init__(self, group: dist.ProcessGroup, all_groups: dict[int, GroupChannels]) -> None:
        self.facts = group_facts(group)
        key = id(group)
        self.group = weakref.ref(group, lambda _: all_groups.pop(key, None))
        self.known: dict[tuple[int, int], PeerChannels] = {}
        self.by_call: dict[_Call, PeerChannels] = {}


#: By ``id`` of the group, which is faster than a ``WeakKeyDictionary``; gone with the group.
SENDING: Final[dict[int, GroupChannels]] = {}
RECEIVING: Final[dict[int, GroupChannels]] = {}


def peer_channels(
    all_groups: dict[int, GroupChannels],
    group: dist.ProcessGroup,
    peer: int | None,
    group_peer: int | None,
    tag: int,
    tensor: torch.Tensor,
    *,
    is_default: bool = False,
) -> PeerChannels:
    """The channels to or from a peer, given by its global rank or by its rank within the group.

    Args:
        all_groups: :data:`SENDING` or :data:`RECEIVING`.
        group: The group.
        peer: The peer's global rank.
        group_peer: In place of it, its rank within the group.
        tag: Tag of the message.
        tensor: What is sent or received into.
        is_default: Whether the group is known to be the default one, and so to be alive.

    Raises:
        ProcessGroupError: If the group is destroyed.
        PeerRankError: If the peer is not in the group, or is given twice or not at all.
        MessageError: If the group does not move tensors of this device.
    """
    channels = all_groups.get(id(group))
    if channels is None or channels.group() is not group:
        channels = all_groups[id(group)] = GroupChannels(group, all_groups)
    elif not is_default:
        require_alive(group, channels.facts.rank)
    try:
        # Not device.type on the host: it makes two objects, which a message of 4 KB feels.
        call = (peer, group_peer, tag, "cpu" if tensor.is_cpu else tensor.device.type)
    except AttributeError:
        raise MessageError(f"expected a torch.Tensor, got {type(tensor).__name__}") from None
    known = channels.by_call.get(call)
    if known is None:
        facts = channels.facts
        rank = _peer_rank(facts, peer, group_peer, "dst" if all_groups is SENDING else "src")
        key = (rank, _match_tag(facts, tag, tensor))
        known = channels.known.setdefault(key, PeerChannels(facts, rank))
        channels.by_call[call] = known
    return known


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
