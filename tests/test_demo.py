"""``lens demo``: the main job, run whole, and what it says when a hop does not resolve."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lens_tools.records.read import read_records
from tests.telemetry.harness import receiving

pytest.importorskip("ray")
pytest.importorskip("torch")

from lens_tools.demo.session import report_hops
from lens_tools.demo.text import load_corpus

LENS = Path(sys.executable).with_name("lens")
STEPS, RANKS, MICROBATCHES = 10, 2, 4


def lens_demo(*arguments, cwd, **env):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NEMO_", "OTEL_"))}
    return subprocess.run(
        [LENS, "demo", *arguments],
        cwd=cwd,
        env={**environment, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    done = lens_demo(
        f"--ranks={RANKS}",
        f"--steps={STEPS}",
        cwd=folder,
        NEMO_LENS_RUN_ID="a run",
        # As where a training job runs: other settings, another cluster.
        NEMO_LENS_TRACES_ENABLED="0",
        OTEL_TRACES_SAMPLER="always_off",
        RAY_ADDRESS="192.0.2.1:6379",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done, folder / "runs" / "a_run"


def test_every_hop_resolves_to_its_true_sender(run):
    done, _ = run
    rows = {
        match[1]: tuple(int(number) for number in match.groups()[1:])
        for match in re.finditer(
            r"│ (\S+)\s+│\s+(\d+) │\s+(\d+) │\s+(\d+)   100\.0% │", done.stdout
        )
    }
    point_to_point = STEPS * MICROBATCHES * 2 * (RANKS - 1)
    ray_calls = RANKS * (STEPS + 2) + 1  # each step, forming the group, saving; one sample
    assert rows == {
        "nccl": (point_to_point,) * 3,
        "torch.broadcast": (STEPS * (RANKS - 1),) * 3,
        "ray": (ray_calls,) * 3,
    }


def test_the_loss_falls_and_a_sample_is_shown(run):
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", run[0].stdout).groups())
    assert last < first
    assert "the model writes: '\\n\\nThe " in run[0].stdout


def test_the_run_is_one_file_per_process_and_one_trace_from_driver_to_microbatch(run):
    _, directory = run
    result = read_records(directory)
    assert result.problems == []
    # The driver, the stages, the sampler.
    assert len({span.source for span in result.spans}) == RANKS + 2
    assert {span.resource["nemo.run.id"] for span in result.spans} == {"a run"}
    assert {span.rank for span in result.spans} == {None, *range(RANKS)}
    by_key = {span.key: span for span in result.spans}
    receives = [span for span in result.spans if span.name == "pp.recv_forward"]
    assert len(receives) == STEPS * MICROBATCHES * (RANKS - 1)
    for span in receives:
        names = [span.name]
        while span.parent_span_id:
            span = by_key[span.trace_id, span.parent_span_id]
            names.append(span.name)
        assert names == [
            "pp.recv_forward",
            "train.step",
            "StageActor.train_step",
            "call train_step",
            "job",
        ]


EXPECTED = {
    "ray": RANKS * (STEPS + 2) + 1,
    "torch.broadcast": STEPS * (RANKS - 1),
    "nccl": STEPS * MICROBATCHES * 2 * (RANKS - 1),
}


@pytest.mark.parametrize("transport", EXPECTED)
@pytest.mark.parametrize("harm", ["points elsewhere", "lost"])
def test_one_hop_that_does_not_resolve_fails_the_run(run, tmp_path, transport, harm):
    _, directory = run
    assert report_hops(Console(quiet=True), read_records(directory), EXPECTED)
    harmed = False
    for path in directory.glob("*.jsonl"):
        lines = []
        for line in path.read_text().splitlines():
            message = json.loads(line)
            for spans in (
                scope["spans"]
                for resource in message.get("resourceSpans", ())
                for scope in resource["scopeSpans"]
            ):
                for span in list(spans):
                    attributes = {a["key"]: a["value"] for a in span.get("attributes", ())}
                    if (
                        not harmed
                        and attributes.get("lens.transport") == {"stringValue": transport}
                        and attributes.get("lens.hop.direction") == {"stringValue": "recv"}
                    ):
                        harmed = True
                        if harm == "lost":
                            spans.remove(span)
                        elif "links" in span:
                            span["links"][0]["spanId"] = "1" * 16
                        else:
                            span["parentSpanId"] = "1" * 16
            lines.append(json.dumps(message))
        (tmp_path / path.name).write_text("\n".join(lines) + "\n")
    assert harmed
    assert not report_hops(Console(quiet=True), read_records(tmp_path), EXPECTED)


def test_a_collector_gets_every_span_too(tmp_path):
    with receiving() as receiver:
        done = lens_demo(
            f"--ranks={RANKS}", "--steps=10", f"--otlp={receiver.endpoint}", cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        received = [span.span_id.hex() for span, _ in receiver.spans()]
    (directory,) = (tmp_path / "runs").iterdir()
    assert sorted(received) == sorted(span.span_id for span in read_records(directory).spans)


def test_an_existing_run_is_not_written_over(run):
    _, directory = run
    done = lens_demo(cwd=directory.parent.parent, NEMO_LENS_RUN_ID="a run")
    assert done.returncode == 2
    assert "exists; set another NEMO_LENS_RUN_ID" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--text", "short.txt"], "has 5 characters; training needs at least"),
        (["--text", "binary.txt"], "is not UTF-8 text"),
        (["--text", "nonesuch.txt"], "does not exist"),
        (["--ranks", "1"], "not in the range"),
        (["--steps", "0"], "not in the range"),
        (["--out", "short.txt"], "is a file"),
        (["--out", "short.txt/runs"], "Not a directory; set another --out"),
        (["--out", "/proc/runs"], "No such file or directory; set another --out"),
        (["--out", "x" * 300], "File name too long; set another --out"),
        (["--otlp", "not a url"], "is no URL such as http://127.0.0.1:4318"),
        (["--otlp", "127.0.0.1:4318"], "is no URL such as http://127.0.0.1:4318"),
        (["--otlp", "http://127.0.0.1:port"], "is no URL such as http://127.0.0.1:4318"),
    ],
)
def test_bad_arguments_are_one_clear_line(tmp_path, arguments, problem):
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 5000)
    done = lens_demo(*arguments, cwd=tmp_path, COLUMNS="1000")
    assert done.returncode == 2
    assert problem in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_PROPAGATORS", "baggage")]
)
def test_an_environment_in_which_no_hop_can_resolve_is_refused_at_once(tmp_path, variable, value):
    done = lens_demo(cwd=tmp_path, **{variable: value})
    assert done.returncode == 2
    assert variable in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_text_is_read_up_to_a_length_that_every_process_can_hold(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("日b" * 2_500_000)
    assert len(load_corpus(path).ids) == 4_000_000
