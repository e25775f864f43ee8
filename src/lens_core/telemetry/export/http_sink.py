"""Sends OTLP over HTTP (protobuf or JSON), one attempt per call.

The exporters of the SDK retry inside of ``export``, with pauses drawn from Python's global
``random`` and without a deadline that holds. Here one call is one attempt with a deadline; patience
is the business of :mod:`lens_core.telemetry.pipeline.delivery`.
"""

from __future__ import annotations

import gzip
import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Final, Generic, TypeVar
from urllib.parse import urljoin, urlsplit

import requests
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from lens_core.diagnostics import describe, diagnostics
from lens_core.telemetry.export.bounded_session import bounded_session, one_deadline
from lens_core.telemetry.export.endpoints import (
    basic_authorization,
    shown_endpoint,
    without_credentials,
    without_secrets_of,
)
from lens_core.telemetry.export.otlp_settings import OtlpSettings
from lens_core.telemetry.pipeline.export_result import (
    MAX_REQUEST_BYTES,
    ExportResult,
    Outcome,
    failed_export,
)

__all__ = ["HttpSink"]

T = TypeVar("T")

#: Statuses after which the OTLP specification ("OTLP/HTTP Response") has a client try again.
_RETRYABLE: Final = frozenset({429, 502, 503, 504})
#: The whole is too large, or something in it is bad, which need not be true of its halves.
_SPLITTABLE: Final = frozenset({400, 413})
#: Redirects after which a POST is repeated as it is (RFC 9110, 15.4).
_REPEATING: Final = frozenset({307, 308})
_MAX_REDIRECTS: Final = 3
_CHECK: Final = "Check OTEL_EXPORTER_OTLP_ENDPOINT from this host with lens doctor."


class HttpSink(Generic[T]):
    """Posts each batch to an OTLP/HTTP receiver.

    Args:
        settings: Where to, and how.
        encode: The batch as the body of a request.
    """

    def __init__(self, settings: OtlpSettings, encode: Callable[[Sequence[T]], bytes]) -> None:
        self._settings = settings
        self._encode = encode
        self._url = without_credentials(settings.endpoint)
        self._session: requests.Session | None = None
        fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (method := fork()) and method())

    def send(self, batch: Sequence[T], timeout_s: float) -> ExportResult:
        """Post one batch, and read the whole answer, within the time."""
        body = self._encode(batch)
        if len(body) > MAX_REQUEST_BYTES and len(batch) > 1:
            return ExportResult(Outcome.SPLIT)
        if self._settings.gzip:
            body = gzip.compress(body)
        timeout_s = min(timeout_s, self._settings.timeout_s)
        try:
            with one_deadline(timeout_s):
                response = self._post(body, timeout_s)
        except (requests.RequestException, OSError, ValueError) as error:
            # requests does not translate all that urllib3 and the socket raise.
            endpoint = self._settings.endpoint
            why = without_secrets_of(endpoint, describe(error))
            what = f"{shown_endpoint(endpoint)}: {why}"
            return failed_export(Outcome.RETRY, "otlp.unreachable", what, _CHECK)
        return self._judged(response, len(batch))

    def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _post(self, body: bytes, timeout_s: float) -> requests.Response:
        if self._session is None:
            self._session = self._connect()
        url = self._url
        for _ in range(_MAX_REDIRECTS):
            response = self._session.post(url, body, timeout=timeout_s, allow_redirects=False)
            there = urljoin(url, response.headers.get("Location", ""))
            if response.status_code not in _REPEATING or not _is_same_receiver(url, there):
                break
            url = there
        return response

    def _connect(self) -> requests.Session:
        settings = self._settings
        session = bounded_session(settings)
        if "authorization" not in settings.headers:
            session.headers.update(basic_authorization(settings.endpoint))
        kind = "json" if settings.protocol == "http/json" else "x-protobuf"
        session.headers["Content-Type"] = f"application/{kind}"
        if settings.gzip:
            session.headers["Content-Encoding"] = "gzip"
        return session

    def _judged(self, response: requests.Response, size: int) -> ExportResult:
        status, name = response.status_code, shown_endpoint(self._settings.endpoint)
        if response.ok and status < 300:
            rejected = _rejected(response, name)
            if rejected is not None:
                return ExportResult(Outcome.SENT, rejected=min(rejected, size))
            kind = response.headers.get("Content-Type", "no content type")
            return failed_export(
                Outcome.REFUSED,
                "otlp.refused",
                f"{name} answered {status} with {kind}, which is no answer of OTLP: "
                f"{response.text[:100]!r}",
                "Let OTEL_EXPORTER_OTLP_ENDPOINT name the receiver, not a page or a login.",
            )
        if 300 <= status < 400:
            there = shown_endpoint(response.headers.get("Location", "nowhere"))
            what = f"{name} answered {status}, a redirect to {there}"
            todo = "Let OTEL_EXPORTER_OTLP_ENDPOINT name the receiver itself."
            return failed_export(Outcome.REFUSED, "otlp.refused", what, todo)
        outcome = Outcome.SPLIT if status in _SPLITTABLE else Outcome.REFUSED
        if status in _RETRYABLE:
            outcome = Outcome.RETRY
        what = f"{name} answered {status} {response.text[:200]!r}"
        result = failed_export(outcome, "otlp.refused", what, _REMEDIES.get(status, _CHECK))
        return replace(result, retry_after_s=_retry_after_s(response))

    def _after_fork(self) -> None:
        # The connection is the parent's: closing it here would not be seen there, using it would.
        self._session = None


