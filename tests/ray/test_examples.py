"""The examples run as a user runs them, and their traces are what their READMEs say."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.ahead import started
from tests.ray.spans import read_spans

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"


def run_example(name, tmp_path, *arguments):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, "--out", tmp_path, *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, read_spans(tmp_path)


@pytest.fixture(scope="module")
def examples(request, tmp_path_factory):
    works = {
        "torch_trainer": (),
        "reinforce": ("--steps", "3"),
        "words": (),
    }
    works = {
        name: functools.partial(
            run_example, f"{name}.py", tmp_path_factory.mktemp(name), *arguments
        )
        for name, arguments in works.items()
    }
    with started(request, works, at_once=2) as running:
        yield running


@pytest.mark.timeout(300)
def test_words_is_one_trace_from_the_driver_to_all_workers(examples):
    printed, spans = examples["words"].result()
    (root,) = [span for span in spans if not span.parent_id]
    assert root.name == "count the topics"
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert {span.parent_id for span in spans if span is not root} == {root.span_id}
    assert Counter(span.name for span in spans) == {
        "count the topics": 1,
        "shards": 1,
        "count_words": 6,
        "Totals.__init__": 1,
        "Totals.add": 6,
        "Totals.most_common": 1,
    }
    assert "count_words  x6" in printed


@pytest.mark.timeout(300)
def test_reinforce_steps_are_traces_and_samples_link_to_their_policy(examples):
    pytest.importorskip("torch")
    _, spans = examples["reinforce"].result()
    by_id = {span.span_id: span for span in spans}
    steps = [span for span in spans if span.name == "step"]
    assert len(steps) == 3
    assert all(not span.parent_id for span in steps)
    for step in steps:
        names = Counter(span.name for span in spans if span.trace_id == step.trace_id)
        assert names == {
            "step": 1,
            "Trainer.publish": 1,
            "Rollouts.generate": 2,
            "sample": 16,
            "reward": 16,
            "ray.get": 1,
            "Trainer.update": 2,
            "all-reduce": 2,
            "wait for the trainers": 1,
        }
    samples = [span for span in spans if span.name == "sample"]
    for sample in samples:
        ((trace_id, span_id),) = sample.links
        assert (by_id[span_id].name, trace_id) == ("Trainer.publish", sample.trace_id)
        assert by_id[sample.parent_id].name == "Rollouts.generate"
    assert all(span.parent_id in by_id for span in spans if span.parent_id)


@pytest.mark.timeout(300)
def test_torch_trainer_is_one_trace_from_the_driver_to_the_steps(examples):
    pytest.importorskip("torch")
    pytest.importorskip("ray.train.torch", exc_type=ImportError)
    _, spans = examples["torch_trainer"].result()
    by_id = {span.span_id: span for span in spans}
    assert Counter(span.name for span in spans) == {
        "fit": 1,
        "fit_line": 2,
        "step": 6,
        "forward and backward": 6,
    }
    assert len({span.trace_id for span in spans}) == 1
    for span in spans:
        above = by_id[span.parent_id].name if span.parent_id else ""
        assert above == {"fit": "", "fit_line": "fit", "step": "fit_line"}.get(span.name, "step")
    forwards = [span for span in spans if span.name == "forward and backward"]
    assert {by_id[span.parent_id].attributes["nv.dl.rank"] for span in forwards} == {0}
