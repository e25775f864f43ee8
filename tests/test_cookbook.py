"""Every block of ``docs/cookbook.md`` runs as it stands."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lens_tools.records import read_records
from tests.gloo import run_ranks
from tests.telemetry.harness import receiving

PAGE = (Path(__file__).parents[1] / "docs/cookbook.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"<!-- test: (\w+) -->\n```(?:python|sh)\n(.*?)```", PAGE, re.DOTALL))
BIN = Path(sys.executable).parent


def settings(directory, **more):
    return {
        "NEMO_LENS_ENABLED": "1",
        "NEMO_LENS_EXPORTER": "file",
        "NEMO_LENS_RUN_ID": "cook",
        "NEMO_LENS_OUTPUT_DIR": str(directory / "runs"),
        "NEMO_LENS_JOURNAL_DIR": str(directory / "journals"),
        "NEMO_LENS_SPAN_GROUPS": "all",
        **more,
    }


def run_shell(block, directory, **more):
    return subprocess.run(
        ["/bin/sh", "-ec", block],
        cwd=directory,
        env={"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(directory), **more},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_every_block_has_a_test_and_every_code_block_is_one():
    assert len(re.findall(r"^```\w", PAGE, re.MULTILINE)) == len(BLOCKS)
    tests = Path(__file__).read_text("utf-8")
    assert [name for name in BLOCKS if f'BLOCKS["{name}"]' not in tests] == []


def _slow_batches(rank):
    import torch

    for step in itertools.count():
        if rank == 1 and step == 7:
            time.sleep(0.3)
        yield torch.ones(2, 4)


def _train(rank, world_size, blocks):
    import torch

    from lens_contrib.torch import agree_run_key
    from lens_core import NemoLensConfig, setup_telemetry

    names = {}
    for block in blocks:
        exec(block, names)
    with setup_telemetry(NemoLensConfig.from_env()):
        agree_run_key()
        names["train"](torch.nn.Linear(4, 1), _slow_batches(rank), 8)
        names["train_sharded"](torch.nn.Linear(4, 4), torch.ones(2, 4), 1)
        names["forward"](0, rank, [torch.full((2,), 1.0 - rank) for _ in range(2)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    blocks = [BLOCKS["ddp"], BLOCKS["fsdp"], BLOCKS["pipeline"]]
    run_ranks(_train, 2, 120, blocks, env=settings(directory))
    return directory / "runs" / "cook"


def test_torch(trained):
    run = read_records(trained)
    assert run.problems == []
    names = [(span.name, span.rank) for span in run.spans]
    for rank in (0, 1):
        for name in ("next_batch", "forward", "backward", "optimizer"):
            assert names.count((name, rank)) == 8
        assert names.count(("all_reduce", rank)) == 1
    # One trace a step, and the same on both ranks.
    forward = {
        rank: {s.trace_id for s in run.spans if s.name == "forward" and s.rank == rank}
        for rank in (0, 1)
    }
    assert forward[0] == forward[1]
    assert len(forward[0]) == 8
    sent = [span.span_id for span in run.spans if span.name == "send_forward"]
    received = [span.links[0].span_id for span in run.spans if span.name == "recv_forward"]
    assert sorted(received) == sorted(sent)
    assert len(sent) == 2


def test_the_slow_rank_of_a_step(trained):
    names = {}
    exec(BLOCKS["slow"], names)
    (slowest, took_ms), (other, _) = names["own_work_ms"](trained, 7).most_common()
    assert (slowest, other) == (1, 0)
    assert took_ms >= 300


def test_data_loader(tmp_path):
    program = (
        "from lens_core import NemoLensConfig, setup_telemetry\n"
        "if __name__ == '__main__':\n"
        "    with setup_telemetry(NemoLensConfig.from_env()):\n"
        "        print([batch.flatten().tolist() for batch in epoch()])\n"
    )
    (tmp_path / "train.py").write_text(BLOCKS["loader"] + program)
    done = run_shell("python train.py", tmp_path, **settings(tmp_path, RANK="0"))
    assert "[[0.0, 1.0], [2.0, 3.0]]" in done.stdout, done.stderr
    spans = read_records(tmp_path / "runs" / "cook").spans
    pids = {
        name: {s.resource["process.pid"] for s in spans if s.name == name}
        for name in ("load_item", "next_batch")
    }
    assert [len(pids["load_item"]), len(pids["next_batch"])] == [1, 1]
    assert pids["load_item"] != pids["next_batch"]


@pytest.mark.timeout(170)
def test_rl(tmp_path):
    pytest.importorskip("ray")
    program = (
        "from lens_core import NemoLensConfig, setup_telemetry\n"
        "handle = setup_telemetry(NemoLensConfig.from_env())\n"
        + BLOCKS["rl"].replace("ray.init(", "ray.init(num_cpus=3, include_dashboard=False, ")
        + "handle.shutdown()\nray.shutdown()\n"
    )
    (tmp_path / "train.py").write_text(program)
    more = settings(tmp_path, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    done = run_shell("python train.py", tmp_path, **more)
    assert "[9.0, 9.0]" in done.stdout, done.stderr
    spans = read_records(tmp_path / "runs" / "cook").spans
    (step,) = [span for span in spans if span.name == "step"]
    calls = [span for span in spans if span.name.endswith(("generate", "reward"))]
    assert [call.parent_span_id for call in calls] == [step.span_id] * 4


#: Waits for a rank that never comes.
STUCK = """
import time
from lens_contrib.torch import waiting
from lens_core import NemoLensConfig, setup_telemetry
with setup_telemetry(NemoLensConfig.from_env()):
    with waiting("recv", peer=1):
        print("waits", flush=True)
        time.sleep(100)
"""


def test_it_hangs_and_it_was_killed(tmp_path):
    more = settings(tmp_path, RANK="0", WORLD_SIZE="2")
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], env={**os.environ, **more}, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"waits\n"
        looked = run_shell(
            BLOCKS["hangs"].replace("RUN_ID", "cook").replace(" #", " || true #"), tmp_path, **more
        )
        assert "recv" in looked.stdout, looked.stderr
        assert "time.sleep(100)" in looked.stdout or "<string>" in looked.stdout
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
    done = run_shell(BLOCKS["killed"].replace("RUN_ID", "cook"), tmp_path, **more)
    assert done.returncode == 0, done.stderr
    (span,) = [
        span for span in read_records(tmp_path / "runs" / "cook").spans if span.name == "recv"
    ]
    assert span.truncated


def test_jaeger(tmp_path):
    train = (
        "from lens_core import NemoLensConfig, managed_span, setup_telemetry\n"
        "with setup_telemetry(NemoLensConfig.from_env()), managed_span('job', 'pretrain'): pass\n"
    )
    (tmp_path / "train.py").write_text(train)
    with receiving() as receiver:
        block = BLOCKS["jaeger"].replace("http://jaeger:4318", receiver.endpoint)
        done = run_shell(block, tmp_path)
        assert done.returncode == 0, done.stderr
        assert [span.name for span, _ in receiver.spans()] == ["pretrain"]
