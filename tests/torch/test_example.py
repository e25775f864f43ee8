"""The examples for torchrun, run as their README says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from lens_tools.records.hops import resolve_hops
from lens_tools.records.read import read_records

ROOT = Path(__file__).parents[2]
RANKS, STEPS = 4, 20


def test_the_pipeline_under_torchrun(tmp_path):
    # Of the environment only what a program needs: no rank is to inherit this process's run.
    environ = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
            str(ROOT / "examples" / "nccl" / "pipeline.py"),
            *("--steps", str(STEPS), "--out", str(tmp_path)),
        ],
        env={**environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hops = {"torch.broadcast": (RANKS - 1) * STEPS, "nccl": 2 * (RANKS - 1) * 4 * STEPS}
    for transport, count in hops.items():
        line = f"{transport}: {count:,} of {count:,} receivers resolved to their true sender"
        assert line in done.stdout
    (directory,) = tmp_path.iterdir()
    run = read_records(directory)
    assert len(run.files) == RANKS
    assert {span.rank for span in run.spans} == set(range(RANKS))
    # The same, without the example's own words for it.
    assert {t: (r.receivers, r.resolved) for t, r in resolve_hops(run.spans).items()} == {
        transport: (count, count) for transport, count in hops.items()
    }
    steps = [span for span in run.spans if span.name == "train.step"]
    assert sorted(len(span.links) for span in steps) == [0] * STEPS + [1] * (RANKS - 1) * STEPS
