"""One clock for the ranks of a run, from both ends of its messages."""

from __future__ import annotations

from lens_tools.clock.alignment import CLOCK, Clock, align
from lens_tools.clock.held_out import HeldOut, held_out
from lens_tools.clock.rendezvous import Rendezvous, rendezvous

__all__ = ["CLOCK", "Clock", "HeldOut", "Rendezvous", "align", "held_out", "rendezvous"]
