"""The examples run as a user runs them, and their traces are what their READMEs say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.ray.spans import read_spans

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"


def run_example(name, tmp_path, *arguments, timeout_s=90):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, "--out", tmp_path, *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, read_spans(tmp_path)


@pytest.mark.timeout(120)
def test_words_is_one_trace_from_the_driver_to_all_workers(tmp_path):
    printed, spans = run_example("words.py", tmp_path)
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
