"""Trace and span ids that no seed can repeat.

The SDK draws ids from Python's global ``random``. Training code seeds that generator identically
on all ranks, which then emit identical ids; and each span advances the user's random stream. Here
ids come from a generator of our own, seeded from the operating system, and seeded anew in a
forked child. A span that has an owner gets the id that was derived for it
(:mod:`lens_core.identity`).
"""

from __future__ import annotations

import os
import random
import weakref
from typing import Final

from opentelemetry.sdk.trace.id_generator import IdGenerator

from lens_core.identity.owned import take_span_id, take_trace_id

__all__ = ["PrivateIdGenerator"]


class PrivateIdGenerator(IdGenerator):
    """Draws ids from a private random source; safe across threads, seeds and forks.

    Attributes:
        honours_derived_ids: Whether a span can be started under a derived id: yes.
        draw: Draws so many random bits from the same source.
    """

    honours_derived_ids: Final = True

    def __init__(self) -> None:
        self._random = random.Random(_entropy())
        self.draw: Final = self._random.getrandbits
        reseed = weakref.WeakMethod(self._reseed)

        def after_in_child() -> None:
            if method := reseed():
                method()

        os.register_at_fork(after_in_child=after_in_child)

    def generate_span_id(self) -> int:
        """A new span id: the derived one of an owned span, else 64 random bits, never zero."""
        if derived := take_span_id():
            return derived
        while True:
            if value := self._random.getrandbits(64):
                return value

    def generate_trace_id(self) -> int:
        """A new trace id: the derived one of an owned span, else 128 random bits, never zero."""
        if derived := take_trace_id():
            return derived
        while True:
            if value := self._random.getrandbits(128):
                return value

    def is_trace_id_random(self) -> bool:
        """Whether the W3C random flag may be set: yes."""
        return True

    def _reseed(self) -> None:
        self._random.seed(_entropy())


def _entropy() -> int:
    return int.from_bytes(os.urandom(32), "big")
