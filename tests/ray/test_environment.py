"""What travels to the workers."""

from __future__ import annotations

import os

import pytest

from lens_contrib.ray import runtime_env
from lens_core import NemoLensConfig, setup_telemetry


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("NEMO_LENS_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_settings_travel_and_the_users_own_win(monkeypatch, tmp_path):
    monkeypatch.setenv("NEMO_LENS_ENABLED", "1")
    monkeypatch.setenv("NEMO_LENS_OUTPUT_DIR", "out")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "driver")
    monkeypatch.setenv("UNRELATED", "x")
    existing = {"pip": ["numpy"], "env_vars": {"OTEL_SERVICE_NAME": "worker", "MINE": "y"}}
    assert runtime_env(existing) == {
        "pip": ["numpy"],
        "env_vars": {
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_OUTPUT_DIR": str(tmp_path / "out"),
            "OTEL_SERVICE_NAME": "worker",
            "MINE": "y",
        },
    }
    assert existing["env_vars"] == {"OTEL_SERVICE_NAME": "worker", "MINE": "y"}


def test_the_run_id_of_this_process_travels(tmp_path):
    config = NemoLensConfig(enabled=True, exporter="none", run_id="chosen")
    with setup_telemetry(config):
        assert runtime_env()["env_vars"]["NEMO_LENS_RUN_ID"] == "chosen"


def test_a_config_travels_as_the_variables_that_give_it_back(tmp_path):
    config = NemoLensConfig(
        enabled=True, exporter="file", run_id="r", metrics_enabled=False, output_dir=str(tmp_path)
    )
    variables = runtime_env(config=config)["env_vars"]
    assert NemoLensConfig.from_env(environ=variables, strict=True) == config


def test_env_vars_that_are_no_mapping_are_an_error():
    with pytest.raises(TypeError, match="env_vars"):
        runtime_env({"env_vars": ["A=1"]})
