"""Sends OTLP over gRPC, one attempt per call; imported only where that protocol is configured."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from lens_core.diagnostics import describe, diagnostics
from lens_core.telemetry.export.endpoints import shown_endpoint, without_secrets_of
from lens_core.telemetry.export.otlp_settings import OtlpSettings
from lens_core.telemetry.pipeline.export_result import (
    MAX_REQUEST_BYTES,
    ExportResult,
    Outcome,
    failed_export,
)

__all__ = ["GrpcSink"]

T = TypeVar("T")

#: Codes after which the OTLP specification ("OTLP/gRPC Response") has a client try again.
_RETRYABLE_GRPC: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
#: Codes with which the receiver was not reached; the others are its own answers.
_UNREACHABLE: Final = frozenset(
    {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
)
#: What servers say of a request that is larger than they take: those of C++ and Go, Java, Rust.
_TOO_LARGE: Final = ("larger than max", "exceeds maximum", "length too large")
_SIZE_CODES: Final = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OUT_OF_RANGE})
_CHECK: Final = (
    "Check OTEL_EXPORTER_OTLP_ENDPOINT from this host with lens doctor; without http:// in front "
    "gRPC uses TLS."
)
_REMEDIES: Final = {
    **dict.fromkeys(_UNREACHABLE, _CHECK),
    grpc.StatusCode.RESOURCE_EXHAUSTED: "The receiver is out of memory or quota: give it more.",
    grpc.StatusCode.UNIMPLEMENTED: "There is no OTLP receiver of this signal: name another port.",
    grpc.StatusCode.UNAUTHENTICATED: "Set OTEL_EXPORTER_OTLP_HEADERS=authorization=...",
    grpc.StatusCode.PERMISSION_DENIED: "Set OTEL_EXPORTER_OTLP_HEADERS=authorization=...",
}
#: By default a channel that could not connect refuses every call for up to two minutes, so that
#: each retry of ours fails at once.
_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_METHODS: Final = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}


class GrpcSink(Generic[T]):
    """Sends each batch to an OTLP/gRPC receiver.

    Args:
        settings: Where to, and how.
        encode: The batch as a serialized request.
    """

    def __init__(self, settings: OtlpSettings, encode: Callable[[Sequence[T]], bytes]) -> None:
        self._settings = settings
        self._encode = encode
        self._channel: grpc.Channel | None = None
        fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (method := fork()) and method())

    def send(self, batch: Sequence[T], timeout_s: float) -> ExportResult:
        """Send one batch."""
        body = self._encode(batch)
        if len(body) > MAX_REQUEST_BYTES and len(batch) > 1:
            return ExportResult(Outcome.SPLIT)
        if self._channel is None:
            self._channel = self._connect()
        call = self._channel.unary_unary(_METHODS[self._settings.signal])
        try:
            answer = call(
                body,
                timeout=min(timeout_s, self._settings.timeout_s),
                metadata=tuple(self._settings.headers.items()),
                compression=grpc.Compression.Gzip if self._settings.gzip else None,
            )
        except grpc.RpcError as error:
            return self._failed(error)
        return self._took(answer, len(batch))

    def _failed(self, error: grpc.RpcError) -> ExportResult:
        name = shown_endpoint(self._settings.endpoint)
        code, said = grpc.StatusCode.UNKNOWN, describe(error)
        if isinstance(error, grpc.Call):
            code, said = error.code(), error.details() or ""
        # What a server says of a request that is larger than it takes; else it is out of memory or
        # of quota, which passes.
        if code in _SIZE_CODES and any(words in said for words in _TOO_LARGE):
            todo = "They are halved; lower OTEL_BSP_MAX_EXPORT_BATCH_SIZE, or let it take more."
            return failed_export(Outcome.SPLIT, "otlp.refused", f"{name}: {said}", todo)
        outcome = Outcome.RETRY if code in _RETRYABLE_GRPC else Outcome.REFUSED
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            outcome = Outcome.SPLIT
        return failed_export(
            outcome,
            "otlp.unreachable" if code in _UNREACHABLE else "otlp.refused",
            f"{name}: {code.name}: {without_secrets_of(self._settings.endpoint, said)}",
            _REMEDIES.get(code, "See the log of the receiver."),
        )

    def _took(self, answer: bytes, size: int) -> ExportResult:
        try:
            # The responses of all three signals have the same fields at the same places.
            partial = ExportTraceServiceResponse.FromString(answer).partial_success
        except DecodeError:
            return ExportResult(Outcome.SENT)  # of a version that says more
        if partial.rejected_spans or partial.error_message:
            diagnostics.record(
                "otlp.partial_success",
                f"{shown_endpoint(self._settings.endpoint)} rejected {partial.rejected_spans} "
                f"records: {partial.error_message}",
                todo="They are lost: let the receiver take them, or do not send them.",
            )
        return ExportResult(Outcome.SENT, rejected=min(max(0, partial.rejected_spans), size))

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connect(self) -> grpc.Channel:
        settings = self._settings
        url = urlsplit(settings.endpoint)
        target = url.netloc.rpartition("@")[2] or settings.endpoint
        if url.scheme == "http" or (url.scheme != "https" and settings.insecure):
            return grpc.insecure_channel(target, _OPTIONS)
        return grpc.secure_channel(
            target,
            grpc.ssl_channel_credentials(
                root_certificates=_read(settings.certificate),
                private_key=_read(settings.client_key),
                certificate_chain=_read(settings.client_certificate),
            ),
            _OPTIONS,
        )

    def _after_fork(self) -> None:
        self._channel = None


def _read(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()
