"""Settings: from the environment, never changed, never a reason to crash."""

import dataclasses
import logging

import pytest

from lens_core import NemoLensConfig
from lens_core.diagnostics import Diagnostics, diagnostics
from lens_core.errors import ConfigError
from lens_core.telemetry.export.otlp_settings import read_otlp_settings


def test_defaults():
    config = NemoLensConfig.from_env(environ={})
    assert config == NemoLensConfig()
    assert (config.enabled, config.exporter, config.span_groups) == (False, "otlp", "default")
    assert (config.traces_enabled, config.metrics_enabled, config.logs_enabled) == (
        True,
        True,
        False,
    )


def test_every_field_has_its_variable():
    environ = {}
    for field in dataclasses.fields(NemoLensConfig):
        default = getattr(NemoLensConfig(), field.name)
        value = str(not default) if isinstance(default, bool) else "console"
        environ[f"NEMO_LENS_{field.name.upper()}"] = {"journal": "all"}.get(field.name, value)
    config = NemoLensConfig.from_env(environ=environ)
    for field in dataclasses.fields(NemoLensConfig):
        assert getattr(config, field.name) != getattr(NemoLensConfig(), field.name), field.name


def test_prefix():
    config = NemoLensConfig.from_env("MY_APP", environ={"MY_APP_ENABLED": "on"})
    assert config.enabled


@pytest.mark.parametrize(
    ("name", "value"), [("ENABLED", "maybe"), ("LOGS_ENABLED", "2"), ("EXPORTER", "jaeger")]
)
def test_bad_value_warns_and_keeps_the_default(name, value, monkeypatch):
    messages = []
    monkeypatch.setattr(logging.getLogger("lens_core"), "warning", lambda *a: messages.append(a))
    monkeypatch.setattr("lens_core.telemetry.config.diagnostics", Diagnostics())
    environ = {f"NEMO_LENS_{name}": value}
    assert NemoLensConfig.from_env(environ=environ) == NemoLensConfig()
    assert NemoLensConfig.from_env(environ=environ) == NemoLensConfig()
    (only,) = messages
    assert f"NEMO_LENS_{name}={value!r}" in str(only)
    with pytest.raises(ConfigError, match=f"NEMO_LENS_{name}"):
        NemoLensConfig.from_env(environ=environ, strict=True)


def test_otlp_defaults():
    settings = read_otlp_settings("traces", environ={})
    assert settings.protocol == "http/protobuf"
    assert settings.endpoint == "http://localhost:4318/v1/traces"
    assert settings.timeout_s == 10


def test_otlp_variables_of_a_signal_win():
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://all:1/base/",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://metrics:2/exactly",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
        "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20x,a=b",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "only=traces",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "3",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1.5",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    traces, metrics, logs = (
        read_otlp_settings(signal, environ=environ) for signal in ("traces", "metrics", "logs")
    )
    assert traces.endpoint == "http://all:1/base/v1/traces"
    assert metrics.endpoint == "http://metrics:2/exactly"
    assert logs.endpoint == "http://all:1/base/", "gRPC has no path"
    assert (traces.protocol, logs.protocol) == ("http/json", "grpc")
    assert traces.headers == {"only": "traces"}
    assert metrics.headers == {"authorization": "Bearer x", "a": "b"}
    assert (traces.timeout_s, metrics.timeout_s) == (1.5, 3)
    assert traces.gzip


@pytest.mark.parametrize(
    ("name", "value"),
    [("PROTOCOL", "http/xml"), ("TIMEOUT", "10s"), ("TIMEOUT", "-1"), ("COMPRESSION", "zip")],
)
def test_bad_otlp_variable_keeps_the_default(name, value):
    before = diagnostics.count("config.invalid")
    settings = read_otlp_settings("traces", environ={f"OTEL_EXPORTER_OTLP_{name}": value})
    assert settings == read_otlp_settings("traces", environ={})
    assert diagnostics.count("config.invalid") == before + 1
