"""Jobs that know nothing of it and hang: ``lens hang`` names who, where, and in which operation."""

import os
import signal
import threading
import time

import pytest

pytest.importorskip("torch")

from tests.autotrace import rank_programs
from tests.gloo import rank_outcomes
from tests.journal.killing import environment
from tests.journal.test_hang import lens, live_pids

#: Case to what is said of the suspect, and of what the other rank waits for.
CASES = {
    "asleep_under_ddp": ("step > forward", "broadcast #"),
    "asleep_under_fsdp2": ("step > forward", "all_gather_into_tensor #"),
    "asleep_in_its_loader": ("step > data", "all_reduce #"),
    "never_comes": ("in setup", "init_process_group"),
    "killed": ("died", "rank 0"),
    "send_against_barrier": ("rank 1", "send to rank 1"),
}


def test_suspects(tmp_path):
    """All at once: each of them needs seconds, and none of them a processor."""
    threads = []
    for case in CASES:
        directory = tmp_path / case
        directory.mkdir()
        threads.append(
            threading.Thread(
                target=rank_outcomes,
                args=(rank_programs.hang, 2, 100.0, case),
                kwargs={
                    "init_group": False,
                    "env": environment(directory, TORCHELASTIC_RUN_ID="run"),
                },
            )
        )
        threads[-1].start()
    left, deadline = dict(CASES), time.monotonic() + 80
    try:
        while left and time.monotonic() < deadline:
            time.sleep(0.5)
            for case, (said, waited) in [*left.items()]:
                shown = lens("hang", tmp_path / case / "journals" / "run").output
                first = shown.partition("\n")[0]
                if all(part in first for part in ("suspect: ", "rank 1", said)) and waited in shown:
                    del left[case]
        assert {
            case: lens("hang", tmp_path / case / "journals" / "run").output for case in left
        } == {}
    finally:
        for case in CASES:
            for pid in live_pids(tmp_path / case / "journals" / "run"):
                os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