_REMEDIES: Final = {
    400: "It refuses what is in the batch, or speaks another protocol: see its own log.",
    401: "Set OTEL_EXPORTER_OTLP_HEADERS=authorization=... to what the receiver asks for.",
    403: "Set OTEL_EXPORTER_OTLP_HEADERS=authorization=... to what the receiver asks for.",
    404: "The path is not the receiver's: it adds /v1/traces to OTEL_EXPORTER_OTLP_ENDPOINT.",
    413: "It takes smaller requests: they are halved; lower OTEL_BSP_MAX_EXPORT_BATCH_SIZE.",
    429: "The receiver is overloaded: send less, or give it more room.",
    503: "The receiver is overloaded or starting: see its own log.",
}


def _is_same_receiver(url: str, there: str) -> bool:
    """Whether the headers, an authorization among them, may be sent there as well.

    The same scheme, host and port; or the same host by TLS, which is no less safe.
    """
    try:
        before, after = urlsplit(url), urlsplit(there)
        if before.hostname != after.hostname:
            return False
        if (before.scheme, after.scheme) == ("http", "https"):
            return True
        return (before.scheme, before.port) == (after.scheme, after.port)
    except ValueError:  # no port, or no URL at all
        return False


def _retry_after_s(response: requests.Response) -> float | None:
    text = response.headers.get("Retry-After", "").strip()
    try:
        if text.isdecimal():
            return float(text)
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _rejected(response: requests.Response, name: str) -> int | None:
    """Records that the receiver did not take; ``None`` where this is no answer of OTLP."""
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if not response.content:
        return None if kind.startswith("text/") else 0
    try:
        if kind.endswith("json"):
            answer = json.loads(response.content)
            if not isinstance(answer, dict) or set(answer) - {"partialSuccess"}:
                return None  # such as the health of a server that answers whatever it is asked
            partial = answer.get("partialSuccess") or {}
            rejected = sum(int(count) for key, count in partial.items() if key != "errorMessage")
            why = str(partial.get("errorMessage", ""))
        elif kind.startswith("text/"):
            return None
        else:
            # The responses of all three signals have the same fields at the same places.
            message = ExportTraceServiceResponse.FromString(response.content)
            rejected = message.partial_success.rejected_spans
            why = message.partial_success.error_message
    except (ValueError, TypeError, AttributeError, DecodeError):
        return None
    if rejected or why:
        diagnostics.record(
            "otlp.partial_success",
            f"{name} rejected {rejected} records: {why}",
            todo="They are lost: let the receiver take them, or do not send them.",
        )
    return max(0, rejected)
