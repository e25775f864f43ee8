"""``lens doctor``: what telemetry would do in this environment, and what stands in its way."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lens_core import NemoLensConfig, span_registry
from lens_core.compat import check_private_names
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import ConfigError
from lens_core.global_textmap import get_global_textmap
from lens_core.identity.run import resolve_run_identity
from lens_core.telemetry.export.otlp_settings import SIGNALS, OtlpSettings, read_otlp_settings
from lens_core.telemetry.sampling import sampler_from_env

__all__ = ["Finding", "doctor", "examine"]

Verdict = Literal["ok", "note", "problem"]
_STYLES: Final = {"ok": "green", "note": "yellow", "problem": "bold red"}
_CONNECT_TIMEOUT_S: Final = 2.0
_PACKAGES: Final = ("opentelemetry-api", "opentelemetry-sdk", "torch", "ray", "msgpack")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What it is about.
        verdict: ``ok``, ``note`` (worth knowing) or ``problem`` (telemetry will not work so).
        text: What was found, and what to do about a problem.
    """

    subject: str
    verdict: Verdict
    text: str


@click.command()
def doctor() -> None:
    """Say what telemetry would do in this environment, and what stands in its way.

    Run it where a rank would run, with the same variables. Touches no global provider and sends no
    telemetry; it opens a connection to the configured OTLP endpoint and closes it. Exit status 1 if
    there is a problem.
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


def _versions() -> Iterator[Finding]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    yield Finding("versions", "ok", f"Python {platform.python_version()}, " + ", ".join(found))
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        yield Finding(
            "versions",
            "problem",
            "without the SDK nothing is recorded: pip install 'lens-otel[sdk]'",
        )


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
    for signal in SIGNALS:
        if signal not in signals:
            continue
        settings = read_otlp_settings(signal)
        try:
            host, port = _address(settings)
        except ValueError as error:
            yield Finding(
                "OTLP",
                "problem",
                f"{signal}: {settings.endpoint} is no endpoint for {settings.protocol} ({error}); "
                "correct OTEL_EXPORTER_OTLP_ENDPOINT",
            )
            continue
        where = f"{signal} by {settings.protocol} to {settings.endpoint}"
        try:
            with socket.create_connection((host, port), _CONNECT_TIMEOUT_S):
                yield Finding("OTLP", "ok", f"{where}: something answers there")
        except OSError as error:
            yield Finding(
                "OTLP",
                "problem",
                f"{where}: {error.strerror or error}; start the collector, or set "
                "OTEL_EXPORTER_OTLP_ENDPOINT",
            )


def _address(settings: OtlpSettings) -> tuple[str, int]:
    """Host and port of an endpoint.

    Raises:
        ValueError: If the exporter could not use it.
    """
    endpoint, grpc = settings.endpoint, settings.protocol == "grpc"
    parts = urlsplit(endpoint if "//" in endpoint or not grpc else f"//{endpoint}")
    if not grpc and parts.scheme not in ("http", "https"):
        raise ValueError("it does not start with http:// or https://")
    if not parts.hostname:
        raise ValueError("it names no host")
    default = 443 if parts.scheme == "https" else 4317 if grpc else 80
    return parts.hostname, parts.port or default


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


def _propagation() -> Iterator[Finding]:
    for problem in check_private_names():
        yield Finding("propagators", "note", f"opentelemetry-api has no {problem}")
    fields = sorted(get_global_textmap().fields)
    if diagnostics.count("propagators.invalid"):
        yield Finding(
            "propagators",
            "problem",
            f"OTEL_PROPAGATORS={os.environ.get('OTEL_PROPAGATORS')!r} cannot be loaded; "
            f"using {', '.join(fields)}",
        )
    elif not fields:
        yield Finding(
            "propagators",
            "problem",
            f"OTEL_PROPAGATORS={os.environ.get('OTEL_PROPAGATORS')!r}: no context is carried; "
            "unset it, or name tracecontext and baggage",
        )
    elif "traceparent" not in fields:
        yield Finding(
            "propagators",
            "note",
            f"headers are {', '.join(fields)}; frames are made for traceparent",
        )
    else:
        yield Finding("propagators", "ok", f"headers {', '.join(fields)}")


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "note", "not installed; collectives and sends carry nothing")
        return
    import torch  # noqa: PLC0415 - seconds, and may be missing
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_available():
        yield Finding("torch", "problem", "this build of torch has no torch.distributed")
        return
    found = [
        name
        for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
        if there
    ]
    yield Finding("torch", "ok", f"back ends {', '.join(found) or 'none'}")
    # What the adapters rely on is private in torch.
    from lens_contrib.pipelining.compat import check_private_names as of_pipelining  # noqa: PLC0415
    from lens_contrib.torch.compat import check_private_names as of_torch  # noqa: PLC0415

    for problem in (*of_torch(), *of_pipelining()):
        yield Finding("torch", "problem", f"torch {torch.__version__} has no {problem}")


def _ray() -> Iterator[Finding]:
    if importlib.util.find_spec("ray") is None:
        yield Finding("Ray", "note", "not installed; calls carry nothing")
        return
    import ray  # noqa: PLC0415 - seconds, and may be missing

    from lens_contrib.ray.compat import check_private_names as of_ray  # noqa: PLC0415

    # What the decorator relies on is private in Ray.
    for problem in (problems := of_ray()):
        yield Finding("Ray", "problem", f"Ray {ray.__version__} has no {problem}")
    if problems:
        return
    yield Finding("Ray", "ok", f"Ray {ray.__version__} carries contexts on decorated calls")


_EXAMINATIONS: Final[dict[str, Callable[[], Iterator[Finding]]]] = {
    "versions": _versions,
    "settings": _settings,
    "run id": _identity,
    "propagators": _propagation,
    "torch": _torch,
    "Ray": _ray,
}
