"""The torch transports for the conformance kit."""

from __future__ import annotations

import random

import torch

from lens_contrib.nccl import BufferTransport, PackedTransport, PairedTransport, carrier_buffer
from lens_contrib.nccl.buffers import slack_of
from lens_contrib.torch_distributed import BroadcastTransport
from lens_core.frame import BROADCAST_CAPACITY, HEADER_BYTES, P2P_CAPACITY
from lens_core.testing import TransportCase, damage_bytes
from tests.hops_gloo import broadcast_hop, ring_hop

#: What msgpack needs beside the text of one or two headers.
_BODY_OVERHEAD = 16
_SHAPE = (3, 5)


def broadcast_case() -> TransportCase[torch.Tensor]:
    here = "tests.torch.cases:broadcast_case"
    transport = BroadcastTransport()
    return TransportCase(
        transport=transport,
        new_message=lambda number: transport.empty(),
        same=_same,
        copy=torch.clone,
        footprint=_footprint,
        damage=_damage_tensor,
        carrier_bytes=BROADCAST_CAPACITY - HEADER_BYTES - _BODY_OVERHEAD,
        calls_when_off=100,
        hops={"2 ranks": broadcast_hop(here, 2), "4 ranks": broadcast_hop(here, 4)},
    )


def packed_case() -> TransportCase[torch.Tensor]:
    here = "tests.torch.cases:packed_case"
    return TransportCase(
        transport=PackedTransport(torch.empty(_SHAPE)),
        new_message=_tensor,
        same=_same,
        copy=torch.clone,
        footprint=_footprint,
        damage=_damage_tail,
        carrier_bytes=P2P_CAPACITY - HEADER_BYTES - _BODY_OVERHEAD,
        calls_when_off=150,
        hops=_ring_hops(here),
    )


def paired_case() -> TransportCase[list[torch.Tensor]]:
    here = "tests.torch.cases:paired_case"
    return TransportCase(
        transport=PairedTransport(),
        new_message=lambda number: [_tensor(number)],
        same=lambda a, b: len(a) == len(b) and all(map(_same, a, b)),
        copy=lambda message: [tensor.clone() for tensor in message],
        footprint=lambda message: tuple(map(_footprint, message)),
        damage=lambda message, rng: [*message[:-1], _damage_tensor(message[-1], rng)],
        carrier_bytes=P2P_CAPACITY - HEADER_BYTES - _BODY_OVERHEAD,
        calls_when_off=120,
        hops=_ring_hops(here),
    )


def buffer_case() -> TransportCase[torch.Tensor]:
    here = "tests.torch.cases:buffer_case"
    return TransportCase(
        transport=BufferTransport(),
        new_message=_buffer,
        same=_same,
        copy=_copy_buffer,
        footprint=lambda message: (_footprint(message), _footprint(slack_of(message).wire)),
        damage=_damage_slack,
        carrier_bytes=P2P_CAPACITY - HEADER_BYTES - _BODY_OVERHEAD,
        calls_when_off=200,
        hops=_ring_hops(here),
    )


def _ring_hops(here: str):
    return {
        "2 ranks, blocking": ring_hop(here, "blocking", 2),
        "4 ranks, blocking": ring_hop(here, "blocking", 4),
        "2 ranks, all in flight": ring_hop(here, "nonblocking", 2),
        "2 ranks, batched": ring_hop(here, "batched", 2),
    }


def _tensor(number: int) -> torch.Tensor:
    return torch.arange(15, dtype=torch.float32).reshape(_SHAPE) + 100 * number


def _buffer(number: int) -> torch.Tensor:
    buffer = carrier_buffer(_SHAPE)
    buffer.copy_(_tensor(number))
    return buffer


def _copy_buffer(message: torch.Tensor) -> torch.Tensor:
    copy = carrier_buffer(message.shape, message.dtype)
    slack_of(copy).wire.copy_(slack_of(message).wire)
    return copy


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _footprint(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.dtype, tuple(tensor.shape), str(tensor.device))


def _damage_tensor(message: torch.Tensor, rng: random.Random) -> torch.Tensor:
    damaged = damage_bytes(bytes(message.tolist()), rng)
    return torch.tensor(list(damaged), dtype=torch.uint8)


def _damage_tail(message: torch.Tensor, rng: random.Random) -> torch.Tensor:
    tail = _damage_tensor(message[-P2P_CAPACITY:], rng)
    return torch.cat((message[:-P2P_CAPACITY], tail))


def _damage_slack(message: torch.Tensor, rng: random.Random) -> torch.Tensor:
    damaged = _copy_buffer(message)
    frame = slack_of(damaged).frame
    frame.copy_(_damage_tensor(frame, rng))
    return damaged
