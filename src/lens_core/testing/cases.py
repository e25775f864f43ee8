"""What the kit must know about a transport to check it."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lens_core.channel import Relation
from lens_core.testing.hops import HopMessage, HopRecord
from lens_core.transport import Transport

__all__ = ["Hop", "TransportCase"]

M = TypeVar("M")

#: Sends every message, in order, over a real hop; gives one record an arrival.
Hop = Callable[[Sequence[HopMessage]], Sequence[HopRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportCase(Generic[M]):
    """A transport, with what the kit needs to make, compare and damage its messages.

    Attributes:
        transport: The transport under test.
        new_message: Makes the i-th message, each with a content of its own, all of one shape.
        same: Whether two messages have the same content, type and shape.
        copy: An independent copy of a message, for checking that the original is not changed.
        footprint: What the other side must know beforehand to receive an injected message: shape,
            size, dtype, device, number. Hashable.
        damage: An injected message with the carrier's bytes damaged, as a bad network, a foreign
            sender or a stale buffer would; ``None`` for a transport whose carrier is no bytes of
            its own that could be damaged.
        carrier_bytes: Most bytes of carrier that surely fit; what is larger loses baggage first.
        calls_when_off: Stated cost without a context: the most Python and C calls that
            :meth:`Channel.outgoing` and :meth:`Channel.arrived` (:mod:`lens_core.channel`) make
            together. Time is measured in ``benchmarks/``; a count of calls cannot be noisy.
        gaps: Headers that this transport never carries, such as ``baggage`` where ids are derived.
        derived: For a transport that sends nothing, because both ends derive the carrier: the one
            carrier that the sender of the i-th message can have. The laws then use it in place of
            carriers of their own, and a message that nobody injected may give it too, since no
            byte tells the two apart.
        relation: How a receiver's span relates to the sender's over ``hops``.
        hops: Name to a real hop: other processes, a real network.
    """

    transport: Transport[M]
    new_message: Callable[[int], M]
    same: Callable[[M, M], bool]
    copy: Callable[[M], M]
    footprint: Callable[[M], Hashable]
    damage: Callable[[M, random.Random], M] | None
    carrier_bytes: int
    calls_when_off: int
    gaps: frozenset[str] = frozenset()
    derived: Callable[[int], Mapping[str, str]] | None = None
    relation: Relation = "link"
    hops: Mapping[str, Hop] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The transport's name."""
        return self.transport.name

    def carrier(self, number: int, otherwise: Mapping[str, str]) -> Mapping[str, str]:
        """The carrier for the message of this number: the derived one where there is one."""
        if self.derived is None:
            return otherwise
        return {**otherwise, **self.derived(number)}

    def carried(self, carrier: Mapping[str, str]) -> dict[str, str]:
        """What of a carrier must arrive, given the declared gaps."""
        return {name: value for name, value in carrier.items() if name not in self.gaps}
