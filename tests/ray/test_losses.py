"""However a worker ends, what had ended in it arrives: 50 of 50 spans, each once."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from lens_core.journal.recover.recovery import DirectorySink, recover
from tests.ahead import started
from tests.ray.losses import CALLS, SCENARIOS
from tests.ray.spans import read_spans
from tests.telemetry.harness import receiving, unused_endpoint

SCRIPT = Path(__file__).with_name("losses.py")
#: These differ by what happens to the cluster, so they have one of their own.
OWN_CLUSTER = {
    "actor_then_exit",
    "async_actor_then_exit",
    "tasks_then_shutdown",
    "actor_then_shutdown",
    "idle_worker_is_reaped",
}


def run_scenario(name, tmp_path, address, **variables):
    arguments = [name] if name in OWN_CLUSTER else [name, address]
    paths = [str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env={
            **os.environ,
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_EXPORTER": "file",
            "NEMO_LENS_OUTPUT_DIR": str(tmp_path),
            "NEMO_LENS_JOURNAL_DIR": str(tmp_path / "journals"),
            "NEMO_LENS_RUN_ID": name,
            "LOSSES_MARKER": str(tmp_path / "marker"),
            "PYTHONPATH": os.pathsep.join(paths),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture(scope="module")
def on_own_clusters(request, tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in OWN_CLUSTER}
    works = {
        name: functools.partial(run_scenario, name, folder, None)
        for name, folder in folders.items()
    }
    with started(request, works, at_once=2) as running:
        yield folders, running


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sorted(SCENARIOS, key=OWN_CLUSTER.__contains__))
def test_every_ended_span_arrives_once(cluster, on_own_clusters, tmp_path, name):
    if name in OWN_CLUSTER:
        folders, running = on_own_clusters
        tmp_path, done = folders[name], running[name].result()
    else:
        done = run_scenario(name, tmp_path, ray.get_runtime_context().gcs_address)
    assert done.returncode == (-signal.SIGKILL if name == "driver_is_killed" else 0), done.stderr
    written = [span for span in read_spans(tmp_path / name) if span.name.endswith("work")]
    assert len(written) == CALLS
    # What a journal may still hold adds nothing that is there already.
    recover([tmp_path / "journals" / name], lambda meta: DirectorySink(tmp_path / name))
    spans = [span for span in read_spans(tmp_path / name) if span.name.endswith("work")]
    assert len(spans) == len({span.span_id for span in spans}) == CALLS


@pytest.mark.timeout(180)
def test_what_killed_workers_could_not_send_is_shipped_later_once(cluster, tmp_path):
    name = "actor_is_killed"
    done = run_scenario(
        name,
        tmp_path,
        ray.get_runtime_context().gcs_address,
        NEMO_LENS_EXPORTER="otlp",
        OTEL_EXPORTER_OTLP_ENDPOINT=unused_endpoint(),
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / name).mkdir(exist_ok=True)
    with receiving() as receiver:
        command = [sys.executable, "-m", "lens_tools.cli", "ship", tmp_path / name]
        for _ in range(2):
            shipped = subprocess.run(
                [*command, "--otlp", receiver.endpoint],
                env={**os.environ, "NEMO_LENS_JOURNAL_DIR": str(tmp_path / "journals")},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert shipped.returncode == 0, shipped.stdout + shipped.stderr
        spans = [
            span
            for message in receiver.of("/v1/traces")
            for resource in message["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
            if span["name"].endswith("work")
        ]
    assert len(spans) == len({span["spanId"] for span in spans}) == CALLS
    assert "sent 0 spans" in shipped.stdout
