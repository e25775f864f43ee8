"""One rank's trace context on all ranks, by one broadcast of one frame."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from lens_contrib.torch_distributed.frames import arrived_frame, in_turn, outgoing_frame
from lens_contrib.torch_distributed.groups import (
    GroupFacts,
    group_facts,
    member_group,
    source_of,
)
from lens_contrib.torch_distributed.tensors import frame_tensor, host_buffer, tensor_bytes
from lens_core.errors import MissingExtraError, ProcessGroupError
from lens_core.frame import BROADCAST_CAPACITY, FrameFlags
from lens_core.incidents import incidents

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["broadcast_trace_context"]

_ZEROS: Final = bytes(BROADCAST_CAPACITY)


class _Channel:
    """What is kept for one group between calls: the buffer, and how many calls were made."""

    __slots__ = ("buffer", "calls", "view")

    def __init__(self) -> None:
        self.buffer, self.view = host_buffer(BROADCAST_CAPACITY)
        self.calls = 0


_channels: Final[WeakKeyDictionary[dist.ProcessGroup, _Channel]] = WeakKeyDictionary()


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
            step, from 0 to 2**64 - 1. Where a rank skipped a call, the frames that reach it from
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
    facts = group_facts(member)
    source = source_of(facts, src_rank, group_src)
    if rank is not None and rank not in (facts.rank, facts.group_ranks[facts.rank]):
        raise ProcessGroupError(facts.rank, f"was called with rank={rank}; pass its own rank")
    channel = _channels.get(member)
    if channel is None:
        channel = _channels[member] = _Channel()
    expected = channel.calls if step is None else step
    device = facts.frame_device()
    if facts.rank == source:
        data = outgoing_frame(capacity=BROADCAST_CAPACITY, sequence=expected, span_required=True)
        _send(channel, data, device, source, member)
    else:
        data = _receive(channel, device, source, member)
    # Counted once the collective has returned, on every rank alike.
    channel.calls += 1
    where = _Where(facts, source)
    frame = arrived_frame(data, where)
    if frame is None:
        return None
    if facts.rank == source:
        if frame.flags & FrameFlags.NO_CONTEXT:
            incidents.record(
                "broadcast.no_span",
                f"rank {source} is the source of broadcast_trace_context and has no span",
                todo="Call it inside a span on the source, so that there is a context to share.",
            )
    elif not in_turn(frame, expected, where):
        if step is None:
            channel.calls = frame.sequence + 1
        return None
    return dict(frame.carrier) or None


class _Where:
    """Names the channel, if it ever has to be named."""

    __slots__ = ("_facts", "_source")

    def __init__(self, facts: GroupFacts, source: int) -> None:
        self._facts = facts
        self._source = source

    def __call__(self) -> str:
        return f"broadcast from rank {self._source} to rank {self._facts.rank}"


def _send(
    channel: _Channel,
    frame: bytes,
    device: torch.device,
    source: int,
    group: dist.ProcessGroup,
) -> None:
    if device.type == "cpu":
        channel.view[:] = frame
        dist.broadcast(channel.buffer, source, group=group)
        return
    dist.broadcast(frame_tensor(frame, device), source, group=group)


def _receive(
    channel: _Channel, device: torch.device, source: int, group: dist.ProcessGroup
) -> bytes:
    if device.type == "cpu":
        # A shorter message of somebody else would leave the end of the last frame in place.
        channel.view[:] = _ZEROS
        dist.broadcast(channel.buffer, source, group=group)
        return bytes(channel.view)
    buffer = torch.zeros(BROADCAST_CAPACITY, dtype=torch.uint8, device=device)
    dist.broadcast(buffer, source, group=group)
    return tensor_bytes(buffer)
