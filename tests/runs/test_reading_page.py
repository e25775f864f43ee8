"""Every block of ``docs/reading.md`` runs as it stands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.traces import pipeline_trace

PAGE = (Path(__file__).parents[2] / "docs/reading.md").read_text("utf-8")
BLOCKS = re.findall(r"<!-- test: (\w+) -->\n```(python|sh)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What each block printed, by its name: run in their order, in one directory."""
    directory = tmp_path_factory.mktemp("page")
    (directory / "runs/my-run").mkdir(parents=True)
    attributes = [
        {"key": "nemo.run.id", "value": {"stringValue": "my-run"}},
        {"key": "nv.dl.rank", "value": {"intValue": "0"}},
    ]
    span = {"traceId": "1" * 32, "spanId": "2" * 16, "name": "forward"}
    span |= {"startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    group = {"resource": {"attributes": attributes}, "scopeSpans": [{"spans": [span]}]}
    line = json.dumps({"resourceSpans": [group]})
    (directory / "runs/my-run/a.jsonl").write_text(line + "\nhalf")
    pipeline_trace(directory / "trace.parquet", clock_s=lambda rank, step: 0.5 * (rank == 1))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    found = {}
    for name, language, block in BLOCKS:
        program = [sys.executable, "-c"] if language == "python" else ["/bin/sh", "-ec"]
        done = subprocess.run(
            [*program, block],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found[name] = done.stdout
    return found


def test_every_code_block_is_run():
    assert len(re.findall(r"^```\w", PAGE, re.MULTILINE)) == len(BLOCKS) == 3


def test_a_run_is_read_and_what_is_damaged_is_told(shown):
    assert shown["read"].startswith("<Run my-run: 1 spans, 1 ranks, 0 steps")
    assert "half a line at the end of the file" in shown["read"]


def test_a_trace_is_imported_and_aligned(shown):
    assert "944 spans" in shown["bring"]
    groups, problems, early, *_ = shown["align"].splitlines()
    assert (groups, problems) == ("[[0, 1, 2, 3, 4, 5]]", "()")
    before, after = map(float, early.split())
    assert (before, after) == (0.25, 0)
