"""What lens exports and recovers arrives whole in a receiver that is not ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import real_receiver

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
LENS = Path(sys.executable).with_name("lens")

PROGRAM = """
import os, signal
from lens_core import NemoLensConfig, linked_span, managed_span, setup_telemetry
handle = setup_telemetry(NemoLensConfig.from_env(), resource_attributes={"nv.dl.rank": 3})
with handle.tracer.start_as_current_span("sender") as sender:
    span = sender.get_span_context()
carrier = {"traceparent": f"00-{span.trace_id:032x}-{span.span_id:016x}-01"}
with linked_span(
    handle.tracer, "receiver", remote_carrier=carrier, link_attributes={"lens.peer.rank": 7}, step=5
) as receiver:
    receiver.add_event("here")
    if os.environ.get("DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
handle.shutdown()
"""


@pytest.fixture(scope="module")
def receiver(tmp_path_factory):
    if not real_receiver.PROGRAM.exists():
        reason = f"{real_receiver.PROGRAM} is not installed; `make test` installs it"
        if IN_CI:
            pytest.fail(reason)
        pytest.skip(reason)
    with real_receiver.running(tmp_path_factory.mktemp("receiver")) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_of_before(receiver):
    receiver.clear()


def run_program(directory, **env):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NEMO_", "OTEL_"))}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            **environment,
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_RUN_ID": "real",
            "NEMO_LENS_OUTPUT_DIR": str(directory / "runs"),
            "NEMO_LENS_JOURNAL_DIR": str(directory / "journals"),
            **env,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def check_pair(spans):
    """Both spans, whole: ids, link, attributes, event, resource; gives the receiver's."""
    by_name = {span["name"]: span for span in spans}
    assert sorted(by_name) == ["receiver", "sender"]
    assert len(spans) == 2
    receiver_span, sender_span = by_name["receiver"], by_name["sender"]
    assert receiver_span["parent"] == ""
    ((linked, attributes),) = receiver_span["links"]
    assert linked == sender_span["span_id"]
    assert int(attributes["lens.peer.rank"]) == 7
    assert int(receiver_span["attributes"]["step"]) == 5
    assert "here" in receiver_span["events"]
    for span in spans:
        assert span["resource"]["nemo.run.id"] == "real"
        assert int(span["resource"]["nv.dl.rank"]) == 3
    return receiver_span


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json", "grpc"])
def test_exported_spans_arrive_whole(receiver, tmp_path, protocol):
    done = run_program(
        tmp_path,
        NEMO_LENS_EXPORTER="otlp",
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.grpc if protocol == "grpc" else receiver.http,
        NEMO_LENS_METRICS_ENABLED="0",
    )
    assert done.returncode == 0, done.stderr
    span = check_pair(receiver.spans())
    assert "nemo.span.truncated" not in span["attributes"]


def test_spans_of_a_killed_process_arrive_like_any_others(receiver, tmp_path):
    done = run_program(tmp_path, NEMO_LENS_EXPORTER="journal", DIES="1")
    assert done.returncode == -9
    recover = [LENS, "recover", tmp_path / "journals", "--otlp", receiver.http]
    for _ in range(2):  # the second finds nothing to do
        shipped = subprocess.run(recover, capture_output=True, text=True, timeout=60)
        assert shipped.returncode == 0, shipped.stdout + shipped.stderr
    span = check_pair(receiver.spans())
    assert span["attributes"]["nemo.span.truncated"] is True
    assert "nemo.span.truncated" in span["events"]


def test_a_run_that_is_not_there_is_not_called_recovered(tmp_path):
    done = subprocess.run(
        [LENS, "recover", tmp_path / "nonesuch"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "neither a directory nor a run with journals" in done.stderr
