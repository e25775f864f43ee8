"""Where OTLP goes, as the OpenTelemetry specification's variables say.

``OTEL_EXPORTER_OTLP_*``, each overridden by its form for one signal, such as
``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``. A bad value is a diagnostic (``config.invalid``) and leaves
the default. As in the Python SDK, a timeout is in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from lens_core.diagnostics import diagnostics
from lens_core.errors import ConfigError

__all__ = ["PROTOCOLS", "SIGNALS", "OtlpSettings", "positive_number", "read_otlp_settings"]

PROTOCOLS: Final = ("http/protobuf", "http/json", "grpc")
SIGNALS: Final = ("traces", "metrics", "logs")
_MAX_NUMBER: Final = 2**31 - 1
_DEFAULT_ENDPOINT: Final = {
    "grpc": "http://localhost:4317",
    "http/protobuf": "http://localhost:4318",
    "http/json": "http://localhost:4318",
}


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """How one signal reaches its receiver.

    Attributes:
        signal: ``traces``, ``metrics`` or ``logs``.
        protocol: One of :data:`PROTOCOLS`.
        endpoint: Full URL for HTTP; scheme, host and port for gRPC.
        headers: Sent with each request, such as an authorization.
        timeout_s: Of one request.
        gzip: Whether requests are compressed.
        certificate: File of the certificate authority to trust; empty for that of the system.
        client_certificate: File of the client's certificate for mutual TLS.
        client_key: File of its key.
        insecure: For gRPC without a scheme: no TLS.
    """

    signal: str
    protocol: str
    endpoint: str
    headers: Mapping[str, str]
    timeout_s: float = 10.0
    gzip: bool = False
    certificate: str = ""
    client_certificate: str = ""
    client_key: str = ""
    insecure: bool = False


def read_otlp_settings(
    signal: str,
    *,
    environ: Mapping[str, str] | None = None,
    endpoint: str | None = None,
) -> OtlpSettings:
    """The settings of one signal.

    Args:
        signal: ``traces``, ``metrics`` or ``logs``.
        environ: The environment; that of the process if not given.
        endpoint: Base URL of an OTLP/HTTP receiver, instead of the environment's endpoint and
            protocol.
    """
    source = os.environ if environ is None else environ

    def variable(name: str) -> tuple[str, str]:
        for full in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
            if text := source.get(full, "").strip():
                return full, text
        return f"OTEL_EXPORTER_OTLP_{name}", ""

    name, protocol = variable("PROTOCOL")
    if endpoint is not None and protocol == "grpc":
        protocol = ""
    if protocol and protocol not in PROTOCOLS:
        _invalid(name, protocol, "one of " + ", ".join(PROTOCOLS), "http/protobuf")
        protocol = ""
    protocol = protocol or "http/protobuf"
    name, compression = variable("COMPRESSION")
    if compression and compression not in ("gzip", "none"):
        _invalid(name, compression, "gzip or none", "none")
    name, timeout = variable("TIMEOUT")
    return OtlpSettings(
        signal=signal,
        protocol=protocol,
        endpoint=_endpoint(source, signal, protocol, endpoint),
        headers=_headers(variable("HEADERS")[1]),
        timeout_s=positive_number(name, timeout, 10.0),
        gzip=compression == "gzip",
        certificate=variable("CERTIFICATE")[1],
        client_certificate=variable("CLIENT_CERTIFICATE")[1],
        client_key=variable("CLIENT_KEY")[1],
        insecure=variable("INSECURE")[1].lower() == "true",
    )


def positive_number(name: str, text: str, default: float) -> float:
    """``text`` as a number above zero; the default where it is empty or, as a diagnostic, bad.

    What is larger than a 32-bit integer holds is bad too: no clock waits for so long.
    """
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= _MAX_NUMBER:
        _invalid(name, text, f"a number above 0, at most {_MAX_NUMBER:g}", f"{default:g}")
        return default
    return value


def _endpoint(environ: Mapping[str, str], signal: str, protocol: str, base: str | None) -> str:
    # By the specification, the variable of one signal is used as it is; the common one is a base,
    # to which HTTP adds a path.
    own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
    if base is None and own:
        return own
    common = base or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    common = common or _DEFAULT_ENDPOINT[protocol]
    return common if protocol == "grpc" else f"{common.rstrip('/')}/v1/{signal}"


def _headers(text: str) -> dict[str, str]:
    pairs = (item.partition("=") for item in text.split(",") if "=" in item)
    return {unquote(key.strip()).lower(): unquote(value.strip()) for key, _, value in pairs}


def _invalid(name: str, text: str, allowed: str, default: str) -> None:
    error = ConfigError(name, text, allowed)
    diagnostics.record("config.invalid", str(error), todo=f"Correct {name}; {default} is used.")
