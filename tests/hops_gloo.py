"""Real hops over gloo: messages around a ring of ranks, or from each rank in turn to all others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lens_core.testing import HopMessage, HopRecord, Receiver, Sender, Sent, TransportCase, arrival
from tests.gloo import run_ranks

TIMEOUT_S = 90

#: What a rank function returns: what it sent, and what arrived as keyword arguments of ``arrival``.
RankReport = tuple[dict[int, Sent], list[dict[str, Any]]]


def ring_hop(
    case: str, verb: str, world_size: int
) -> Callable[[Sequence[HopMessage]], Sequence[HopRecord]]:
    """Every rank sends all hop_messages to the next one.

    Args:
        case: ``"module:function"`` that makes the transport's case.
        verb: ``blocking``, ``nonblocking`` or ``batched``.
        world_size: Number of ranks, even.
    """
    return lambda hop_messages: _merged(
        run_ranks(_ring_rank, world_size, TIMEOUT_S, case, verb, list(hop_messages))
    )


def broadcast_hop(
    case: str, world_size: int
) -> Callable[[Sequence[HopMessage]], Sequence[HopRecord]]:
    """Each message from one rank to all others, the ranks in turn."""
    return lambda hop_messages: _merged(
        run_ranks(_broadcast_rank, world_size, TIMEOUT_S, case, list(hop_messages))
    )


def _merged(reports: Sequence[RankReport]) -> list[HopRecord]:
    return [
        arrival(reports[seen.pop("source")][0][seen.pop("index")], **seen)
        for _, arrivals in reports
        for seen in arrivals
    ]


def _case(name: str) -> TransportCase:
    import importlib

    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)()


@contextmanager
def _on_the_wire() -> Iterator[list[str]]:
    """Records what torch.distributed is given to send: shapes, dtypes and devices, in order."""
    from torch.distributed import ProcessGroup

    seen: list[str] = []
    # From the class's own dictionary: as attributes they would come back unbound.
    kept = {name: vars(ProcessGroup)[name] for name in ("send", "broadcast")}
    kept_send, kept_broadcast = ProcessGroup.send, ProcessGroup.broadcast

    def note(tensors) -> None:
        seen.extend(f"{each.dtype}{tuple(each.shape)}@{each.device}" for each in tensors)

    def send(group, tensors, *args):
        note(tensors)
        return kept_send(group, tensors, *args)

    def broadcast(group, tensors, *args):
        note(tensors)
        return kept_broadcast(group, tensors, *args)

    # Where every send and broadcast passes, those of torch.distributed's functions too.
    ProcessGroup.send, ProcessGroup.broadcast = send, broadcast
    try:
        yield seen
    finally:
        for name, method in kept.items():
            setattr(ProcessGroup, name, method)


class _Ring:
    """One rank of the ring."""

    def __init__(self, rank: int, world_size: int, case: TransportCase, mode: str) -> None:
        self.rank = rank
        self.next = (rank + 1) % world_size
        self.previous = (rank - 1) % world_size
        self.case = case
        self.mode = mode
        self.sent: dict[int, Sent] = {}
        self.wires: dict[int, str] = {}
        self.arrivals: list[dict[str, Any]] = []
        self._sender, self._receiver = Sender(), Receiver()
        self._rng = random.Random(rank)

    @contextmanager
    def sending(self, hop_message: HopMessage) -> Iterator[Any]:
        """The hop_message's context and message, checked afterwards."""
        message = self.case.new_message(self._content(hop_message, self.rank))
        copy = self.case.copy(message)
        with _on_the_wire() as wire, self._sender.sending(hop_message) as sent:
            yield message
            sent.message_intact = self.case.same(message, copy)
        self.sent[hop_message.index] = sent
        self.wires[hop_message.index] = "; ".join(wire)

    def damaged_wire(self, message: Any) -> Sequence[Any]:
        """The wire tensors of a message with its frame damaged; it takes its turn all the same."""
        import torch.distributed as dist

        from lens_contrib.nccl.channels import SENDING, peer_channels
        from lens_core.testing.carriers import carrier_for

        channels = peer_channels(SENDING, dist.group.WORLD, self.next, None, 0, message.tensor)
        next(channels.sequence.sent)
        injected = self.case.transport.inject(message, carrier_for(0xBAD))
        return self.case.damage(injected, self._rng).wire

    def arrived(self, hop_message: HopMessage, message: Any, carrier: Any, before: Any) -> None:
        """Note one arrival."""
        from opentelemetry import context as otel_context

        links, parent = self._receiver.open_span(carrier)
        expected = self.case.new_message(self._content(hop_message, self.previous))
        self.arrivals.append(
            {
                "source": self.previous,
                "index": hop_message.index,
                "received": carrier,
                "message_intact": self.case.same(message, expected),
                "footprint": self.wires[hop_message.index],
                "links": links,
                "parent": parent,
                "context_before": before,
                "context_after": otel_context.get_current(),
                "where": f"rank {self.rank} from rank {self.previous}",
            }
        )

    def empty(self) -> Any:
        return self.case.new_message(0)

    @staticmethod
    def _content(hop_message: HopMessage, rank: int) -> int:
        return 1 + hop_message.index * 8 + rank


