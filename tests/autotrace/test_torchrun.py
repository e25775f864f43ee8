"""``lens run --trace -- torchrun ...`` with a script of the examples, as docs/zero-code.md says."""

import sys
from pathlib import Path

import pytest

from lens_tools.records.read import read_records
from tests.launcher.running import python, run

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples" / "zero_code"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def test_a_script_of_the_examples(tmp_path):
    """With data loader workers, which are children of the ranks and are none themselves."""
    command = [*TORCHRUN, str(EXAMPLES / "ddp.py"), "--steps", "4", "--workers", "1"]
    code, out, err = run(
        tmp_path, command, "--trace", OMP_NUM_THREADS="1", NEMO_LENS_SPAN_GROUPS="spans"
    )
    assert code == 0, err
    assert out.startswith("loss ")
    assert len(out.splitlines()) == 1
    assert "lens run: 2 processes kept a journal; none was killed or failed" in err
    ranks = {}
    for span in read_records(tmp_path / "run").spans:
        ranks.setdefault(span.rank, {}).setdefault(span.name, []).append(span)
    assert sorted(ranks) == [0, 1]
    assert [span.trace_id for span in ranks[0]["step"]] == [
        span.trace_id for span in ranks[1]["step"]
    ]
    for spans in ranks.values():
        counts = {name: len(found) for name, found in spans.items()}
        steps = {span.span_id for span in spans["step"]}
        assert counts["step"] - counts["optimizer"] in (0, 1)
        assert counts["optimizer"] == counts["backward"] == counts["forward"] == 4
        assert counts["setup"] == counts["init_process_group"] == 1
        assert all(span.parent_span_id in steps for span in spans["backward"])


def test_it_says_that_nothing_was_traced(tmp_path):
    code, out, err = run(tmp_path, [sys.executable, "-E", "-c", "print('out')"], "--trace")
    assert (code, out) == (0, "out\n")
    assert err.startswith("lens run: nothing was traced: ")


def test_a_process_that_ends_at_once_was_traced_all_the_same(tmp_path):
    """Without a process group, from its first optimizer step on."""
    code = """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
    """
    status, _, err = run(tmp_path, python(code), "--trace", OMP_NUM_THREADS="1")
    assert status == 0
    assert "nothing was traced" not in err
    steps = [span for span in read_records(tmp_path / "run").spans if span.name == "step"]
    assert len(steps) == 3


def test_it_says_nothing_where_telemetry_is_switched_off(tmp_path):
    command = python("print('out')")
    assert run(tmp_path, command, "--trace", OTEL_SDK_DISABLED="true") == (0, "out\n", "")
    assert run(tmp_path, command, "--trace", NEMO_LENS_ENABLED="0") == (0, "out\n", "")


def test_a_command_that_cannot_be_started_leaves_no_file(tmp_path):
    (tmp_path / "temporary").mkdir()
    status, _, err = run(tmp_path, ["./missing"], "--trace", TMPDIR=str(tmp_path / "temporary"))
    assert (status, err) == (127, "lens run: ./missing: no such file\n")
    assert list((tmp_path / "temporary").iterdir()) == []
