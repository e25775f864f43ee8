"""Variables of OpenTelemetry whose bad value would stop the job.

The API and the SDK raise for some of them, at import or when a provider is made or asked for. A
wrong variable must not stop a training job, so they are out of the way while telemetry is set up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Final

from lens_core.diagnostics import diagnostics
from lens_core.errors import ConfigError

__all__ = ["usable_environment"]

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "OTEL_METRICS_EXEMPLAR_FILTER": ("always_on", "always_off", "trace_based"),
}
#: By the group of the entry points that the API looks the name up in.
_PROVIDERS: Final[Mapping[str, str]] = {
    "OTEL_PYTHON_TRACER_PROVIDER": "opentelemetry_tracer_provider",
    "OTEL_PYTHON_METER_PROVIDER": "opentelemetry_meter_provider",
    "OTEL_PYTHON_LOGGER_PROVIDER": "opentelemetry_logger_provider",
}


@contextmanager
def usable_environment() -> Iterator[None]:
    """A block without the variables that would make the SDK raise; each is a diagnostic."""
    bad = {}
    for name, text in os.environ.items():
        expected = _what_is_expected(name, text)
        if expected:
            bad[name] = text
            error = ConfigError(name, text, expected)
            todo = f"Correct {name}; its default is used."
            diagnostics.record("config.invalid", str(error), todo=todo)
    for name in bad:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(bad)


def _what_is_expected(name: str, text: str) -> str:
    """What the variable should hold; empty where it can be left to the SDK."""
    if not name.startswith("OTEL_"):
        return ""
    if name.endswith("_LIMIT"):
        word = text.strip()
        return "" if not word or (word.isascii() and word.isdigit()) else "a number from 0"
    allowed = _CHOICES.get(name)
    if allowed is None and (group := _PROVIDERS.get(name)) is not None:
        allowed = tuple(sorted({entry.name for entry in entry_points(group=group)}))
    if allowed is None or text in allowed:
        return ""
    return "one of " + ", ".join(allowed)
