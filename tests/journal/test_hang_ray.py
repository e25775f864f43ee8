"""An actor that waits for a killed one: the killed one is the suspect."""

import os
import signal
import time

import pytest

from lens_contrib.timeline.hang import analyse
from lens_contrib.timeline.hang_command import to_json
from lens_contrib.timeline.open_processes import take_snapshot
from tests.journal.killing import wait_for

ray = pytest.importorskip("ray")
traced = pytest.importorskip("lens_contrib.ray", exc_type=ImportError).traced


@ray.remote
class Answers:
    @traced
    def answer(self):
        time.sleep(600)

    def pid(self):
        return os.getpid()


@ray.remote(max_concurrency=2)
class Asks:
    @traced
    def ask(self, other):
        reference = other.answer.remote()
        while True:
            try:
                return ray.get(reference, timeout=600)
            except ray.exceptions.RayError:
                time.sleep(0.1)  # it hopes for a restart that never comes

    def nothing(self):
        return None


def test_actor_waits_for_a_killed_one(cluster):
    asking, answering = Asks.remote(), Answers.options(max_concurrency=2).remote()
    pid = ray.get(answering.pid.remote(), timeout=60)
    names = {actor: f"actor {actor._actor_id.hex()[:12]}" for actor in (asking, answering)}
    journals = cluster.run_directory.parent / "journals" / "ray-tests"

    def report():
        # Not the command: what Ray logs meanwhile would stand in its output.
        return to_json(analyse(take_snapshot([journals] if journals.is_dir() else [])))

    def are_open():
        spans = [span["name"] for p in report()["processes"] for span in p["open_spans"]]
        return {"Asks.ask", "Answers.answer"} <= set(spans)

    try:
        with cluster.caller():
            asking.ask.remote(answering)
            wait_for(are_open)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: any(s["kind"] == "dead" for s in report()["suspects"]))
        suspect = report()["suspects"][0]
        assert suspect["kind"] == "dead"
        assert suspect["processes"] == [names[answering]]
        assert suspect["waiters"] == [names[asking]]
        assert suspect["text"].endswith("in Answers.answer")
    finally:
        ray.kill(asking)
