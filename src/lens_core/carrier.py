"""Current OpenTelemetry context <-> carrier, through the global propagator.

A *carrier* is a mapping ``str -> str`` of propagation headers: ``traceparent`` and ``tracestate``
(W3C Trace Context), ``baggage`` (W3C Baggage), and whatever else the configured propagator adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Final, TypeVar, cast

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import CarrierError

try:
    from opentelemetry.propagate import get_global_textmap
except ValueError as error:
    # opentelemetry.propagate raises at import when OTEL_PROPAGATORS names one that is not
    # installed. A wrong variable must not stop a training job, so fall back to the defaults.
    diagnostics.record(
        "propagators.invalid",
        str(error),
        todo="Correct OTEL_PROPAGATORS; tracecontext and baggage are used until then.",
    )
    _W3C: Final = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])

    def get_global_textmap() -> TextMapPropagator:
        """The W3C defaults, used because the configured propagators cannot be loaded."""
        return _W3C


__all__ = [
    "MAX_CARRIER_BYTES",
    "carrier_size",
    "check_carrier",
    "extract_context",
    "fit_carrier",
    "get_global_textmap",
    "inject_context",
    "read_carrier",
    "shrinking",
]

#: Largest carrier, in UTF-8 bytes of all keys and values, that is accepted from outside. W3C
#: Baggage asks for at least 8,192 bytes of baggage (section "Limits"), and W3C Trace Context for at
#: least 512 of tracestate (section 3.3.1.5); twice their sum leaves room for other headers.
MAX_CARRIER_BYTES: Final = 16_384

_C = TypeVar("_C", bound=MutableMapping[str, str])


def carrier_size(carrier: object) -> int:
    """Bytes of all keys and values of a carrier, in UTF-8.

    Raises:
        CarrierError: If it is not a mapping of strings to strings, or cannot be encoded.
    """
    if not isinstance(carrier, Mapping):
        raise CarrierError(f"expected a mapping, got {type(carrier).__name__}")
    size = 0
    for key, value in carrier.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise CarrierError(
                f"expected str -> str, got {type(key).__name__} -> {type(value).__name__}"
            )
        try:
            size += len(key.encode()) + len(value.encode())
        except UnicodeEncodeError as error:
            raise CarrierError(f"{key!r} cannot be encoded as UTF-8: {error.reason}") from None
    return size


def check_carrier(carrier: object) -> Mapping[str, str]:
    """The carrier itself, when it is one that may come from outside.

    Raises:
        CarrierError: If it is not a mapping of strings to strings, or is larger than
            :data:`MAX_CARRIER_BYTES`.
    """
    size = carrier_size(carrier)
    if size > MAX_CARRIER_BYTES:
        raise CarrierError(f"{size} bytes are more than {MAX_CARRIER_BYTES}")
    return cast("Mapping[str, str]", carrier)


def shrinking(carrier: Mapping[str, str]) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """The carrier, then ever smaller ones, for a place where it does not fit.

    ``baggage`` goes first, then ``tracestate``, then all other headers, but never ``traceparent``.

    Yields:
        What is left, and the names of the headers that were left out.
    """
    left = dict(carrier)
    dropped: list[str] = []
    yield dict(left), ()
    others = tuple(name for name in left if name not in ("traceparent", "tracestate", "baggage"))
    for names in (("baggage",), ("tracestate",), others):
        gone = [name for name in names if left.pop(name, None) is not None]
        if gone:
            dropped += gone
            yield dict(left), tuple(dropped)


def fit_carrier(
    carrier: Mapping[str, str], max_bytes: int = MAX_CARRIER_BYTES
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The most of a carrier that fits, and the names of the headers that were left out.

    Args:
        carrier: The headers.
        max_bytes: Most bytes of keys and values.

    Raises:
        CarrierError: If it is not a mapping of strings to strings, or its ``traceparent`` alone
            does not fit.
    """
    carrier_size(carrier)
    for left, dropped in shrinking(carrier):
        if carrier_size(left) <= max_bytes:
            return left, dropped
    raise CarrierError(f"its traceparent alone is larger than {max_bytes} bytes")


def inject_context(carrier: _C, context: Context | None = None) -> _C:
    """The same carrier, with the headers of a context written into it.

    Nothing is written where the context holds neither a span nor baggage.

    Args:
        carrier: Mutable mapping that receives the headers, in place.
        context: The context to inject; the current one if not given.
    """
    get_global_textmap().inject(carrier, context=context)
    return carrier


def extract_context(carrier: Mapping[str, str] | None) -> Context:
    """The context that a carrier holds, as a new context.

    An empty, invalid or oversized carrier gives an empty context, never the current one: a span
    started under it is a root. Never raises; what is refused is counted as ``carrier.rejected``.
    A carrier whose ``traceparent`` is malformed is refused whole, its baggage too. Where no
    configured propagator reads ``traceparent``, what the others read is kept.

    Args:
        carrier: Headers, as :func:`inject_context` wrote them in another process.
    """
    return read_carrier(carrier)[0]


def read_carrier(carrier: Mapping[str, str] | None) -> tuple[Context, bool]:
    """What :func:`extract_context` gives, and whether there was a carrier that it refused."""
    empty = Context()
    # Nothing is asked of the carrier outside the block: even a tensor's bool() raises.
    try:
        if carrier is None or (isinstance(carrier, Mapping) and not carrier):
            return empty, False
        textmap = get_global_textmap()
        context = textmap.extract(check_carrier(carrier), context=empty)
        traceparent = carrier.get("traceparent")
        if traceparent is None or trace.get_current_span(context).get_span_context().is_valid:
            return context, False
        if "traceparent" in textmap.fields:
            problem = f"traceparent {traceparent!r} is not valid"
        elif context:
            return context, False  # of the headers that this process's propagators read
        else:
            problem = f"of {sorted(carrier)} none is read here, but {sorted(textmap.fields)}"
    except Exception as error:  # noqa: BLE001 - a foreign propagator may raise anything
        problem = describe(error)
    diagnostics.record("carrier.rejected", problem)
    return empty, True
