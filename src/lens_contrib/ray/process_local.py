"""Objects that stay in their process, and travel as something every worker can read.

Ray pickles a decorated function *by value*, with all that its closure holds, and a worker may not
have this package (an actor with a virtual environment of its own). An object of a class of ours in
such a closure would make that worker fail. So each of these classes reduces itself to a builtin.
"""

from __future__ import annotations

from typing import Final, cast

from opentelemetry import trace
from opentelemetry.trace import Tracer

__all__ = ["CallSpec", "LocalTracer", "ProcessLocal", "TracerScope", "tracer_of"]

_SCOPE: Final = "lens_contrib.ray"
#: Name and version of an instrumentation scope: all of a tracer that another process can use.
TracerScope = tuple[str, str | None]
#: What :class:`~lens_contrib.ray.execution.Entry` and
#: :class:`~lens_contrib.ray.injection.Injector` are made of: builtins, so that they travel.
CallSpec = dict[str, object]


class ProcessLocal:
    """Something computed once per process; arrives elsewhere as ``None``, to be computed anew."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (type(None), ())


class LocalTracer:
    """A tracer that the user passed; arrives elsewhere as its :data:`TracerScope`.

    An SDK tracer holds locks and exporters and cannot be pickled. In another process the scope's
    tracer comes from the provider of that process.
    """

    __slots__ = ("tracer",)

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def __reduce__(self) -> tuple[type, tuple[TracerScope]]:
        return (tuple, (self._scope(),))

    def _scope(self) -> TracerScope:
        scope = getattr(self.tracer, "_instrumentation_scope", None)
        name = getattr(scope, "name", None)
        version = getattr(scope, "version", None)
        if not isinstance(name, str):  # the API's proxy, before a provider is set
            name = getattr(self.tracer, "_instrumenting_module_name", _SCOPE)
            version = getattr(self.tracer, "_instrumenting_library_version", None)
        return (str(name), version if isinstance(version, str) else None)


def tracer_of(given: object) -> Tracer:
    """The tracer that the decorator was given, or of that name; by default this package's own."""
    if isinstance(given, LocalTracer):
        return given.tracer
    if given is None:
        return trace.get_tracer(_SCOPE)
    name, version = cast("TracerScope", given)
    return trace.get_tracer(name, version)
