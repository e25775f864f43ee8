"""Real hops over gloo: parcels around a ring of ranks, or from each rank in turn to all others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lens_core.testing import HopRecord, Parcel, Receiver, Sender, Sent, TransportCase, arrival
from tests.gloo import run_ranks

TIMEOUT_S = 90

#: What a rank function returns: what it sent, and what arrived as keyword arguments of ``arrival``.
RankReport = tuple[dict[int, Sent], list[dict[str, Any]]]


def ring_hop(
    case: str, verb: str, world_size: int
) -> Callable[[Sequence[Parcel]], Sequence[HopRecord]]:
    """Every rank sends all parcels to the next one.

    Args:
        case: ``"module:function"`` that makes the transport's case.
        verb: ``blocking``, ``nonblocking`` or ``batched``.
        world_size: Number of ranks, even.
    """
    return lambda parcels: _merged(
        run_ranks(_ring_rank, world_size, TIMEOUT_S, case, verb, list(parcels))
    )


def broadcast_hop(case: str, world_size: int) -> Callable[[Sequence[Parcel]], Sequence[HopRecord]]:
    """Each parcel from one rank to all others, the ranks in turn."""
    return lambda parcels: _merged(
        run_ranks(_broadcast_rank, world_size, TIMEOUT_S, case, list(parcels))
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
    def sending(self, parcel: Parcel) -> Iterator[Any]:
        """The parcel's context and message, checked afterwards."""
        message = self.case.new_message(self._content(parcel, self.rank))
        copy = self.case.copy(message)
        with _on_the_wire() as wire, self._sender.sending(parcel) as sent:
            yield message
            sent.message_intact = self.case.same(message, copy)
        self.sent[parcel.index] = sent
        self.wires[parcel.index] = "; ".join(wire)

    def damaged_wire(self, message: Any) -> Sequence[Any]:
        """The wire tensors of a message with its frame damaged; it takes its turn all the same."""
        import torch
        import torch.distributed as dist

        from lens_contrib.nccl.buffers import slack_of
        from lens_contrib.nccl.channels import outlet_to
        from lens_core.testing.carriers import carrier_for

        tensor = tensor_of(message)
        next(outlet_to(dist.group.WORLD, self.next, None, 0, tensor).numbers)
        injected = self.case.transport.inject(message, carrier_for(0xBAD))
        damaged = self.case.damage(injected, self._rng)
        if self.mode == "buffer":
            return [slack_of(damaged).wire]
        return [damaged] if isinstance(damaged, torch.Tensor) else damaged

    def arrived(self, parcel: Parcel, message: Any, carrier: Any, before: Any) -> None:
        """Note one arrival."""
        from opentelemetry import context as otel_context

        links, parent = self._receiver.open_span(carrier)
        expected = self.case.new_message(self._content(parcel, self.previous))
        self.arrivals.append(
            {
                "source": self.previous,
                "index": parcel.index,
                "received": carrier,
                "message_intact": self.case.same(message, expected),
                "footprint": self.wires[parcel.index],
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
    def _content(parcel: Parcel, rank: int) -> int:
        return 1 + parcel.index * 8 + rank


def tensor_of(message: Any) -> Any:
    """The one tensor of a message: itself, or the only one of a list."""
    return message[0] if isinstance(message, list) else message


def _ring_rank(
    rank: int, world_size: int, case_name: str, verb: str, parcels: list[Parcel]
) -> RankReport:
    case = _case(case_name)
    ring = _Ring(rank, world_size, case, case.transport.name.removeprefix("nccl."))
    {"blocking": _blocking, "nonblocking": _nonblocking, "batched": _batched}[verb](ring, parcels)
    return ring.sent, ring.arrivals


def _blocking(ring: _Ring, parcels: list[Parcel]) -> None:
    import torch.distributed as dist
    from opentelemetry import context as otel_context

    from lens_contrib import nccl

    def send(parcel: Parcel) -> None:
        with ring.sending(parcel) as message:
            if parcel.damaged:
                for work in [dist.isend(part, ring.next) for part in ring.damaged_wire(message)]:
                    work.wait()
            else:
                nccl.send(tensor_of(message), ring.next, mode=ring.mode)

    for parcel in parcels:
        before = otel_context.get_current()
        if ring.rank % 2 == 0:
            send(parcel)
        message = ring.empty()
        carrier = nccl.recv(tensor_of(message), ring.previous, mode=ring.mode)
        if ring.rank % 2 == 1:
            send(parcel)
        ring.arrived(parcel, message, carrier, before)


def _nonblocking(ring: _Ring, parcels: list[Parcel]) -> None:
    """All of them in flight at once."""
    import torch.distributed as dist
    from opentelemetry import context as otel_context

    from lens_contrib import nccl

    before = otel_context.get_current()
    receiving, outgoing = [], []
    for parcel in parcels:
        message = ring.empty()
        work = nccl.irecv(tensor_of(message), ring.previous, mode=ring.mode)
        receiving.append((parcel, message, work))
        with ring.sending(parcel) as message:
            if parcel.damaged:
                wire = ring.damaged_wire(message)
                outgoing += [(dist.isend(part, ring.next), part) for part in wire]
            else:
                outgoing.append((nccl.isend(tensor_of(message), ring.next, mode=ring.mode), None))
    for parcel, message, work in receiving:
        work.wait()
        ring.arrived(parcel, message, work.carrier, before)
    for work, _ in outgoing:
        work.wait()


def _batched(ring: _Ring, parcels: list[Parcel]) -> None:
    import torch.distributed as dist
    from opentelemetry import context as otel_context

    from lens_contrib import nccl

    for parcel in parcels:
        before = otel_context.get_current()
        into = ring.empty()
        with ring.sending(parcel) as message:
            receive = dist.P2POp(dist.irecv, tensor_of(into), ring.previous)
            if parcel.damaged:
                raw = [dist.isend(part, ring.next) for part in ring.damaged_wire(message)]
                (work,) = nccl.batch_isend_irecv([receive], mode=ring.mode)
                for other in raw:
                    other.wait()
            else:
                send = dist.P2POp(dist.isend, tensor_of(message), ring.next)
                other, work = nccl.batch_isend_irecv([send, receive], mode=ring.mode)
                other.wait()
            work.wait()
        ring.arrived(parcel, into, work.carrier, before)


def _broadcast_rank(
    rank: int, world_size: int, case_name: str, parcels: list[Parcel]
) -> RankReport:
    import torch.distributed as dist
    from opentelemetry import context as otel_context

    from lens_contrib.torch_distributed import broadcast_trace_context
    from lens_core.testing.carriers import carrier_for

    case, sender, receiver = _case(case_name), Sender(), Receiver()
    rng = random.Random(3)
    sent: dict[int, Sent] = {}
    arrivals: list[dict[str, Any]] = []
    for turn, parcel in enumerate(parcels):
        source = turn % world_size
        before = otel_context.get_current()
        if rank == source:
            with sender.sending(parcel) as note:
                if parcel.damaged:
                    injected = case.transport.inject(case.new_message(0), carrier_for(0xBAD))
                    dist.broadcast(case.damage(injected, rng), source)
                else:
                    # The source gets what the others get: its context, less what did not fit.
                    own = broadcast_trace_context(rank, source, step=turn) or {}
                    assert own.items() <= note.carrier.items(), (own, note.carrier)
                    assert own.get("traceparent") == note.carrier.get("traceparent")
                note.message_intact = True  # there is no message of the user's
            sent[parcel.index] = note
            continue
        with _on_the_wire() as wire:
            carrier = broadcast_trace_context(rank, source, step=turn)
        links, parent = receiver.open_span(carrier)
        arrivals.append(
            {
                "source": source,
                "index": parcel.index,
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
