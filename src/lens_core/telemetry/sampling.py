"""Sampling that keeps linked traces whole.

A sampler that looks at the trace id alone decides anew for each root span. Pipeline stages link
their root spans to each other, so at a ratio of 0.1 most links that are exported point to a span
that is not (measured with four ranks: 90 %). :class:`LinkAware` lets a root follow what it links
to: the rank that all link to decides, and the step is kept on all ranks or on none.

``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG`` keep their meaning, entry points included
(the SDK ignores those in a provider that is built by hand); where they name a parent-based sampler,
its root is made link-aware.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import ConfigError
from lens_core.identity.owned import starting_owned_span
from lens_core.telemetry.ids import PrivateIdGenerator

__all__ = ["LinkAware", "id_generator_from_env", "linkaware_traceidratio", "sampler_from_env"]

_SAMPLER: Final = "OTEL_TRACES_SAMPLER"
_ARGUMENT: Final = "OTEL_TRACES_SAMPLER_ARG"
_BUILT_IN: Final = frozenset(
    prefix + name
    for prefix in ("", "parentbased_")
    for name in ("always_on", "always_off", "traceidratio")
)
_ID_GENERATOR: Final = "OTEL_PYTHON_ID_GENERATOR"


class LinkAware(Sampler):
    """A root span with links is sampled if one of the spans it links to is.

    Without links, ``otherwise`` decides; also for a root span whose trace id is derived
    (:mod:`lens_core.identity`), so that all ranks decide alike whatever each of them links to.
    Links added after the start are not seen: give them at the
    start, as :func:`lens_core.create_linked_span` does. Use it as the root of
    :class:`~opentelemetry.sdk.trace.sampling.ParentBased`, so that children follow their parent.
    """

    def __init__(self, otherwise: Sampler) -> None:
        self._otherwise = otherwise

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Follow the links, or else ask the other sampler."""
        linked = [link for link in links if link.context.is_valid] if links else ()
        if not linked or starting_owned_span():
            return self._otherwise.should_sample(
                parent_context, trace_id, name, kind, attributes, links, trace_state
            )
        state = get_current_span(parent_context).get_span_context().trace_state
        if any(link.context.trace_flags.sampled for link in linked):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, state)
        return SamplingResult(Decision.DROP, None, state)

    def get_description(self) -> str:
        """What the sampler is, for logs."""
        return f"LinkAware{{{self._otherwise.get_description()}}}"


def linkaware_traceidratio(argument: str | None) -> Sampler:
    """The sampler ``lens_linkaware_traceidratio``: parent, else links, else a ratio of traces."""
    return ParentBased(LinkAware(TraceIdRatioBased(_ratio(argument or ""))))


def sampler_from_env(environ: Mapping[str, str] | None = None) -> Sampler:
    """The sampler that ``OTEL_TRACES_SAMPLER`` names; parent, else links, else all by default.

    A name that nobody provides and a bad argument are diagnostics (``config.invalid``).
    """
    source = os.environ if environ is None else environ
    name, argument = source.get(_SAMPLER, "").strip(), source.get(_ARGUMENT, "").strip()
    if name.lower() in _BUILT_IN:
        name = name.lower()  # as the SDK reads it
    default = ParentBased(LinkAware(ALWAYS_ON))
    if not name or name == "parentbased_always_on":
        return default
    if name == "lens_linkaware_traceidratio":
        return linkaware_traceidratio(argument)
    if name == "always_on":
        return ALWAYS_ON
    if name == "always_off":
        return ALWAYS_OFF
    if name == "parentbased_always_off":
        return ParentBased(LinkAware(ALWAYS_OFF))
    if name == "traceidratio":
        return TraceIdRatioBased(_ratio(argument))
    if name == "parentbased_traceidratio":
        return linkaware_traceidratio(argument)
    factory = _load("opentelemetry_traces_sampler", name)
    sampler = _call(factory, name, argument) if factory is not None else None
    if isinstance(sampler, Sampler):
        return sampler
    names = [entry.name for entry in entry_points(group="opentelemetry_traces_sampler")]
    error = ConfigError(_SAMPLER, name, "one of " + ", ".join(sorted(names)))
    todo = f"Correct {_SAMPLER}; parentbased_always_on is used."
    diagnostics.record("config.invalid", str(error), todo=todo)
    return default


def id_generator_from_env(environ: Mapping[str, str] | None = None) -> IdGenerator:
    """The id generator that ``OTEL_PYTHON_ID_GENERATOR`` names; a private random one otherwise."""
    source = os.environ if environ is None else environ
    name = source.get(_ID_GENERATOR, "").strip()
    if not name or name == "random":
        return PrivateIdGenerator()
    factory = _load("opentelemetry_id_generator", name)
    generator = _call(factory, name) if factory is not None else None
    if isinstance(generator, IdGenerator):
        return generator
    error = ConfigError(_ID_GENERATOR, name, "an installed id generator")
    diagnostics.record(
        "config.invalid", str(error), todo=f"Correct {_ID_GENERATOR}; ids are random."
    )
    return PrivateIdGenerator()


def _ratio(text: str) -> float:
    if not text:
        return 1.0
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if 0.0 <= ratio <= 1.0:
        return ratio
    error = ConfigError(_ARGUMENT, text, "a number from 0 to 1")
    diagnostics.record("config.invalid", str(error), todo=f"Correct {_ARGUMENT}; 1.0 is used.")
    return 1.0


def _load(group: str, name: str) -> Callable[..., object] | None:
    for entry in entry_points(group=group, name=name):
        try:
            loaded = entry.load()
        except Exception as error:  # noqa: BLE001 - a broken plug-in must not stop the job
            todo = f"Correct the plug-in {name!r} of {group}, or do not name it."
            diagnostics.record("config.invalid", f"{name}: {describe(error)}", todo=todo)
            continue
        if callable(loaded):
            return loaded  # type: ignore[no-any-return]
    return None


def _call(factory: Callable[..., object], name: str, *arguments: str) -> object:
    try:
        return factory(*arguments)
    except Exception as error:  # noqa: BLE001 - a broken plug-in must not stop the job
        what = f"{name}{arguments}: {describe(error)}"
        diagnostics.record("config.invalid", what, todo=f"Do not name {name!r}, or correct it.")
        return None
