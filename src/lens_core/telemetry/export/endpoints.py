"""Endpoints that hold secrets, and how they are shown."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

__all__ = ["basic_authorization", "shown_endpoint", "without_credentials", "without_secrets_of"]

_HIDDEN = "..."


def shown_endpoint(url: str) -> str:
    """A URL for a message: host and port, and of its path what OTLP itself adds.

    A user name, a password, a query and any other path may be a secret: some back ends take their
    key there.
    """
    parts = _split(url)
    if parts is None:
        return _HIDDEN if "@" in url or "?" in url else url
    path = parts.path
    kept = next((own for own in _OWN_PATHS if path.endswith(own)), "")
    before = path[: len(path) - len(kept)].strip("/")
    path = (f"/{_HIDDEN}" if before else "") + kept
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", ""))


_OWN_PATHS = ("/v1/traces", "/v1/metrics", "/v1/logs")


def without_secrets_of(url: str, text: str) -> str:
    """What a library says of a request to this URL, with its secrets left out."""
    parts = _split(url)
    if parts is None:
        return text.replace(url, shown_endpoint(url))
    request = urlunsplit(("", "", parts.path, parts.query, ""))
    userinfo = parts.netloc.rpartition("@")[0]
    password = userinfo.partition(":")[2]
    text = text.replace(url, shown_endpoint(url))
    if request not in ("", "/", *_OWN_PATHS):
        text = text.replace(request, f"/{_HIDDEN}")
    for secret in (userinfo, password, unquote(password), parts.query):
        if secret:
            text = text.replace(secret, _HIDDEN)
    return text


def without_credentials(url: str) -> str:
    """The URL to send requests to; who sends is said by :func:`basic_authorization`."""
    parts = _split(url)
    if parts is None or "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def basic_authorization(url: str) -> Mapping[str, str]:
    """The header for the user name and password in a URL; none where there are none."""
    parts = _split(url)
    userinfo = "" if parts is None else parts.netloc.rpartition("@")[0]
    if not userinfo:
        return {}
    name, _, password = userinfo.partition(":")
    pair = f"{unquote(name)}:{unquote(password)}".encode()
    return {"authorization": f"Basic {b64encode(pair).decode()}"}


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url) if "://" in url else None
    except ValueError:  # "[" without "]"
        return None
