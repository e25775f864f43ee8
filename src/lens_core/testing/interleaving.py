"""Threads that are switched between any two steps of their code, so that a race shows at once.

Left to itself the interpreter switches threads every few milliseconds, and code that keeps
something in a shared place for two lines passes thousands of times before it fails in production.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

__all__ = ["run_interleaved"]

#: After one step in so many another thread has its turn: after each step, turns would be a rhythm.
_ONE_IN: Final = 8
#: A thread goes on without its turn after this long at most: whoever has it may wait for a lock
#: that this thread holds.
_LONGEST_WAIT_S: Final = 0.005
_SHORTEST_WAIT_S: Final = 0.00005
_DEADLINE_S: Final = 60.0


class _Turns:
    """Which one of several threads runs. The system's own scheduler may never switch, or always.

    Args:
        threads: How many there are.
    """

    def __init__(self, threads: int) -> None:
        self._gates = [threading.Event() for _ in range(threads)]
        self._running = list(range(threads))
        self._waits_s = [_LONGEST_WAIT_S] * threads

    def pass_on(self, number: int, rng: random.Random) -> None:
        """Let another thread run, until it is this one's turn again."""
        others = [other for other in self._running if other != number]
        if others:
            gate = self._gates[number]
            gate.clear()
            self._gates[rng.choice(others)].set()
            wait_s = self._waits_s[number]
            # Shorter and shorter while it holds the lock that they wait for.
            factor = 2.0 if gate.wait(wait_s) else 0.5
            self._waits_s[number] = min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, wait_s * factor))

    def leave(self, number: int) -> None:
        """A thread has ended; another one may go on."""
        self._running.remove(number)
        for other in self._running[:1]:
            self._gates[other].set()


def run_interleaved(works: Sequence[Callable[[], None]]) -> None:
    """Run each in a thread of its own, all at once, with a switch after any bytecode of any.

    Raises:
        BaseException: The first that one of them raised, once all have ended.
        TimeoutError: If they do not end, as where two wait for each other.
    """
    raised: list[BaseException] = []
    together = threading.Barrier(len(works))
    turns = _Turns(len(works))

    def run(number: int, work: Callable[[], None]) -> None:
        rng = random.Random(number)  # the same turns in every run

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            frame.f_trace_opcodes = True
            if rng.randrange(_ONE_IN) == 0:
                turns.pass_on(number, rng)
            return step

        previous = sys.gettrace()
        try:
            together.wait(_DEADLINE_S)
            sys.settrace(step)
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            raised.append(error)
        finally:
            sys.settrace(previous)
            turns.leave(number)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if raised:
        raise raised[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"{len(works)} threads did not end in {_DEADLINE_S:.0f} s")
