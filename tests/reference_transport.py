"""The smallest transport that keeps every law: fixed-size bytes with a frame behind them."""

from __future__ import annotations

import random
from collections.abc import Mapping

from lens_core.carrier import Carrier
from lens_core.errors import MessageError
from lens_core.frame import HEADER_BYTES, P2P_CAPACITY, decode_frame, encode_frame
from lens_core.testing import TransportCase, damage_bytes, process_hop
from lens_core.transport import Received

PAYLOAD_BYTES = 16


class BytesTransport:
    """Carries on payloads of exactly ``PAYLOAD_BYTES`` bytes."""

    name = "reference"

    def inject(self, message: bytes, carrier: Mapping[str, str]) -> bytes:
        if len(message) != PAYLOAD_BYTES:
            raise MessageError(f"expected {PAYLOAD_BYTES} bytes, got {len(message)}")
        return message + encode_frame(carrier, capacity=P2P_CAPACITY)

    def extract(self, message: bytes) -> Received[bytes]:
        payload, tail = message[:PAYLOAD_BYTES], message[PAYLOAD_BYTES:]
        return Received(payload, decode_frame(tail) if tail else Carrier())


def _damage(message: bytes, rng: random.Random) -> bytes:
    return message[:PAYLOAD_BYTES] + damage_bytes(message[PAYLOAD_BYTES:], rng)


def bytes_case(transport: BytesTransport | None = None) -> TransportCase[bytes]:
    return TransportCase(
        transport=transport or BytesTransport(),
        new_message=lambda number: number.to_bytes(PAYLOAD_BYTES, "big"),
        same=lambda a, b: a == b,
        copy=bytes,
        footprint=len,
        damage=_damage,
        carrier_bytes=P2P_CAPACITY - HEADER_BYTES - 16,
        calls_when_off=80,
        hops={"another process": process_hop("tests.reference_transport:bytes_case")},
    )
