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

#: One step in so many gives the other threads a turn: at each step, a turn would be a rhythm.
_ONE_IN: Final = 4
_DEADLINE_S: Final = 60.0


def run_interleaved(works: Sequence[Callable[[], None]]) -> None:
    """Run each in a thread of its own, all at once, with a switch after any bytecode of any.

    Raises:
        BaseException: The first that one of them raised, once all have ended.
        TimeoutError: If they do not end, as where two wait for each other.
    """
    raised: list[BaseException] = []
    together = threading.Barrier(len(works))

    def run(number: int, work: Callable[[], None]) -> None:
        rng = random.Random(number)  # the same turns in every run

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            frame.f_trace_opcodes = True
            if rng.randrange(_ONE_IN) == 0:
                time.sleep(0)  # lets another thread run
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
