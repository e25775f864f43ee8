"""Sends OTLP over HTTP (protobuf or JSON), one attempt per call.

The exporters of the SDK retry inside of ``export``, with pauses drawn from Python's global
``random`` and without a deadline that holds. Here one call is one attempt with a timeout; patience
is the business of :mod:`lens_core.telemetry.pipeline.delivery`.
"""

from __future__ import annotations

import gzip
import json
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import requests
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from lens_core.diagnostics import describe, diagnostics
from lens_core.telemetry.export.otlp_settings import OtlpSettings
from lens_core.telemetry.pipeline.delivery import Outcome

__all__ = ["HttpSink"]

T = TypeVar("T")

#: Statuses after which the OTLP specification ("OTLP/HTTP Response") has a client try again.
_RETRYABLE_HTTP: Final = frozenset({429, 502, 503, 504})


class HttpSink(Generic[T]):
    """Posts each batch to an OTLP/HTTP receiver.

    Args:
        settings: Where to, and how.
        encode: The batch as the body of a request.
    """

    def __init__(self, settings: OtlpSettings, encode: Callable[[Sequence[T]], bytes]) -> None:
        self._settings = settings
        self._encode = encode
        self._session: requests.Session | None = None
        fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (method := fork()) and method())

    def send(self, batch: Sequence[T], timeout_s: float) -> Outcome:
        """Post one batch."""
        if self._session is None:
            self._session = self._connect()
        body = self._encode(batch)
        if self._settings.gzip:
            body = gzip.compress(body)
        timeout_s = min(timeout_s, self._settings.timeout_s)
        try:
            response = self._session.post(self._settings.endpoint, body, timeout=timeout_s)
        except requests.RequestException as error:
            diagnostics.record(
                "otlp.unreachable",
                f"{self._settings.endpoint}: {describe(error)}",
                todo="Check OTEL_EXPORTER_OTLP_ENDPOINT from this host with curl.",
            )
            return Outcome.RETRY
        if response.ok:
            _note_partial_success(response, self._settings.endpoint)
            return Outcome.SENT
        diagnostics.record(
            "otlp.refused",
            f"{self._settings.endpoint} answered {response.status_code} {response.text[:200]!r}",
        )
        retryable = response.status_code in _RETRYABLE_HTTP
        return Outcome.RETRY if retryable else Outcome.REFUSED

    def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _connect(self) -> requests.Session:
        settings = self._settings
        session = requests.Session()
        kind = "json" if settings.protocol == "http/json" else "x-protobuf"
        session.headers["Content-Type"] = f"application/{kind}"
        session.headers["User-Agent"] = "lens-otel"
        if settings.gzip:
            session.headers["Content-Encoding"] = "gzip"
        session.headers.update(settings.headers)
        if settings.certificate:
            session.verify = settings.certificate
        if settings.client_certificate and settings.client_key:
            session.cert = (settings.client_certificate, settings.client_key)
        elif settings.client_certificate:
            session.cert = settings.client_certificate
        return session

    def _after_fork(self) -> None:
        # The connection is the parent's: closing it here would not be seen there, using it would.
        self._session = None


def _note_partial_success(response: requests.Response, endpoint: str) -> None:
    """Say where a receiver took a batch but not all that is in it."""
    if not response.content:
        return
    try:
        if "json" in response.headers.get("Content-Type", ""):
            partial = json.loads(response.content).get("partialSuccess") or {}
            rejected = sum(int(count) for key, count in partial.items() if key != "errorMessage")
            why = str(partial.get("errorMessage", ""))
        else:
            # The responses of all three signals have the same fields at the same places.
            message = ExportTraceServiceResponse.FromString(response.content)
            rejected = message.partial_success.rejected_spans
            why = message.partial_success.error_message
    except (ValueError, TypeError, AttributeError, DecodeError):
        return  # an answer that is not OTLP's says nothing about the batch
    if rejected or why:
        diagnostics.record("otlp.partial_success", f"{endpoint} rejected {rejected} records: {why}")
