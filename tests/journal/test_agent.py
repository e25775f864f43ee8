"""``lens agent``: trainers that hold no network connection, and one process that ships for all."""

import collections
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.journal.killing import environment, read_truth, start_stress, wait_for
from tests.telemetry.harness import receiving, unused_endpoint

_started = []


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    for process in _started:
        process.kill()
        process.wait()
    _started.clear()


def agent(directory, endpoint, *arguments):
    command = [sys.executable, "-m", "lens_tools.cli", "agent", str(directory / "journals")]
    process = subprocess.Popen(
        [*command, "--otlp", endpoint, "--interval", "0.2", *arguments],
        env=environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _started.append(process)
    return process


def trainer_of(directory, **env):
    process = start_stress(directory, NEMO_LENS_EXPORTER="journal", **env)
    _started.append(process)
    return process


def stop(process):
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    return out


def received(receiver):
    spans = [span for span, _ in receiver.spans()]
    return collections.Counter(int.from_bytes(span.span_id, "big") for span in spans)


def truncated(receiver):
    return sum(
        any(pair.key == "nemo.span.truncated" for pair in span.attributes)
        for span, _ in receiver.spans()
    )


def test_ships_the_living_and_recovers_the_dead(tmp_path):
    with receiving() as receiver:
        shipping = agent(tmp_path, receiver.endpoint)
        trainer = trainer_of(tmp_path, LENS_TEST_PAUSE_S="0.01")
        wait_for(lambda: len(receiver.spans()) > 1000)
        assert truncated(receiver) == 0
        trainer.kill()
        trainer.wait()
        wait_for(lambda: truncated(receiver) > 0)
        assert "recovered" in stop(shipping)
        counts = received(receiver)
    truth = read_truth(tmp_path / "truth")
    assert truth["S"] <= set(counts) <= truth["I"]
    assert set(counts.values()) == {1}
    assert list((tmp_path / "journals" / "run").iterdir()) == []


def test_a_trainer_has_no_network_thread(tmp_path):
    trainer = trainer_of(tmp_path, limit=100)
    try:
        descriptors = f"/proc/{trainer.pid}/fd"
        targets = [os.readlink(f"{descriptors}/{name}") for name in os.listdir(descriptors)]
        assert not [target for target in targets if target.startswith("socket:")]
    finally:
        trainer.kill()
        trainer.wait()


def test_nothing_is_lost_while_the_receiver_is_down(tmp_path):
    trainer = trainer_of(tmp_path)
    failing = agent(tmp_path, unused_endpoint())
    try:
        time.sleep(1.5)
    finally:
        failing.kill()
        failing.communicate()
        trainer.kill()
        trainer.wait()
    with receiving() as receiver:
        out, err = agent(tmp_path, receiver.endpoint, "--once").communicate(timeout=60)
        counts = received(receiver)
    truth = read_truth(tmp_path / "truth")
    assert truth["S"] <= set(counts) <= truth["I"], (out, err)
    assert set(counts.values()) == {1}


def test_a_trainer_that_ends_in_order_leaves_all_to_the_agent(tmp_path):
    code = """
from lens_core import NemoLensConfig, setup_telemetry
handle = setup_telemetry(NemoLensConfig.from_env())
for index in range(1000):
    handle.tracer.start_span("step").end()
left = handle.tracer.start_span("open")
assert handle.is_exporting
assert handle.shutdown()
"""
    env = environment(tmp_path, NEMO_LENS_EXPORTER="journal")
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    with receiving() as receiver:
        agent(tmp_path, receiver.endpoint, "--once").communicate(timeout=60)
        counts = received(receiver)
        assert truncated(receiver) == 1
    assert len(counts) == 1001
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("moment_s", [0.5, 1.1])
def test_an_agent_that_is_killed_loses_nothing(moment_s, tmp_path):
    with receiving() as receiver:
        trainer = trainer_of(tmp_path, LENS_TEST_PAUSE_S="0.01")
        first = agent(tmp_path, receiver.endpoint)
        wait_for(lambda: len(receiver.spans()) > 0)
        time.sleep(moment_s)
        first.kill()
        first.communicate()
        second = agent(tmp_path, receiver.endpoint)
        time.sleep(moment_s)
        trainer.kill()
        trainer.wait()
        wait_for(lambda: truncated(receiver) > 0)
        stop(second)
        counts = received(receiver)
    truth = read_truth(tmp_path / "truth")
    assert truth["S"] <= set(counts) <= truth["I"]
    # The batch that was delivered but not yet noted when the first one was killed.
    assert sum(count - 1 for count in counts.values()) <= 2048
