"""One rank's trace context on all ranks, by one broadcast of one frame."""

from __future__ import annotations

import weakref
from typing import Final

from opentelemetry import trace

from lens_contrib.torch.compat import default_group
from lens_contrib.torch.frame_buffers import on_device
from lens_contrib.torch.process_groups import (
    current_device,
    group_facts,
    member_group,
    require_alive,
)
from lens_contrib.torch_distributed.transports import BroadcastTransport
from lens_core.carrier import Carrier
from lens_core.channel import Channel
from lens_core.diagnostics import diagnostics
from lens_core.errors import MissingExtraError, ProcessGroupError, SourceRankError
from lens_core.frame import BROADCAST_CAPACITY, MAX_SEQUENCE

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["broadcast_trace_context"]

_HAS_DISTRIBUTED: Final = dist.is_available()
_transport: Final = BroadcastTransport()
_ZEROS: Final = bytes(BROADCAST_CAPACITY)


def broadcast_trace_context(
    rank: int | None = None,
    src_rank: int = 0,
    *,
    group: dist.ProcessGroup | None = None,
    group_src: int | None = None,
    step: int | None = None,
) -> Carrier | None:
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
        A carrier; ``None`` on every rank where the source had no span, and on a rank that has no
        torch or no process group, or is not in ``group``. A falsy one whose ``status`` is
        ``rejected`` on a rank where what arrived was no intact frame, or not the one that was due:
        both are counted (``carrier.rejected``, ``carrier.out_of_turn``) and reported once.

    Raises:
        SourceRankError: If the source is not in the group. Raised before any message is sent, on
            every rank that passed the same arguments.
        ProcessGroupError: If the group is destroyed, or ``rank`` is not this process's rank.
            Raised before any message is sent.
        Exception: Whatever the collective itself raises (timeout, lost peer): it propagates, since
            a rank that swallowed it would be out of step with the others.
    """
    if not _HAS_DISTRIBUTED:
        return None
    member = default_group() if group is None else member_group(group)
    if member is None:
        return None
    known = _by_group.get(id(member))
    if known is None or known.group() is not member:
        known = _by_group[id(member)] = _GroupBroadcasts(member)
    elif group is not None:
        require_alive(member, known.rank)
    if rank is not None and rank != known.rank:
        known.require_own_rank(rank)
    if group_src is None and src_rank in known.group_ranks:
        source = known.group_ranks[src_rank]
    else:
        source = known.checked_source(src_rank, group_src)
    channel = known.channel
    number = (known.calls + channel.sequence.ahead if step is None else step) & MAX_SEQUENCE
    known.source = source
    # The group's own broadcast in place of dist.broadcast: with cold caches, every function that is
    # entered here costs about 1 % of the broadcast itself (benchmarks/bench_broadcast.py).
    if source == known.group_rank:
        # On the host, so that it can be read back without waiting for a device.
        frame = channel.outgoing(known.empty, sequence=number)
        wire = frame.wire if known.on_host else on_device(frame.wire, known.device())
        work = member.broadcast([wire], known.options[source])
        # Read while it is on its way: what the others get, less what did not fit.
        carrier = channel.arrived(frame, due=number).carrier
        if carrier.ids is None and not carrier:
            _report_nothing_sent(known.rank)
        work.wait()
        _transport.spare.append(frame)
    else:
        frame = known.empty if known.on_host else _transport.empty(known.device())
        if frame.frame is not None:
            # A shorter message of somebody else would leave the end of the last frame in place.
            frame.frame[:] = _ZEROS
        member.broadcast([frame.wire], known.options[source]).wait()
        carrier = channel.arrived(frame, due=number, follow=step is None).carrier
    # Counted once the collective has returned, on every rank alike.
    known.calls += 1
    return carrier if carrier.ids is not None else carrier.or_none()


class _GroupBroadcasts:
    """One group's broadcasts: their channel, and how many there were."""

    __slots__ = (
        "_device_type",
        "_members",
        "calls",
        "channel",
        "empty",
        "group",
        "group_rank",
        "group_ranks",
        "on_host",
        "options",
        "rank",
        "source",
    )

    def __init__(self, group: dist.ProcessGroup) -> None:
        facts = group_facts(group)
        self.rank = facts.rank
        self.group_ranks = facts.group_ranks
        self.group_rank = facts.group_ranks[facts.rank]
        self._members = facts.members
        self._device_type = facts.frame_device_type()
        self.on_host = self._device_type == "cpu"
        #: What this rank receives into on the host.
        self.empty = _transport.empty()
        self.channel = Channel(_transport, where=self._where, needs_span=True)
        self.options = _Options()
        self.calls = 0
        #: Rank within the group, of the call that is being made.
        self.source = 0
        key = id(group)
        self.group = weakref.ref(group, lambda _: _by_group.pop(key, None))

    def device(self) -> torch.device:
        """Where the frame must be."""
        return current_device(self._device_type)

    def checked_source(self, src_rank: int, group_src: int | None) -> int:
        """The source's rank within the group."""
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
        if rank != self.group_rank:
            raise ProcessGroupError(
                self.rank, f"was called with rank={rank}; pass this process's own rank"
            )

    def _where(self) -> str:
        return f"broadcast from rank {self._members[self.source]} to rank {self.rank}"


class _Options(dict[int, "dist.BroadcastOptions"]):
    """By source, as its rank within the group; made when first asked for."""

    def __missing__(self, source: int) -> dist.BroadcastOptions:
        options = self[source] = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return options


#: By ``id`` of the group, which is faster than a ``WeakKeyDictionary``; gone with the group.
_by_group: Final[dict[int, _GroupBroadcasts]] = {}


def _report_nothing_sent(rank: int) -> None:
    """Say, on the source, why there is nothing to share."""
    if trace.get_current_span().get_span_context().is_valid:
        diagnostics.record(
            "broadcast.no_headers",
            f"rank {rank} is the source of broadcast_trace_context; the propagators wrote nothing "
            "that a frame can hold for its span",
            todo="Let OTEL_PROPAGATORS name tracecontext.",
        )
        return
    diagnostics.record(
        "broadcast.no_span",
        f"rank {rank} is the source of broadcast_trace_context and has no span",
        todo="Call it inside a span on the source rank, so that there is one to share.",
    )
