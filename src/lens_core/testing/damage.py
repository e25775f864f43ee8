"""Damage to a carrier's bytes, as a bad link, a foreign sender or a stale buffer would do it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from lens_core.frame import HEADER_BYTES

__all__ = ["damage_bytes"]


def _flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _flip_one_bit_that_counts(data: bytearray, rng: random.Random) -> None:
    # Not in the padding, and often the lowest: it makes another digit of a digit, so that only a
    # checksum can tell.
    used = len(data.rstrip(data[-1:])) or len(data)
    data[rng.randrange(used)] ^= 1 << rng.choice((0, 0, rng.randrange(8)))


def _random_bytes(data: bytearray, rng: random.Random) -> None:
    data[:] = rng.randbytes(len(data))


def _random_tail(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start:] = rng.randbytes(len(data) - start)


def _zero_run(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(min(len(data), HEADER_BYTES))
    end = min(len(data), start + rng.randint(1, HEADER_BYTES))
    data[start:end] = bytes(end - start)


def _shift(data: bytearray, rng: random.Random) -> None:
    by = rng.randint(1, 16)
    data[:] = data[by:] + data[:by]


def _float_activations(data: bytearray, rng: random.Random) -> None:
    # What a receiver sees that expects a frame where its peer sent float32 values.
    pattern = bytes((0, 0, rng.randrange(256), 0x3F))
    data[:] = (pattern * (len(data) // 4 + 1))[: len(data)]


_KINDS: Final[Sequence[Callable[[bytearray, random.Random], None]]] = (
    _flip_bits,
    _flip_one_bit_that_counts,
    _random_bytes,
    _random_tail,
    _zero_run,
    _shift,
    _float_activations,
)


def damage_bytes(frame: bytes, rng: random.Random) -> bytes:
    """The bytes, damaged in one of several ways: as many as before, and never the same.

    Args:
        frame: Bytes of an intact frame; not empty.
        rng: Private random source, so that a failure can be repeated.
    """
    data = bytearray(frame)
    while data == frame:
        data[:] = frame
        rng.choice(_KINDS)(data, rng)
    return bytes(data)
