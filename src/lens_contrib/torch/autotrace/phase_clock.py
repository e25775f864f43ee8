"""Where the time of one step goes on this rank: its own work by phase, and waiting for others.

Own time is wall time less waiting: a rank that others wait for is told by its own time alone, for
its lateness is in the wall time of all. What lies between two calls that are seen is known by the
next one: before a backward pass it was a forward pass.
"""

from __future__ import annotations

import os
import time
from typing import Final

__all__ = ["PhaseClock"]

_PHASES: Final = (
    *("data", "forward", "backward", "optimizer"),
    *("evaluate", "checkpoint", "other"),
)
_SCHEDSTAT: Final = "/proc/thread-self/schedstat"


class PhaseClock:
    """Adds up nanoseconds; used by one thread.

    Attributes:
        own_ns: Own time by phase.
        queued_ns: Part of that in which the thread was ready and had no CPU, where the system
            tells (Linux).
        wait_ns: Time in which it waited for other ranks.
        usual_ns: How long a phase took of late, the longest of that fading.
        phase: The phase that is known to be going on; empty between two calls that are seen.
        since_ns: When that began.
    """

    def __init__(self) -> None:
        try:
            self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            self._read_queued_ns()
        except (OSError, ValueError, IndexError):
            self._schedstat = -1
        self._stack: list[tuple[str, int]] = []
        self._after = ""
        self._next = {"data": "forward"}
        self.usual_ns: dict[str, int] = {}
        self.phase: str = ""
        self.start()

    def start(self) -> None:
        """A new step begins: nothing is added up, and no phase goes on."""
        self.own_ns: dict[str, int] = dict.fromkeys(_PHASES, 0)
        self.queued_ns: dict[str, int] = dict.fromkeys(_PHASES, 0)
        self.wait_ns: int = 0
        self._waits = 0
        self._gap_ns = 0
        self._stack.clear()
        self.phase = ""
        self.since_ns: int = time.time_ns()
        self._last_ns = self.since_ns
        self._last_queued_ns = self._read_queued_ns()

    @property
    def likely_phase(self) -> str:
        """The phase that goes on; between two calls, what was there the last time."""
        return self.phase or self._next.get(self._after, "other")

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self._settle("forward" if phase == "backward" else "other")
        self.phase, self.since_ns = phase, self._last_ns
        self._stack.append((phase, self._last_ns))

    def leave(self, phase: str) -> int:
        """A phase ends; when it began, or 0 if it is not the one that goes on."""
        if phase != self.phase:
            return 0
        self._settle("")
        _, began_ns = self._stack.pop()
        self._after = phase
        self.phase, self.since_ns = self._stack[-1] if self._stack else ("", self._last_ns)
        return began_ns

    def wait_begins(self) -> None:
        """This thread waits for other ranks from here on."""
        if not self._waits:
            self._add(time.time_ns())
        self._waits += 1

    def wait_ends(self) -> None:
        """It waits no longer."""
        if self._waits == 1:
            now_ns = time.time_ns()
            self.wait_ns += now_ns - self._last_ns
            self._last_ns = now_ns
        self._waits = max(0, self._waits - 1)

    def waited_in(self, phase: str, wait_ns: int) -> None:
        """Part of a phase's own time turns out to have been waiting."""
        wait_ns = max(0, min(wait_ns, self.own_ns[phase]))
        self.own_ns[phase] -= wait_ns
        self.wait_ns += wait_ns

    def close(self) -> None:
        """Give back what it holds of the system."""
        schedstat, self._schedstat = self._schedstat, -1
        if schedstat >= 0:
            os.close(schedstat)

    def stop(self) -> None:
        """The step ends: what lies after its last call is added."""
        self._settle("other")

    def _settle(self, gap: str) -> None:
        """Add what has passed to the phase that goes on, or to what the gap was."""
        self._add(time.time_ns())
        queued_ns = self._read_queued_ns()
        phase = self.phase or gap
        took_ns = self._last_ns - self.since_ns
        usual_ns = self.usual_ns.get(phase, 0)
        self.usual_ns[phase] = took_ns if took_ns > usual_ns else usual_ns - (usual_ns >> 4)
        if not self.phase:
            self._next[self._after] = gap
            self.own_ns[gap] += self._gap_ns
            self._gap_ns = 0
        self.queued_ns[phase] += queued_ns - self._last_queued_ns
        self._last_queued_ns = queued_ns

    def _add(self, now_ns: int) -> None:
        if self.phase:
            self.own_ns[self.phase] += now_ns - self._last_ns
        else:
            self._gap_ns += now_ns - self._last_ns
        self._last_ns = now_ns

    def _read_queued_ns(self) -> int:
        if self._schedstat < 0:
            return 0
        return int(os.pread(self._schedstat, 64, 0).split()[1])
