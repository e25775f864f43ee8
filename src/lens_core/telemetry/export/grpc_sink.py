"""Sends OTLP over gRPC, one attempt per call; imported only where that protocol is configured."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar
from urllib.parse import urlsplit

import grpc

from lens_core.diagnostics import diagnostics
from lens_core.telemetry.export.otlp_settings import OtlpSettings
from lens_core.telemetry.pipeline.delivery import Outcome

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

    def send(self, batch: Sequence[T], timeout_s: float) -> Outcome:
        """Send one batch."""
        if self._channel is None:
            self._channel = self._connect()
        call = self._channel.unary_unary(_METHODS[self._settings.signal])
        try:
            call(
                self._encode(batch),
                timeout=min(timeout_s, self._settings.timeout_s),
                metadata=tuple(self._settings.headers.items()),
                compression=grpc.Compression.Gzip if self._settings.gzip else None,
            )
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
            retryable = code in _RETRYABLE_GRPC
            diagnostics.record(
                "otlp.unreachable" if retryable else "otlp.refused",
                f"{self._settings.endpoint}: {code}",
                todo="Check OTEL_EXPORTER_OTLP_ENDPOINT from this host.",
            )
            return Outcome.RETRY if retryable else Outcome.REFUSED
        return Outcome.SENT

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connect(self) -> grpc.Channel:
        settings = self._settings
        url = urlsplit(settings.endpoint)
        target = url.netloc or settings.endpoint
        if url.scheme == "http" or (url.scheme != "https" and settings.insecure):
            return grpc.insecure_channel(target)
        return grpc.secure_channel(
            target,
            grpc.ssl_channel_credentials(
                root_certificates=_read(settings.certificate),
                private_key=_read(settings.client_key),
                certificate_chain=_read(settings.client_certificate),
            ),
        )

    def _after_fork(self) -> None:
        self._channel = None


def _read(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()
