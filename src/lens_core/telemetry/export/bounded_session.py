"""An HTTP session that keeps to our settings and to one deadline.

A timeout of ``requests`` bounds each read, so a receiver that sends one byte now and then holds a
request for ever; and its sessions take an ``Authorization`` from ``.netrc`` and a certificate
authority from the environment, although ours say otherwise.
"""

from __future__ import annotations

import http.client
import io
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import requests
import urllib3.connection
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from lens_core.telemetry.export.otlp_settings import OtlpSettings

__all__ = ["bounded_session", "one_deadline"]


class _Deadline(threading.local):
    at: float | None = None

    def left_s(self, otherwise: float | None) -> float | None:
        """Seconds that are left.

        Raises:
            TimeoutError: None are.
        """
        if self.at is None:
            return otherwise
        left_s = self.at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out: the whole answer did not come in time")
        return left_s


_deadline: Final = _Deadline()


@contextmanager
def one_deadline(timeout_s: float) -> Iterator[None]:
    """A block in which requests of this thread end within so many seconds, answers included."""
    _deadline.at = time.monotonic() + timeout_s
    try:
        yield
    finally:
        _deadline.at = None


class _BoundedReads(io.RawIOBase):
    """What comes from a socket, until the deadline."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = _deadline.left_s(None)
        if left_s is not None:
            self._sock.settimeout(left_s)
        count: int | None = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _BoundedSocket:
    """A socket as a response sees it."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_BoundedReads(self._sock))


class _BoundedResponse(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_BoundedSocket(sock), *args, **kwargs)  # type: ignore[arg-type]


class _Bounded:
    """Connections whose every step is given what is left of the time."""

    timeout: Any

    def connect(self) -> None:
        self.timeout = _deadline.left_s(self.timeout)
        super().connect()  # type: ignore[misc]

    def send(self, data: Any) -> None:
        self.timeout = _deadline.left_s(self.timeout)
        super().send(data)  # type: ignore[misc]


class _HttpConnection(_Bounded, urllib3.connection.HTTPConnection):
    response_class: type[http.client.HTTPResponse] = _BoundedResponse


class _HttpsConnection(_Bounded, urllib3.connection.HTTPSConnection):
    response_class: type[http.client.HTTPResponse] = _BoundedResponse


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


_POOLS: Final = {"http": _HttpPool, "https": _HttpsPool}


class _BoundedAdapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager


def bounded_session(settings: OtlpSettings) -> requests.Session:
    """A session that obeys :func:`one_deadline`, and the settings rather than the environment.

    Of the environment it takes what no setting of OTLP says: proxies, and the certificate authority
    where ``OTEL_EXPORTER_OTLP_CERTIFICATE`` names none.
    """
    session = requests.Session()
    session.trust_env = False
    session.proxies = get_environ_proxies(settings.endpoint)
    for prefix in ("http://", "https://"):
        session.mount(prefix, _BoundedAdapter())
    session.headers["User-Agent"] = "lens-otel"
    session.headers.update(settings.headers)
    session.verify = settings.certificate or _certificate_authority() or True
    if settings.client_certificate and settings.client_key:
        session.cert = (settings.client_certificate, settings.client_key)
    elif settings.client_certificate:
        session.cert = settings.client_certificate
    return session


def _certificate_authority() -> str:
    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or ""
