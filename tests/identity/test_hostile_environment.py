"""Garbage in the environment: an error at set-up, counted later, never raised into a step."""

import os

import pytest

from lens_core.diagnostics import diagnostics
from lens_core.identity import (
    current_identity,
    install_identity,
    reset_identity,
    run_key_from_environment,
    step_span,
)
from lens_core.identity.run import resolve_run_identity, run_attempt
from lens_core.telemetry.resources import detect_attributes

GARBAGE = ["²", "٣", "-1", "abc", "9" * 5000]


@pytest.fixture
def not_installed():
    token = install_identity(None)
    yield
    install_identity(None)
    reset_identity(token)


def test_a_key_that_is_none_does_not_raise_into_a_step(not_installed, monkeypatch, recording):
    monkeypatch.setenv("NEMO_LENS_RUN_KEY", "hello")
    before = diagnostics.count("identity.random")
    for step in range(3):
        with step_span(step, tracer=recording.tracer):
            pass
    assert {span.attributes["lens.identity"] for span in recording.spans} == {"random"}
    assert len({span.context.trace_id for span in recording.spans}) == 3
    assert diagnostics.count("identity.random") == before + 1


def test_an_id_that_is_no_utf_8_is_a_key_all_the_same():
    name = os.fsdecode(b"\xff-" + b"0f" * 16)
    assert run_key_from_environment({"TORCHELASTIC_RUN_ID": name}).agreed


@pytest.mark.parametrize("text", GARBAGE)
def test_a_rank_that_is_no_number_is_rank_0(not_installed, monkeypatch, text):
    monkeypatch.setenv("RANK", text)
    monkeypatch.setenv("NEMO_LENS_RUN_KEY", "ab" * 16)
    assert current_identity().rank == 0
    assert "nv.dl.rank" not in detect_attributes({"RANK": text})


@pytest.mark.parametrize("text", GARBAGE)
def test_a_count_of_restarts_that_is_no_number_is_0(text):
    for name in (
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "SLURM_RESTART_COUNT",
    ):
        assert resolve_run_identity("x", environ={name: text}).attempt == 0


def test_the_attempt_is_an_attribute_however_large_the_counts_are():
    largest = str(10**9)
    counts = {"SLURM_RESTART_COUNT": largest, "TORCHELASTIC_RESTART_COUNT": largest}
    assert 0 < run_attempt(counts) < 2**63
