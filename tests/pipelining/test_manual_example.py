"""The example with a hand-written 1F1B schedule: run as a user runs it, and read back."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from lens_tools.records.read import read_records

EXAMPLE = Path(__file__).parents[2] / "examples" / "nccl" / "manual_1f1b.py"
RANKS, MICROBATCHES, STEPS = 4, 6, 2


def test_each_recv_of_the_hand_written_schedule_links_to_its_send(tmp_path):
    command = [sys.executable, str(EXAMPLE), f"--ranks={RANKS}", f"--microbatches={MICROBATCHES}"]
    done = subprocess.run(
        [*command, f"--steps={STEPS}", f"--output={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == STEPS
    run = read_records(tmp_path / "manual-1f1b")
    spans = {(span.trace_id, span.span_id): span for span in run.spans}
    sources = []
    for span in run.spans:
        rank = span.resource["nv.dl.rank"]
        if "recv_" not in span.name:
            assert "send_" not in span.name or not span.links
            continue
        (link,) = span.links
        sender = spans[link.trace_id, link.span_id]
        direction = span.name.split("recv_")[1]
        assert sender.name.startswith(f"send_{direction}")
        assert sender.resource["nv.dl.rank"] == rank + (1 if direction == "backward" else -1)
        assert sender.resource["nv.dl.rank"] == link.attributes["lens.peer.rank"]
        assert link.attributes["lens.microbatch"] == span.attributes["lens.microbatch"]
        assert sender.start_ns <= span.end_ns
        sources.append(sender.span_id)
    # Each message once: both directions over three boundaries.
    assert len(sources) == len(set(sources)) == 2 * (RANKS - 1) * MICROBATCHES * STEPS
    steps = [span for span in run.spans if span.name == "step"]
    assert len({span.trace_id for span in steps}) == STEPS
    assert len(steps) == STEPS * RANKS