def _ring_rank(
    rank: int, world_size: int, case_name: str, verb: str, hop_messages: list[HopMessage]
) -> RankReport:
    case = _case(case_name)
    ring = _Ring(rank, world_size, case, case.transport.name.removeprefix("nccl."))
    {"blocking": _blocking, "nonblocking": _nonblocking, "batched": _batched}[verb](
        ring, hop_messages
    )
    return ring.sent, ring.arrivals


def _blocking(ring: _Ring, hop_messages: list[HopMessage]) -> None:
    import torch.distributed as dist
    from opentelemetry import context as otel_context

    from lens_contrib import nccl

    def send(hop_message: HopMessage) -> None:
        with ring.sending(hop_message) as message:
            if hop_message.damaged:
                for work in [dist.isend(part, ring.next) for part in ring.damaged_wire(message)]:
                    work.wait()
            else:
                nccl.send(message.tensor, ring.next, mode=ring.mode)

    for hop_message in hop_messages:
        before = otel_context.get_current()
        if ring.rank % 2 == 0:
            send(hop_message)
        message = ring.empty()
        carrier = nccl.recv(message.tensor, ring.previous, mode=ring.mode)
        if ring.rank % 2 == 1:
            send(hop_message)
        ring.arrived(hop_message, message, carrier, before)


def _nonblocking(ring: _Ring, hop_messages: list[HopMessage]) -> None:
    """All of them in flight at once."""
    import torch.distributed as dist
    from opentelemetry import context as otel_context

    from lens_contrib import nccl

    before = otel_context.get_current()
    receiving, outgoing = [], []
    for hop_message in hop_messages:
        message = ring.empty()
        work = nccl.irecv(message.tensor, ring.previous, mode=ring.mode)
        receiving.append((hop_message, message, work))
        with ring.sending(hop_message) as message:
            if hop_message.damaged:
                wire = ring.damaged_wire(message)
                outgoing += [(dist.isend(part, ring.next), part) for part in wire]
            else:
                outgoing.append((nccl.isend(message.tensor, ring.next, mode=ring.mode), None))
    for hop_message, message, work in receiving:
        work.wait()
        ring.arrived(hop_message, message, work.carrier, before)
    for work, _ in outgoing:
        work.wait()


def _batched(ring: _Ring, hop_messages: list[HopMessage]) -> None:
    import torch.distributed as dist
    from opentelemetry import context as otel_context

    from lens_contrib import nccl

    for hop_message in hop_messages:
        before = otel_context.get_current()
        into = ring.empty()
        with ring.sending(hop_message) as message:
            receive = dist.P2POp(dist.irecv, into.tensor, ring.previous)
            if hop_message.damaged:
                raw = [dist.isend(part, ring.next) for part in ring.damaged_wire(message)]
                (work,) = nccl.batch_isend_irecv([receive], mode=ring.mode)
                for other in raw:
                    other.wait()
            else:
                send = dist.P2POp(dist.isend, message.tensor, ring.next)
                other, work = nccl.batch_isend_irecv([send, receive], mode=ring.mode)
                other.wait()
            work.wait()
        ring.arrived(hop_message, into, work.carrier, before)


def _broadcast_rank(
    rank: int, world_size: int, case_name: str, hop_messages: list[HopMessage]
) -> RankReport:
    import torch.distributed as dist
    from opentelemetry import context as otel_context

    from lens_contrib.torch_distributed import broadcast_trace_context
    from lens_core.testing.carriers import carrier_for

    case, sender, receiver = _case(case_name), Sender(), Receiver()
    rng = random.Random(3)
    sent: dict[int, Sent] = {}
    arrivals: list[dict[str, Any]] = []
    for turn, hop_message in enumerate(hop_messages):
        source = turn % world_size
        before = otel_context.get_current()
        if rank == source:
            with sender.sending(hop_message) as note:
                if hop_message.damaged:
                    note.message_intact = True  # there is no message of the user's
                    injected = case.transport.inject(case.new_message(0), carrier_for(0xBAD))
                    dist.broadcast(case.damage(injected, rng).wire, source)
                else:
                    # The source gets what the others get: its context, less what did not fit.
                    own = broadcast_trace_context(rank, source, step=turn) or {}
                    note.message_intact = own.items() <= note.carrier.items() and (
                        own.get("traceparent") == note.carrier.get("traceparent")
                    )
            sent[hop_message.index] = note
            continue
        with _on_the_wire() as wire:
            carrier = broadcast_trace_context(rank, source, step=turn)
        links, parent = receiver.open_span(carrier)
        arrivals.append(
            {
                "source": source,
                "index": hop_message.index,
                "received": carrier,
                "message_intact": True,
                "footprint": "; ".join(wire),
                "links": links,
                "parent": parent,
                "context_before": before,
                "context_after": otel_context.get_current(),
                "where": f"rank {rank} from rank {source}",
            }
        )
    return sent, arrivals
