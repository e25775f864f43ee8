"""What was survived is counted by kind, and logged once for each thing to be done about it."""

import logging
import os
import signal
import threading

import pytest

from lens_core import NemoLensConfig
from lens_core.diagnostics import MAX_REMEDIES, Diagnostics


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING, logger="lens_core")
    return lambda: [record.getMessage() for record in caplog.records]


def test_the_first_of_each_kind_and_remedy_is_logged_and_all_are_counted(logged):
    mine = Diagnostics()
    for _ in range(3):
        mine.record("a.b", "it broke", todo="Mend it.")
        mine.record("a.b", "another broke", todo="Mend the other.")
    mine.record("c.d", "no advice")
    mine.record("c.d", "what differs is no remedy")
    assert logged() == [
        "a.b: it broke. Mend it. Further ones are only counted.",
        "a.b: another broke. Mend the other. Further ones are only counted.",
        "c.d: no advice. Further ones are only counted.",
    ]
    assert mine.counts() == {"a.b": 6, "c.d": 2}
    assert mine.count("never") == 0


def test_a_remedy_that_varies_without_end_is_neither_logged_nor_remembered_without_end(logged):
    mine = Diagnostics()
    for number in range(10 * MAX_REMEDIES):
        mine.record("a.b", "it broke", todo=f"Mend number {number}.")
    mine.record("c.d", "another kind", todo="Mend this.")
    lines = logged()
    assert len(lines) == MAX_REMEDIES + 1
    assert lines[MAX_REMEDIES - 2].endswith(" Further ones are only counted.")
    assert lines[MAX_REMEDIES - 1].endswith(" All further ones of this kind are only counted.")
    assert mine.counts() == {"a.b": 10 * MAX_REMEDIES, "c.d": 1}
    assert sum(map(len, mine._logged.values())) == MAX_REMEDIES + 1


def test_those_of_many_threads_are_all_counted(logged):
    mine = Diagnostics()
    threads = [
        threading.Thread(
            target=lambda: [mine.record("k", "w", todo=f"{n % 4}") for n in range(500)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mine.count("k") == 2000
    assert len(logged()) == 4


def test_a_signal_handler_may_record_while_its_thread_records():
    mine = Diagnostics()
    before = signal.signal(signal.SIGALRM, lambda *_: mine.record("signal", "w", todo="t"))
    try:
        with mine._lock:
            signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert mine.count("signal") == 1


def test_a_child_forked_while_another_thread_records_can_record():
    mine = Diagnostics()
    mine.record("a.b", "in the parent")
    held, release = threading.Event(), threading.Event()

    def hold():
        with mine._lock:
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(30)
        mine.record("a.b", "in the child")
        os._exit(mine.count("a.b"))
    release.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_the_second_bad_setting_is_named_as_well_as_the_first(logged, monkeypatch):
    monkeypatch.setattr("lens_core.telemetry.config.diagnostics", Diagnostics())
    bad = {"NEMO_LENS_ENABLED": "maybe", "NEMO_LENS_EXPORTER": "fax"}
    NemoLensConfig.from_env(environ=bad)
    first, second = logged()
    assert "NEMO_LENS_ENABLED='maybe'" in first
    assert "NEMO_LENS_EXPORTER='fax'" in second
