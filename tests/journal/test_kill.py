"""Nothing is lost, doubled or invented, however the process ends."""

import random

import pytest

from tests.journal.killing import DEATHS, kill_one, memory_cgroup

REASONS = {
    "SIGKILL": "sigkill",
    "SIGABRT": "sigabrt",
    "SIGSEGV": "sigsegv",
    "null": "sigsegv",
    "os._exit": "exit",
    "exec": "exec",
}


@pytest.mark.parametrize("death", DEATHS)
def test_killed_at_a_random_moment(death, tmp_path):
    toll = kill_one(tmp_path, death, random.uniform(0.2, 0.6))
    assert toll.started > 100
    assert toll.truncated > 0
    # faulthandler may itself fault while it walks threads that run on.
    assert toll.reason in {REASONS[death], *(("sigsegv",) if death == "SIGABRT" else ())}


def test_more_ended_spans_than_the_exporter_takes(tmp_path):
    """The export queue overflows; what it drops is in the journal, and its overflow in a file."""
    env = {"OTEL_BSP_MAX_QUEUE_SIZE": "16", "OTEL_BSP_SCHEDULE_DELAY": "60000"}
    toll = kill_one(tmp_path, "SIGKILL", 8.0, **env)  # on a slow machine it takes that long
    assert toll.recovered_ended > 9000, "the table holds fewer blocks: some were spilled"


def test_killed_for_want_of_memory(tmp_path):
    with memory_cgroup(256 << 20) as prefix:
        if prefix is None:
            pytest.skip("no memory cgroup can be made here")
        toll = kill_one(tmp_path, "oom", 0.7, prefix=prefix)
    assert toll.started > 100
    assert toll.truncated > 0
    assert toll.reason == "oom"
