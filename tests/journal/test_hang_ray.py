"""An actor that waits for a killed one: the killed one is the suspect."""

import os
import signal
import time

import pytest

from lens_tools.hang.analysis import analyse
from lens_tools.hang.rendering import to_json
from lens_tools.hang.snapshot import take_snapshot
from tests.journal.killing import wait_for

ray = pytest.importorskip("ray")
lens_ray = pytest.importorskip("lens_contrib.ray", exc_type=ImportError)
waiting = pytest.importorskip("lens_contrib.ray.waiting", exc_type=ImportError)
traced, traced_get = lens_ray.traced, waiting.traced_get


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

    @traced
    def ask_busy(self, other):
        return traced_get(other.answer.remote())


def name_of(actor, kind):
    return f"actor {actor._actor_id.hex()[:12]} ({kind})"


def report_of(cluster):
    # Not the command: what Ray logs meanwhile would stand in its output.
    journals = cluster.run_directory.parent / "journals" / "ray-tests"
    return to_json(analyse(take_snapshot([journals] if journals.is_dir() else [])))


def open_spans(report):
    return {span["name"] for process in report["processes"] for span in process["open_spans"]}


def test_actor_waits_for_a_killed_one(cluster):
    asking, answering = Asks.remote(), Answers.options(max_concurrency=2).remote()
    pid = ray.get(answering.pid.remote(), timeout=60)
    names = {asking: name_of(asking, "Asks"), answering: name_of(answering, "Answers")}

    def report():
        return report_of(cluster)

    def are_open():
        return {"Asks.ask", "Answers.answer"} <= open_spans(report())

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


def test_actor_waits_for_one_that_is_busy(cluster):
    """Two calls are in one actor: the first sleeps, the second waits in the actor's queue."""
    first, second, busy = Asks.remote(), Asks.remote(), Answers.remote()
    try:
        with cluster.caller():
            first.ask_busy.remote(busy)
            wait_for(lambda: "Answers.answer" in open_spans(report_of(cluster)))
            second.ask_busy.remote(busy)

            def suspects():
                report = report_of(cluster)
                return [
                    s for s in report["suspects"] if s["processes"] == [name_of(busy, "Answers")]
                ]

            wait_for(lambda: suspects() and len(suspects()[0]["waiters"]) == 2)
        assert suspects()[0]["kind"] == "stuck"
        assert set(suspects()[0]["waiters"]) == {name_of(first, "Asks"), name_of(second, "Asks")}
    finally:
        for actor in (first, second, busy):
            ray.kill(actor)
