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
    elif group is not None:
        require_alive(member, channel.rank)
    if rank is not None and rank != channel.rank:
        channel.require_own_rank(rank)
    if group_src is None and src_rank in channel.group_ranks:
        source = channel.group_ranks[src_rank]
    else:
        source = channel.source(src_rank, group_src)
    return channel.broadcast(member, source, step)


class _Channel:
    """One group's broadcasts: the buffer, and how many there were."""

    __slots__ = (
        "_buffer",
        "_calls",
        "_device_type",
        "_group_rank",
        "_members",
        "_options",
        "_source",
        "_turns",
        "_view",
        "group_ranks",
        "rank",
    )

    def __init__(self, facts: GroupFacts) -> None:
        self.rank = facts.rank
        self.group_ranks = facts.group_ranks
        self._members = facts.members
        self._group_rank = facts.group_ranks[facts.rank]
        self._device_type = facts.frame_device_type()
        self._buffer, self._view = host_buffer(BROADCAST_CAPACITY)
        self._options: dict[int, dist.BroadcastOptions] = {}
        self._calls = 0
        self._source = 0
        self._turns = Turns(self._where)

    def source(self, src_rank: int, group_src: int | None) -> int:
        """The source's rank within the group, checked."""
        if group_src is None:
            raise SourceRankError(
                src_rank,
                f"rank {self.rank} asks in a group of the global ranks {self._members}; "
                "name one of them, or use group_src",
            )
        if src_rank != 0:
            raise SourceRankError(src_rank, f"group_src={group_src} is given too; give one of them")
        if group_src not in range(len(self._members)):
            raise SourceRankError(
                group_src,
                f"rank {self.rank} asks in a group of {len(self._members)} ranks; "
                "group_src counts within the group, from 0",
            )
        return group_src

    def require_own_rank(self, rank: int) -> None:
        """Refuse a rank that is neither the global rank nor that within the group."""
        if rank != self._group_rank:
            raise ProcessGroupError(
                self.rank, f"was called with rank={rank}; pass this process's own rank"
            )

    def broadcast(
        self, group: dist.ProcessGroup, source: int, step: int | None
    ) -> dict[str, str] | None:
        """Send or receive one frame; the source is a rank within the group.

        The group's own broadcast, not ``dist.broadcast``: with cold caches its checks, which were
        made here, cost as much as all else that is done here (``benchmarks/bench_broadcast.py``).
        """
        number = (self._calls + self._turns.ahead if step is None else step) & MAX_SEQUENCE
        self._source = source
        on_host = self._device_type == "cpu"
        if source != self._group_rank:
            if on_host:
                # A shorter message of somebody else would leave the last frame's end in place.
                self._view[:] = _ZEROS
                group.broadcast([self._buffer], self._options_for(source)).wait()
                raw = bytes(self._view)
            else:
                raw = self._receive_on_device(group, source)
            carrier = self._turns.read(raw, number, step is None)
        else:
            raw = outgoing_frame(BROADCAST_CAPACITY, number, True)
            if on_host:
                self._view[:] = raw
                buffer = self._buffer
            else:
                buffer = frame_tensor(raw, current_device(self._device_type))
            work = group.broadcast([buffer], self._options_for(source))
            # Read while it is on its way: what the others get, less what did not fit.
            carrier = self._turns.read(raw, number)
            work.wait()
            if carrier is None:
                self._report_no_span()
        # Counted once the collective has returned, on every rank alike.
        self._calls += 1
        return carrier

    def _options_for(self, source: int) -> dist.BroadcastOptions:
        options = self._options.get(source)
        if options is None:
            options = self._options[source] = dist.BroadcastOptions()
            options.rootRank = source
            options.rootTensor = 0
        return options

    def _receive_on_device(self, group: dist.ProcessGroup, source: int) -> bytes:
        device = current_device(self._device_type)
        buffer = torch.zeros(BROADCAST_CAPACITY, dtype=torch.uint8, device=device)
        group.broadcast([buffer], self._options_for(source)).wait()
        return tensor_bytes(buffer)

    def _report_no_span(self) -> None:
        incidents.record(
            "broadcast.no_span",
            f"rank {self.rank} is the source of broadcast_trace_context and has no span",
            todo="Call it inside a span on the source rank, so that there is one to share.",
        )

    def _where(self) -> str:
        return f"broadcast from rank {self._members[self._source]} to rank {self.rank}"


_channels: Final[WeakKeyDictionary[dist.ProcessGroup, _Channel]] = WeakKeyDictionary()
