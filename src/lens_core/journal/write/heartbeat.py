"""The thread that keeps a journal: signs of life, room, and stacks when nothing moves.

It runs twice a second, does no network I/O, and takes no lock that a span could wait for. What it
writes is what a reader cannot know otherwise: when the process was last alive, when it last started
or ended a span, and, once nothing has moved for a while, where all of its threads are.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from lens_core.diagnostics import describe, diagnostics
from lens_core.journal.format import ANSWER_SUFFIX, ASK_SUFFIX
from lens_core.journal.process_identity import oom_kills
from lens_core.journal.write.bus_error import guard
from lens_core.journal.write.stacks import live_stacks
from lens_core.journal.write.writer import Journal
from lens_core.shared_files import write_atomically

__all__ = ["Heartbeat"]

_INTERVAL_S: Final = 0.5
#: Nothing has moved for this long: worth a look at the stacks.
_IDLE_S: Final = 3.0
_STACKS_EVERY_S: Final = 5.0
#: Ended spans are moved to a file in good time, so that a burst finds room.
_KEEP_FREE_SHARE: Final = 0.25


class Heartbeat:
    """Keeps one journal, from a thread of its own.

    Args:
        journal: The journal.
        interval_s: Pause between two signs of life.
        idle_s: How long nothing may move before the stacks are written.
    """

    def __init__(
        self, journal: Journal, *, interval_s: float = _INTERVAL_S, idle_s: float = _IDLE_S
    ) -> None:
        self._journal = journal
        self._interval_s = interval_s
        self._idle_ns = int(idle_s * 1e9)
        self._seen: dict[int, int] = {}
        self._moved_ns: dict[int, int] = {}
        self._activity_ns = time.time_ns()
        self._stacks_ns = 0
        self._cgroup_events = ""
        self._stopped = threading.Event()

    def start(self, cgroup_events: str) -> None:
        """Start the thread; the first sign of life is written before this returns."""
        self._cgroup_events = cgroup_events
        self._stopped = threading.Event()
        self._activity_ns = time.time_ns()
        self.tick()
        try:
            threading.Thread(
                target=self._run, args=(self._stopped,), name="lens-journal", daemon=True
            ).start()
        except RuntimeError:
            return  # the interpreter is shutting down

    def stop(self) -> None:
        """End the thread, after a last sign of life. Does not wait."""
        self._stopped.set()
        self._guarded_tick()

    def tick(self) -> None:
        """Do once what the thread does every interval."""
        journal = self._journal
        table = journal.table
        if not table.live:
            return
        if table.file.truncated:
            self._give_up("journal.truncated", "somebody cut the journal short")
            return
        if not table.file.reachable:
            self._give_up("journal.deleted", "somebody deleted the journal")
            return
        guard.renew()
        now_ns = time.time_ns()
        self._look(now_ns)
        table.beat(
            now_ns,
            self._activity_ns,
            started=journal.started,
            overflowed=journal.overflowed,
            oom_kills=oom_kills(self._cgroup_events) or 0,
        )
        self._answer(now_ns)
        idle = now_ns - self._activity_ns >= self._idle_ns
        if idle and now_ns - self._stacks_ns >= _STACKS_EVERY_S * 1e9:
            self._stacks_ns = now_ns
            table.write_stacks(now_ns, live_stacks(skip=threading.get_ident()))
        if journal.settings.keeps == "ship":
            journal.spill(keep_free=table.blocks + 1)
        elif journal.settings.keeps == "all":
            journal.spill(keep_free=int(table.blocks * _KEEP_FREE_SHARE))

    def _look(self, now_ns: int) -> None:
        """When the rank last moved: its main thread, while that is in a span.

        A side thread that pushes metrics goes on while the main thread hangs.
        """
        moves = dict(self._journal.moves)
        for thread, count in moves.items():
            if self._seen.get(thread) != count:
                self._moved_ns[thread] = now_ns
        self._seen = moves
        main = self._moved_ns.get(self._journal.main_thread)
        if main is not None and self._journal.is_main_thread_in_a_span():
            self._activity_ns = main
        else:
            self._activity_ns = max([self._activity_ns, *self._moved_ns.values()])

    def _answer(self, now_ns: int) -> None:
        """Write the stacks where somebody asks for them.

        From here, with the interpreter lock: faulthandler walks the frames of threads that run on
        meanwhile, which now and then ends the process.
        """
        stem = self._journal.stem
        ask = stem.with_name(stem.name + ASK_SUFFIX)
        if not ask.exists():
            return
        text = live_stacks(skip=threading.get_ident())
        answer = stem.with_name(stem.name + ANSWER_SUFFIX)
        write_atomically(answer, [text.encode("utf-8", "replace")])
        ask.unlink(missing_ok=True)
        self._journal.table.write_stacks(now_ns, text)

    def _give_up(self, kind: str, what: str) -> None:
        path = self._journal.path
        self._journal.give_up()
        diagnostics.record(
            kind,
            f"{what}: {path}; spans of this process no longer survive its being killed",
            todo="Set NEMO_LENS_JOURNAL_DIR to a directory that nothing cleans up.",
        )

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.wait(self._interval_s):
            self._guarded_tick()

    def _guarded_tick(self) -> None:
        try:
            self.tick()
        except Exception as error:  # noqa: BLE001 - nothing may end this thread
            diagnostics.record("journal.failed", describe(error))
