"""What the spans of one traced function are: builtins only, so that it travels.

Ray pickles a decorated function *by value*, with all that its closure holds, and a worker may not
have this package (an actor with a virtual environment of its own). An object of a class of ours in
such a closure would make that worker fail; so what is in one reduces to a builtin.
"""

from __future__ import annotations

from typing import Final, TypedDict

from opentelemetry import trace
from opentelemetry.trace import Tracer
from opentelemetry.util.types import AttributeValue

from lens_core.channel import Relation
from lens_core.compat import TracerScope, scope_of_tracer

__all__ = ["CallSpec", "LocalTracer", "TracerScope", "tracer_of"]

_SCOPE: Final = "lens_contrib.ray"


class CallSpec(TypedDict):
    """The decorator's arguments for one function; ``method`` is its name as a remote callee."""

    name: str
    method: str
    relation: Relation
    attributes: dict[str, AttributeValue]
    tracer: LocalTracer | TracerScope | None
    producer: bool


class LocalTracer:
    """A tracer that the user passed; arrives elsewhere as its :data:`TracerScope`.

    An SDK tracer holds locks and exporters and cannot be pickled. In another process the scope's
    tracer comes from the provider of that process.
    """

    __slots__ = ("tracer",)

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def __reduce__(self) -> tuple[type, tuple[TracerScope]]:
        return tuple, (scope_of_tracer(self.tracer) or (_SCOPE, None),)


def tracer_of(spec: CallSpec) -> Tracer:
    """The tracer that the decorator was given, or of that name; by default this package's own."""
    tracer = spec["tracer"]
    if isinstance(tracer, LocalTracer):
        return tracer.tracer
    return trace.get_tracer(*(tracer or (_SCOPE,)))
