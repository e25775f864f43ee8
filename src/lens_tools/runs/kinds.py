"""What a span did, told by its name and by what it says of its operation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["kind_and_phase"]

_PHASES: Final[Mapping[str, str]] = {
    "forward": "forward",
    "fwd": "forward",
    "backward": "backward",
    "bwd": "backward",
    "optimizer": "optimizer",
    "data": "data",
    "dataloader": "data",
    "loader": "data",
    "checkpoint": "checkpoint",
    "save": "checkpoint",
    "gc": "gc",
    "step": "step",
}
_WORKS: Final = frozenset({"forward", "backward", "optimizer", "data", "checkpoint"})
_ENDS: Final[Mapping[str, str]] = {"isend": "send", "send": "send", "irecv": "recv", "recv": "recv"}
_WORD: Final = re.compile(r"[a-z]+")


def kind_and_phase(name: str, op: str | None, direction: str | None) -> tuple[str, str]:
    """Kind and phase of a span by its name, and what it says of its operation."""
    words = _WORD.findall(name.lower())
    if "recv" in words:  # "send_backward_recv_forward": what it waits for is what it is
        words = words[words.index("recv") :]
    phase = next((_PHASES[word] for word in words if word in _PHASES), "other")
    if op is not None:
        end = _ENDS.get(op)
        return (end, phase) if end else ("collective", op)
    end = next((_ENDS[word] for word in words if word in _ENDS), None)
    if end is not None:
        return end, phase
    if phase in _WORKS:
        return "compute", phase
    if direction in ("send", "recv") and phase == "other":
        return direction, phase
    return "other", phase
