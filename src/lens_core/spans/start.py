"""Where every span of ours starts: cleaned, redacted, and without raising into the caller.

:func:`start_span` is the one call of a tracer. What the callers were given by hand is looked at
here too: an argument of the wrong type costs the span that argument, and a keyword that is nearly
one of ours is an error, since it would silently become an attribute.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from lens_core.compiling import is_compiling
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import KeywordError
from lens_core.spans.attributes import clean_attributes

__all__ = [
    "checked_argument",
    "refuse_misspelled",
    "span_attributes",
    "start_span",
]

T = TypeVar("T")

_NONE: Final[Mapping[str, object]] = MappingProxyType({})
_scoped: ContextVar[Mapping[str, object]] = ContextVar("lens_span_attributes")
#: How alike two names are, from 0 to 1, where one is taken for a misspelling of the other:
#: ``remote_carier`` is 0.96 of ``remote_carrier``, ``carrier`` is 0.67.
_ALIKE: Final = 0.85


def start_span(
    tracer: Tracer,
    name: str,
    context: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, object] | None = None,
    links: Sequence[Link] | None = None,
    *,
    ours: bool = False,
) -> Span:
    """A started span. Never raises.

    Where the tracer, a sampler or a span processor fails, that is counted (``span.failed``), and
    what comes back records nothing and has the context of the parent.

    Args:
        tracer: Tracer that starts it.
        name: Name of the span.
        context: Context that holds the parent; the current one if not given.
        kind: Kind of the span.
        attributes: Attributes of the span, of any type: they are cleaned and redacted
            (:mod:`lens_core.spans.attributes`). Those of :func:`span_attributes` are added.
        links: Links of the span, given at the start so that samplers see them.
        ours: Whether all attributes are numbers and names of this library's own, which need not be
            looked at for each message of a step.
    """
    try:
        scoped = _scoped.get(_NONE)
        if scoped:
            attributes, ours = {**scoped, **(attributes or _NONE)}, False
        clean: Mapping[str, AttributeValue] | None = None
        if attributes:
            clean = attributes if ours else clean_attributes(attributes)  # type: ignore[assignment]
        return tracer.start_span(name, context, kind, clean, links, None, False, False)
    except Exception as error:  # noqa: BLE001 - the caller's work goes on whatever telemetry does
        diagnostics.record("span.failed", describe(error))
        return trace.NonRecordingSpan(trace.get_current_span(context).get_span_context())


@contextmanager
def span_attributes(attributes: Mapping[str, object]) -> Iterator[None]:
    """A block in which every new span of this library gets these attributes too."""
    if is_compiling():
        yield
        return
    token = _scoped.set({**_scoped.get(_NONE), **attributes})
    try:
        yield
    finally:
        with suppress(ValueError):  # the block ends in another context
            _scoped.reset(token)


def checked_argument(
    where: str, name: str, value: object, kinds: type[T] | tuple[type[T], ...], default: T
) -> T:
    """The value of a parameter, where it is of its type; else the default, and a diagnostic.

    Args:
        where: The function that was called.
        name: The parameter.
        value: What the caller gave.
        kinds: The types that it may have.
        default: What the span goes on with otherwise.
    """
    if isinstance(value, kinds):
        return value
    diagnostics.record(
        "span.argument",
        f"{where} got {name}={describe_value(value)}; the span goes on without it",
        todo=f"Pass a {_names(kinds)} as {name}, or an attribute of that name in span_attributes.",
    )
    return default


def refuse_misspelled(
    where: str, attributes: Mapping[str, object], parameters: frozenset[str]
) -> None:
    """Refuse attributes whose names are nearly those of parameters.

    Raises:
        KeywordError: If there is one; it names the parameter.
    """
    for name in attributes:
        meant = _nearly(name, parameters)
        if meant:
            raise KeywordError(where, name, meant)


@functools.lru_cache(maxsize=1024)
def _nearly(name: str, parameters: frozenset[str]) -> str:
    """The parameter that this name is a misspelling of; empty if it is none."""
    alike = difflib.get_close_matches(name, parameters, 1, _ALIKE)
    return alike[0] if alike and alike[0] != name else ""


def describe_value(value: object) -> str:
    """A value and its type, for a log line; never raises."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a broken __repr__ must not become a second failure
        text = "..."
    return f"{text[:80]} ({type(value).__name__})"


def _names(kinds: type | tuple[type, ...]) -> str:
    several: Collection[type] = kinds if isinstance(kinds, tuple) else (kinds,)
    return " or ".join(kind.__name__ for kind in several)
