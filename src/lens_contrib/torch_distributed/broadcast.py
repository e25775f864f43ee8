"""One rank's trace context on all ranks, by one broadcast of one frame."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from lens_contrib.torch_distributed.frames import MAX_SEQUENCE, Turns, outgoing_frame
from lens_contrib.torch_distributed.groups import (
    GroupFacts,
    current_device,
    group_facts,
    member_group,
    require_alive,
)
from lens_contrib.torch_distributed.tensors import frame_tensor, host_buffer, tensor_bytes
from lens_core.errors import MissingExtraError, ProcessGroupError, SourceRankError
from lens_core.frame import BROADCAST_CAPACITY
from lens_core.incidents import incidents

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["broadcast_trace_context"]

_ZEROS: Final = bytes(BROADCAST_CAPACITY)


def broadcast_trace_context(
    rank: int | None = None,
    src_rank: int = 0,
    *,
    group: dist.ProcessGroup | None = None,
    group_src: int | None = None,
    step: int | None = None,
) -> dict[str, str] | None:
    """The source's trace context as a carrier, on every rank of the group.

    *Collective.* Every rank of the group must call it, the same number of times, with the same
    source, in the same order among the group's other collectives, and from one thread at a time:
    two threads that use one group at once cross their messages. If a rank does not call, the others
    wait for the whole timeout of the group and the group is unusable after it. So gate the call
    only on what is the same on every rank (``config.enabled``), never on what differs, such as
    ``handle.is_exporting``. Whether this rank traces, samples or exports changes nothing about the
    call: every rank sends or receives one frame of 1,024 bytes in one broadcast, always.

    Call it inside a span of the source. An unsampled span's context is sent as well, so that the
    other ranks can decide alike. Where the source has no span, it says so once in its log.

    The frame is on the host wherever the group can move host tensors (gloo, or
    ``cpu:gloo,cuda:nccl``). On a group of NCCL alone it is on the current device: the source does
    not wait for the device, the other ranks wait for the current stream once, to read the frame;
    do not call it while a CUDA graph is captured.

    Args:
        rank: This process's rank, as a check: its global rank, or its rank within ``group``.
        src_rank: Global rank of the source.
        group: Process group; the default one if not given.
        group_src: Rank of the source within ``group``, in place of ``src_rank``.
        step: Number that all ranks agree on and that is new in every call, such as the training
            step. Where a rank skipped a call, the frames that reach it from
            then on belong to an earlier step; with ``step`` this is noticed, reported, and the
            context dropped. Without it calls are counted, which finds messages of others that took
            a frame's place, but not a skipped call: a skipped broadcast is delivered to the next
            one.

    Returns:
        A new carrier; ``None`` on every rank where the source had no span, and on a rank that has
        no torch or no process group, or is not in ``group``. Also ``None`` on a rank where what
        arrived was no intact frame, or not the one that was due: both are counted
        (``carrier.rejected``, ``carrier.out_of_turn``) and reported once.

    Raises:
        SourceRankError: If the source is not in the group. Raised before any message is sent, on
            every rank that passed the same arguments.
        ProcessGroupError: If the group is destroyed, or ``rank`` is not this process's rank.
            Raised before any message is sent.
        Exception: Whatever the collective itself raises (timeout, lost peer): it propagates, since
            a rank that swallowed it would be out of step with the others.
    """
    if not dist.is_available():
        return None
    member = member_group(group)
    if member is None:
        return None
    channel = _channels.get(member)
    if channel is None:
        channel = _channels[member] = _Channel(group_facts(member))
    else:
        require_alive(member, channel.facts.rank)
    if rank is not None and rank != channel.facts.rank:
        channel.require_own_rank(rank)
    source = channel.source(src_rank, group_src)
    return channel.broadcast(member, source, step)


class _Channel:
    """One group's broadcasts: the buffer, and how many there were."""

    __slots__ = (
        "_buffer",
        "_calls",
        "_device_type",
        "_source",
        "_turns",
        "_view",
        "facts",
    )

    def __init__(self, facts: GroupFacts) -> None:
        self.facts = facts
        self._device_type = facts.frame_device_type()
        self._buffer, self._view = host_buffer(BROADCAST_CAPACITY)
        self._calls = 0
        self._source = 0
        self._turns = Turns(self._where)

    def source(self, src_rank: int, group_src: int | None) -> int:
        """The source's global rank, checked."""
        if group_src is None:
            if src_rank in self.facts.group_ranks:
                return src_rank
            raise SourceRankError(
                src_rank,
                f"rank {self.facts.rank} asks in a group of the global ranks {self.facts.members}; "
                "name one of them, or use group_src",
            )
        if src_rank != 0:
            raise SourceRankError(src_rank, f"group_src={group_src} is given too; give one of them")
        if group_src not in range(len(self.facts.group_ranks)):
            raise SourceRankError(
                group_src,
                f"rank {self.facts.rank} asks in a group of {len(self.facts.group_ranks)} ranks; "
                "group_src counts within the group, from 0",
            )
        return self.facts.members[group_src]

    def require_own_rank(self, rank: int) -> None:
        """Refuse a rank that is neither the global rank nor that within the group."""
        if rank != self.facts.group_ranks[self.facts.rank]:
            raise ProcessGroupError(
                self.facts.rank, f"was called with rank={rank}; pass this process's own rank"
            )

    def broadcast(
        self, group: dist.ProcessGroup, source: int, step: int | None
    ) -> dict[str, str] | None:
        """Send or receive one frame."""
        due = self._turns.due(self._calls) if step is None else step & MAX_SEQUENCE
        self._source = source
        if source == self.facts.rank:
            raw = outgoing_frame(BROADCAST_CAPACITY, due, span_required=True)
            self._send(raw, source, group)
        else:
            raw = self._receive(source, group)
        # Counted once the collective has returned, on every rank alike.
        self._calls += 1
        carrier = self._turns.read(raw, due, follow=step is None)
        if carrier is None and source == self.facts.rank:
            incidents.record(
                "broadcast.no_span",
                f"rank {source} is the source of broadcast_trace_context and has no span to share",
                todo="Call it inside a span on the source rank.",
            )
        return carrier

    def _send(self, raw: bytes, source: int, group: dist.ProcessGroup) -> None:
        if self._device_type == "cpu":
            self._view[:] = raw
            dist.broadcast(self._buffer, source, group)
        else:
            device = current_device(self._device_type)
            dist.broadcast(frame_tensor(raw, device), source, group)

    def _receive(self, source: int, group: dist.ProcessGroup) -> bytes:
        if self._device_type == "cpu":
            # A shorter message of somebody else would leave the end of the last frame in place.
            self._view[:] = _ZEROS
            dist.broadcast(self._buffer, source, group)
            return bytes(self._view)
        device = current_device(self._device_type)
        buffer = torch.zeros(BROADCAST_CAPACITY, dtype=torch.uint8, device=device)
        dist.broadcast(buffer, source, group)
        return tensor_bytes(buffer)

    def _where(self) -> str:
        return f"broadcast from rank {self._source} to rank {self.facts.rank}"


_channels: Final[WeakKeyDictionary[dist.ProcessGroup, _Channel]] = WeakKeyDictionary()
