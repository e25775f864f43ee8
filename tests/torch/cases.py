"""The torch transports for the conformance kit."""

from __future__ import annotations

import random

import torch

from lens_contrib.nccl import BufferTransport, PackedTransport, PairedTransport, carrier_buffer
from lens_contrib.nccl.messages import TensorMessage
from lens_contrib.torch.frame_buffers import FrameBuffer
from lens_contrib.torch_distributed import BroadcastTransport
from lens_core.frame import BROADCAST_CAPACITY, HEADER_BYTES, P2P_CAPACITY
from lens_core.testing import TransportCase, damage_bytes
from tests.hops_gloo import broadcast_hop, ring_hop

#: What msgpack needs beside the text of one or two headers.
_BODY_OVERHEAD = 16
_SHAPE = (3, 5)


def broadcast_case() -> TransportCase[FrameBuffer]:
    here = "tests.torch.cases:broadcast_case"
    transport = BroadcastTransport()
    return TransportCase(
        transport=transport,
        new_message=lambda number: transport.empty(),
        same=lambda a, b: a.capacity == b.capacity,  # there is nothing of the user's in it
        copy=lambda message: _filled(transport.empty(), message.wire),
        footprint=lambda message: _footprint(message.wire),
        damage=lambda message, rng: _filled(transport.empty(), _damage_tensor(message.wire, rng)),
        carrier_bytes=BROADCAST_CAPACITY - HEADER_BYTES - _BODY_OVERHEAD,
        calls_when_off=100,
        hops={"2 ranks": broadcast_hop(here, 2), "4 ranks": broadcast_hop(here, 4)},
    )


def packed_case() -> TransportCase[TensorMessage]:
    return _case(PackedTransport(), "tests.torch.cases:packed_case", 150)


def paired_case() -> TransportCase[TensorMessage]:
    return _case(PairedTransport(), "tests.torch.cases:paired_case", 120)


def buffer_case() -> TransportCase[TensorMessage]:
    return _case(BufferTransport(), "tests.torch.cases:buffer_case", 200, _buffer)


def _case(transport, here: str, calls_when_off: int, new=None) -> TransportCase[TensorMessage]:
    new = new or _tensor

    def copy(message: TensorMessage) -> TensorMessage:
        """Another message of the same bytes, as it is at the other end: its tensor has none yet."""
        tensor = new(0)
        if message.buffer is None:
            tensor.copy_(message.tensor)
            return TensorMessage(tensor)
        twin = transport.room(tensor)
        for mine, other in zip(twin.wire, message.wire, strict=True):
            mine.copy_(other)
        return twin

    def damage(message: TensorMessage, rng: random.Random) -> TensorMessage:
        twin = copy(message)
        frame = twin.wire[-1][-P2P_CAPACITY:]
        frame.copy_(_damage_tensor(frame, rng))
        return twin

    return TransportCase(
        transport=transport,
        new_message=lambda number: TensorMessage(new(number)),
        same=lambda a, b: _same(a.tensor, b.tensor),
        copy=copy,
        footprint=lambda message: tuple(map(_footprint, message.wire)),
        damage=damage,
        carrier_bytes=P2P_CAPACITY - HEADER_BYTES - _BODY_OVERHEAD,
        calls_when_off=calls_when_off,
        hops=_ring_hops(here),
    )


def _filled(buffer: FrameBuffer, content: torch.Tensor) -> FrameBuffer:
    buffer.wire.copy_(content)
    return buffer


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


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _footprint(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.dtype, tuple(tensor.shape), str(tensor.device))


def _damage_tensor(message: torch.Tensor, rng: random.Random) -> torch.Tensor:
    damaged = damage_bytes(bytes(message.tolist()), rng)
    return torch.tensor(list(damaged), dtype=torch.uint8)
