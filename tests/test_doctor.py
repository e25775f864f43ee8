"""``lens doctor`` names what stands in the way, and says what to do about it."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ahead import started
from tests.telemetry.harness import receiving
from tests.telemetry.test_misbehaving_receivers import grpc_server, server

LENS = Path(sys.executable).with_name("lens")


OTLP = {"NEMO_LENS_ENABLED": "1", "NEMO_LENS_EXPORTER": "otlp"}


def doctor(**env):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NEMO_", "OTEL_"))}
    done = subprocess.run(
        [LENS, "doctor"],
        env={**environment, "COLUMNS": "600", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def test_a_sound_environment_is_sound(tmp_path):
    status, text = doctor(
        NEMO_LENS_ENABLED="1",
        NEMO_LENS_EXPORTER="file",
        NEMO_LENS_OUTPUT_DIR=str(tmp_path / "runs"),
        NEMO_LENS_RUN_ID="mine",
    )
    assert status == 0
    assert "problem" not in text
    assert "mine (from" in text
    assert f"runs go to {tmp_path}" in text
    assert "carries contexts on decorated calls" in text
    assert "back ends gloo" in text
    assert not (tmp_path / "runs").exists()


def test_disabled_is_said_and_is_no_problem():
    status, text = doctor()
    assert status == 0
    assert "NEMO_LENS_ENABLED=1 enables" in text
    assert "each process would have another" in text


def test_an_otlp_endpoint_that_answers_and_one_that_does_not():
    with receiving() as receiver:
        there = {**OTLP, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        status, text = doctor(**there)
        assert status == 0
        assert "traces by http/protobuf" in text
        assert text.count("an empty request was taken") == 2
        assert receiver.spans() == []
    status, text = doctor(**there)
    assert status == 1
    assert "Connection refused" in text


#: What is wrong in an environment, and what is said of it.
WRONG = {
    "switch": ({"NEMO_LENS_ENABLED": "perhaps"}, "NEMO_LENS_ENABLED='perhaps' is not valid"),
    "propagator": (
        {"OTEL_PROPAGATORS": "nonesuch"},
        "OTEL_PROPAGATORS='nonesuch' cannot be loaded",
    ),
    "nowhere to write": (
        {
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_EXPORTER": "file",
            "NEMO_LENS_OUTPUT_DIR": "/proc/nonesuch",
        },
        "/proc/nonesuch cannot be written",
    ),
    "no journal": (
        {
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_EXPORTER": "journal",
            "NEMO_LENS_JOURNAL_DIR": "/proc/nonesuch",
        },
        "spans do not survive a killed process, and go to files instead; set NEMO_LENS_JOURNAL_DIR",
    ),
    "a long name": (
        {
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_EXPORTER": "file",
            "NEMO_LENS_OUTPUT_DIR": "x" * 300,
        },
        "cannot be written (File name too long); set NEMO_LENS_OUTPUT_DIR",
    ),
    "second bad value": (
        {"NEMO_LENS_TRACES_ENABLED": "1", "NEMO_LENS_JOURNAL": "b", "NEMO_LENS_ENABLED": "a"},
        "NEMO_LENS_JOURNAL='b' is not valid",
    ),
    "no propagation": (
        {"OTEL_PROPAGATORS": "none"},
        "OTEL_PROPAGATORS='none': no context is carried",
    ),
    "a port": (
        {**OTLP, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:99999"},
        "http://127.0.0.1:99999/v1/traces is no endpoint for http/protobuf (Port out of range",
    ),
    "no scheme": (
        {**OTLP, "OTEL_EXPORTER_OTLP_ENDPOINT": "127.0.0.1:4318"},
        "(it does not start with http:// or https://); correct OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    "a port that takes no OTLP": (
        {**OTLP, "OTEL_EXPORTER_OTLP_ENDPOINT": "{page}"},
        "answered 200 with text/html, which is no answer of OTLP",
    ),
    "a secret in the endpoint": (
        {**OTLP, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:PASS@127.0.0.1:9/TOKEN"},
        "traces by http/protobuf to http://127.0.0.1:9/.../v1/traces is not taken",
    ),
    "http to a gRPC port": (
        {**OTLP, "OTEL_EXPORTER_OTLP_ENDPOINT": "{grpc}"},
        "is not taken: http://127.0.0.1",
    ),
    "gRPC to an http port": (
        {**OTLP, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": "{page}"},
        "is not taken: http://127.0.0.1",
    ),
    "sampler": (
        {**OTLP, "OTEL_TRACES_SAMPLER": "nonesuch"},
        "OTEL_TRACES_SAMPLER=nonesuch is not valid; ParentBased",
    ),
    "a share": (
        {
            **OTLP,
            "OTEL_TRACES_SAMPLER": "traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "5",
        },
        "OTEL_TRACES_SAMPLER=traceidratio OTEL_TRACES_SAMPLER_ARG=5 is not valid",
    ),
}


@pytest.fixture(scope="module")
def answers(request):
    page = lambda to, _: to.reply(200, b"<html>", "text/html")  # noqa: E731
    with server(page) as (page_at, _), grpc_server(lambda body, _: b"") as (grpc_at, _):

        def work(env):
            fill = {name: text.format(page=page_at, grpc=grpc_at) for name, text in env.items()}
            return doctor(**fill)

        works = {name: functools.partial(work, env) for name, (env, _) in WRONG.items()}
        with started(request, works, at_once=2) as running:
            yield running


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name, answers):
    status, text = answers[name].result()
    assert status == 1
    assert WRONG[name][1] in text
    assert "PASS" not in text
    assert "TOKEN" not in text


def test_that_nothing_would_be_sampled_is_worth_a_note(tmp_path):
    status, text = doctor(
        NEMO_LENS_ENABLED="1",
        NEMO_LENS_EXPORTER="file",
        NEMO_LENS_OUTPUT_DIR=str(tmp_path),
        NEMO_LENS_SPAN_GROUPS="default,nonesuch",
        OTEL_TRACES_SAMPLER="always_off",
    )
    assert status == 0
    assert "OTEL_TRACES_SAMPLER=always_off: no trace that starts here is recorded" in text
    assert "span groups nonesuch are none that is known here" in text
