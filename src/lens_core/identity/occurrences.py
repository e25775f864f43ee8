"""How often each step was opened, exactly, in bounded memory.

Ranks count alike where they open alike; one that opens a step more than the others differs for that
step, and for no other one. So the counts are kept by step number, for all of them: as the places
where the count changes from one number to the next. Steps 0 to a million take two such places, and
two more for each return to a checkpoint.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

__all__ = ["Occurrences"]

#: Places that are kept; steps that are not neighbours take two each.
_KEPT: Final = 8192


class Occurrences:
    """Counts openings by step; not thread-safe.

    Of a process that opens more than 4,096 steps with gaps between, the lowest gaps are forgotten:
    a step in one of them, opened at last, then counts as opened before. No count comes twice for a
    step.
    """

    __slots__ = ("_counts", "_starts")

    def __init__(self) -> None:
        #: From ``_starts[i]`` up to the next start each step was opened ``_counts[i]`` times.
        self._starts: list[int] = []
        self._counts: list[int] = []

    def open(self, step: int) -> int:
        """Count one opening; returns how many came before."""
        starts, counts = self._starts, self._counts
        if len(starts) > 1 and starts[-1] == step and counts[-2] == 1:
            starts[-1] = step + 1  # the step after the highest one: nearly always
            return 0
        place = bisect_right(starts, step) - 1
        before = counts[place] if place >= 0 else 0
        if place < 0 or starts[place] != step:
            place += 1
            starts.insert(place, step)
            counts.insert(place, before)
        counts[place] = before + 1
        if place + 1 == len(starts) or starts[place + 1] != step + 1:
            starts.insert(place + 1, step + 1)
            counts.insert(place + 1, before)
        self._join(place + 1)
        self._join(place)
        if len(starts) > _KEPT:
            self._compact()
        return before

    def last(self, step: int) -> int:
        """What the last :meth:`open` of this step returned; 0 before the first."""
        place = bisect_right(self._starts, step) - 1
        return max(0, self._counts[place] - 1) if place >= 0 else 0

    def _compact(self) -> None:
        """Halve the places: fill the lowest gaps between steps that were opened equally often."""
        starts: list[int] = []
        counts: list[int] = []
        surplus = len(self._starts) - _KEPT // 2
        for start, count in zip(self._starts, self._counts, strict=True):
            if surplus > 0 and len(counts) > 1 and counts[-2] == count > counts[-1]:
                del starts[-1], counts[-1]
                surplus -= 2
            else:
                starts.append(start)
                counts.append(count)
        if surplus > _KEPT // 4:  # no such gaps: steps that come in no order
            counts[0] = max(counts[: surplus + 1])
            del starts[1 : surplus + 1], counts[1 : surplus + 1]
        self._starts, self._counts = starts, counts

    def _join(self, place: int) -> None:
        """Drop a place where nothing changes."""
        if place > 0 and self._counts[place] == self._counts[place - 1]:
            del self._starts[place], self._counts[place]
