"""The keyed hash behind derived ids.

BLAKE2b, keyed with the run's secret, over an unambiguous text of what both ends know. Uniform in
all bits, so samplers that decide on the trace id see what they see with random ids; and no one
without the key can tell a derived id from a random one, which is what W3C Trace Context Level 2
asks of the random flag ("randomly (or pseudo-randomly)" chosen).
"""

from __future__ import annotations

import hashlib
import operator
from typing import Final, NamedTuple

from lens_core.identity.run_key import RunKey

__all__ = ["Deriver", "HopId"]

_ZERO: Final = bytes(8)
_ONE: Final = bytes([0, 0, 0, 0, 0, 0, 0, 1])


class _Hop(NamedTuple):
    kind: str
    source: int
    destination: int
    sequence: int
    group: str = ""
    repeat: int = 0


class HopId(_Hop):
    """What both ends of a hop know without a message.

    Its numbers are plain integers, also where those of NumPy or torch were given.

    Attributes:
        kind: What is moved, such as ``"forward"`` or ``"backward"``.
        source: Who sends: a rank, or a pipeline stage; the same numbering on both ends.
        destination: Who receives, in the same numbering.
        sequence: Microbatch, or the count of such hops between the two.
        group: Tells groups, schedules or model chunks apart that share the numbers.
        repeat: How often these two did exactly this hop before, in the same step.

    Raises:
        TypeError: If a number is not an integer.
    """

    __slots__ = ()

    def __new__(
        cls,
        kind: str,
        source: int,
        destination: int,
        sequence: int,
        group: str = "",
        repeat: int = 0,
    ) -> HopId:
        """The same hop, whatever kind of integers its numbers are."""
        # Most are plain, and many are made: one for each send and receive.
        if not (type(source) is type(destination) is type(sequence) is type(repeat) is int):
            source, destination = int(operator.index(source)), int(operator.index(destination))
            sequence, repeat = int(operator.index(sequence)), int(operator.index(repeat))
        return tuple.__new__(cls, (kind, source, destination, sequence, group, repeat))


class Deriver:
    """Ids of one attempt of one run; thread-safe.

    Args:
        key: The run key; its attempt number is part of every id.
    """

    __slots__ = ("_base",)

    def __init__(self, key: RunKey) -> None:
        secret = key.secret
        if len(secret) > hashlib.blake2b.MAX_KEY_SIZE:  # all of it counts, not its beginning
            secret = hashlib.blake2b(secret, digest_size=64, person=b"lens long key").digest()
        self._base = hashlib.blake2b(key=secret, digest_size=24, person=b"lens ids v1")
        self._base.update(repr(key.attempt).encode() + b"\0")

    def under(self, *parts: int | str) -> Deriver:
        """Ids that depend on these parts too; derives faster than naming them each time."""
        deriver = object.__new__(Deriver)
        deriver._base = self._base.copy()
        deriver._base.update(repr(parts).encode() + b"\0")
        return deriver

    def ids(self, *parts: int | str) -> tuple[int, int]:
        """A 128-bit trace id and a 64-bit span id for these parts; never zero.

        Integers must be plain ``int``: a NumPy integer reads differently and gives another id.
        """
        hashed = self._base.copy()
        hashed.update(repr(parts).encode())
        digest = hashed.digest()
        return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:], "big") or 1

    def span_id_bytes(self, *parts: int | str) -> bytes:
        """The span id of :meth:`ids`, as its 8 bytes."""
        hashed = self._base.copy()
        hashed.update(repr(parts).encode())
        span_id = hashed.digest()[16:]
        return span_id if span_id != _ZERO else _ONE
