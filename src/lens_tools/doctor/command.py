"""``lens doctor``: what telemetry would do in this environment, and what stands in its way."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click
from opentelemetry.sdk.resources import Resource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lens_core import NemoLensConfig, span_registry
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import ConfigError
from lens_core.identity.run import resolve_run_identity
from lens_core.journal.location import journal_directory
from lens_core.telemetry.config import JOURNAL_MODES
from lens_core.telemetry.export.destinations import LOGS, METRICS, SPANS, otlp_sink
from lens_core.telemetry.export.endpoints import shown_endpoint
from lens_core.telemetry.export.otlp_settings import OtlpSettings, read_otlp_settings
from lens_core.telemetry.journaling import JournalPlan
from lens_core.telemetry.pipeline.export_result import Outcome
from lens_core.telemetry.sampling import sampler_from_env
from lens_tools.doctor.libraries import (
    Finding,
    examine_propagators,
    examine_ray,
    examine_torch,
    examine_versions,
)

__all__ = ["Finding", "doctor", "examine"]

_STYLES: Final = {"ok": "green", "note": "yellow", "problem": "bold red"}
_PROBE_TIMEOUT_S: Final = 3.0


@click.command()
def doctor() -> None:
    """Say what telemetry would do in this environment, and what stands in its way.

    Run it where a rank would run, with the same variables. Touches no global provider and sends no
    telemetry; it sends one empty request to each configured OTLP endpoint, so that its answer is
    that which exporters would get. Exit status 1 if there is a problem.
    """
    findings = list(examine())
    table = Table("", "what", "found", show_lines=False)
    for finding in findings:
        style = _STYLES[finding.verdict]
        # Not markup: a text may hold brackets, such as the name of an extra.
        table.add_row(Text(finding.verdict, style), finding.subject, Text(finding.text))
    Console().print(table)
    sys.exit(any(finding.verdict == "problem" for finding in findings))


def examine() -> Iterator[Finding]:
    """Everything that the doctor looks at, in order. Never raises."""
    for subject, look in _EXAMINATIONS.items():
        try:
            yield from look()
        except Exception as error:  # noqa: BLE001 - one broken part must not hide the others
            yield Finding(subject, "problem", describe(error))


def _settings() -> Iterator[Finding]:
    for name, value in sorted(os.environ.items()):
        # One by one: a bad value must not hide the next.
        try:
            NemoLensConfig.from_env(environ={name: value}, strict=True)
        except ConfigError as error:
            yield Finding("settings", "problem", str(error))
    config = NemoLensConfig.from_env()
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Finding("settings", "note", "OTEL_SDK_DISABLED=true: nothing is recorded")
    if not config.enabled:
        yield Finding("settings", "note", "telemetry is disabled here; NEMO_LENS_ENABLED=1 enables")
        return
    signals = [
        name
        for name, enabled in (
            ("traces", config.traces_enabled),
            ("metrics", config.metrics_enabled),
            ("logs", config.logs_enabled),
        )
        if enabled
    ]
    yield Finding(
        "settings",
        "ok",
        f"enabled, exporter {config.exporter}, {' + '.join(signals) or 'no signal'}, "
        f"span groups {config.span_groups}",
    )
    unknown = span_registry.resolve(config.span_groups).unknown
    if unknown:
        known = ", ".join(sorted({*span_registry.presets(), *span_registry.groups()}))
        yield Finding(
            "settings",
            "note",
            f"span groups {', '.join(unknown)} are none that is known here ({known}); "
            "a library may register them later",
        )
    if config.traces_enabled:
        yield _sampling()
    if config.exporter == "otlp":
        yield from _otlp(signals)
    elif config.exporter != "console":
        yield _writable(Path(config.output_dir))
    if config.traces_enabled and config.journal in JOURNAL_MODES:
        yield _journal(config)


def _sampling() -> Finding:
    bad_before = diagnostics.count("config.invalid")
    description = sampler_from_env().get_description()
    named = "=".join(("OTEL_TRACES_SAMPLER", os.environ.get("OTEL_TRACES_SAMPLER", "")))
    if argument := os.environ.get("OTEL_TRACES_SAMPLER_ARG", ""):
        named += f" OTEL_TRACES_SAMPLER_ARG={argument}"
    if diagnostics.count("config.invalid") > bad_before:
        return Finding("sampling", "problem", f"{named} is not valid; {description} is used")
    if named.lower().strip().endswith("always_off"):
        return Finding("sampling", "note", f"{named}: no trace that starts here is recorded")
    return Finding("sampling", "ok", description)


def _otlp(signals: list[str]) -> Iterator[Finding]:
    for signal in (SPANS, METRICS, LOGS):
        if signal.otlp_name not in signals:
            continue
        settings = read_otlp_settings(signal.otlp_name)
        endpoint = shown_endpoint(settings.endpoint)
        where = f"{signal.otlp_name} by {settings.protocol} to {endpoint}"
        try:
            _check_address(settings)
        except ValueError as error:
            yield Finding(
                "OTLP",
                "problem",
                f"{signal.otlp_name}: {endpoint} is no endpoint for {settings.protocol} ({error}); "
                "correct OTEL_EXPORTER_OTLP_ENDPOINT",
            )
            continue
        # What an exporter would send, with nothing in it: only a receiver of OTLP takes that.
        with closing(otlp_sink(signal, os.environ)) as sink:
            result = sink.send([], _PROBE_TIMEOUT_S)
        if result.outcome is Outcome.SENT:
            yield Finding("OTLP", "ok", f"{where}: an empty request was taken")
        else:
            yield Finding("OTLP", "problem", f"{where} is not taken: {result.why}")


def _check_address(settings: OtlpSettings) -> None:
    """Check what can be seen of an endpoint without asking it.

    Raises:
        ValueError: If the exporter could not use it.
    """
    endpoint, grpc = settings.endpoint, settings.protocol == "grpc"
    parts = urlsplit(endpoint if "//" in endpoint or not grpc else f"//{endpoint}")
    if not grpc and parts.scheme not in ("http", "https"):
        raise ValueError("it does not start with http:// or https://")
    if not parts.hostname:
        raise ValueError("it names no host")
    _ = parts.port  # raises where it is no port


def _writable(directory: Path) -> Finding:
    try:
        place = directory
        while not place.exists() and place != place.parent:
            place = place.parent
        with tempfile.NamedTemporaryFile(dir=place):
            return Finding("files", "ok", f"runs go to {directory.resolve()}")
    except OSError as error:
        return Finding(
            "files",
            "problem",
            f"{directory.resolve()} cannot be written ({error.strerror}); set NEMO_LENS_OUTPUT_DIR",
        )


def _journal(config: NemoLensConfig) -> Finding:
    """Whether spans would survive their process's being killed."""
    plan = JournalPlan(config, "doctor", Resource.get_empty(), Path(config.output_dir), False)
    if plan.keeps is None:
        return Finding("journal", "ok", "none is kept: open spans are lost with a killed process")
    directory = journal_directory(config.journal_dir, "doctor")
    found = _writable(directory.parent)
    kept = "spans that are open" if plan.keeps == "open" else "all spans until they are exported"
    if found.verdict == "ok":
        return Finding("journal", "ok", f"{kept}, in {directory.parent}")
    return Finding(
        "journal",
        "problem",
        f"{directory.parent} cannot be written: spans do not survive a killed process"
        f"{', and go to files instead' if plan.keeps == 'ship' else ''}; set NEMO_LENS_JOURNAL_DIR",
    )


def _identity() -> Iterator[Finding]:
    identity = resolve_run_identity(NemoLensConfig.from_env().run_id)
    text = f"{identity.run_id} (from {identity.source}), attempt {identity.attempt}"
    if identity.source == "random":
        yield Finding(
            "run id",
            "note",
            f"{text}: each process would have another; set NEMO_LENS_RUN_ID, or use a launcher",
        )
    else:
        yield Finding("run id", "ok", text)


_EXAMINATIONS: Final[dict[str, Callable[[], Iterator[Finding]]]] = {
    "versions": examine_versions,
    "settings": _settings,
    "run id": _identity,
    "propagators": examine_propagators,
    "torch": examine_torch,
    "Ray": examine_ray,
}
