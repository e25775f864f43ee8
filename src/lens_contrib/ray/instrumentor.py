"""Traces Ray code that nobody wants to edit: every task and actor class defined from now on.

An instrumentor in the manner of OpenTelemetry's: ``RayInstrumentor().instrument()`` once, before
the modules that define tasks and actors are imported. Found by ``opentelemetry-instrument`` under
the name ``ray``. Prefer :func:`lens_contrib.ray.traced` where code can be edited: this replaces
three functions inside of Ray, and code decorated by ``@ray.remote`` earlier is not traced.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any, Final

import ray
from opentelemetry.trace import TracerProvider

from lens_contrib.ray.compat import patch, patches
from lens_contrib.ray.decorator import traced
from lens_contrib.ray.dispatch import with_carrier
from lens_core.diagnostics import diagnostics

__all__ = ["RayInstrumentor"]

_SCOPE: Final = "lens_contrib.ray"
_OWN: Final = ("ray", "lens_core", "lens_contrib")


class RayInstrumentor:
    """Instruments Ray in this process; there is one instance.

    Everything that ``@ray.remote`` is put on is traced as by :func:`lens_contrib.ray.traced`, and
    constructors of actors get the caller's context too. Ray's own tasks and actors are left alone.
    """

    _instance: RayInstrumentor | None = None

    _lock: threading.Lock
    _originals: tuple[Any, Any, Any] | None

    def __new__(cls) -> RayInstrumentor:  # noqa: D102 - on the class
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance._lock = threading.Lock()
            cls._instance._originals = None
        return cls._instance

    @property
    def is_instrumented_by_opentelemetry(self) -> bool:
        """Whether Ray is instrumented in this process."""
        return self._originals is not None

    def instrumentation_dependencies(self) -> Collection[str]:
        """The versions of Ray that this is for."""
        return ("ray >= 2.40",)

    def instrument(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        exclude: Sequence[str] = (),
        **_: object,
    ) -> None:
        """Trace what is defined from now on; again without effect while it is on. Never raises.

        Args:
            tracer_provider: Provider of the spans in this process; workers use their own.
            exclude: Modules whose tasks and actors are left alone, with all that is in them.
            **_: What other instrumentors take.
        """
        with self._lock:
            if self._originals is not None:
                return
            tracer = None if tracer_provider is None else tracer_provider.get_tracer(_SCOPE)
            try:
                before = patches()
            except AttributeError as error:
                diagnostics.record(
                    "ray.instrumentation_failed",
                    f"Ray {ray.__version__} is built differently: {error}",
                    todo="Use the decorator lens_contrib.ray.traced.",
                )
                return
            left_alone = (*_OWN, *exclude)

            def trace(target: Any) -> Any:
                try:
                    if _within(target.__module__, left_alone):
                        return target
                    # A class of its own: the user's may be in use elsewhere, without Ray.
                    return traced(_subclass(target) if isinstance(target, type) else target, tracer)
                except Exception as error:  # noqa: BLE001 - the user's definition must not fail
                    diagnostics.record("ray.not_traced", f"{target!r}: {error}")
                    return target

            def init(self: Any, language: Any, function: Any, *rest: Any, **more: Any) -> None:
                before[0](self, language, trace(function), *rest, **more)

            def modify_class(cls: Any) -> Any:
                return before[1](cls if hasattr(cls, "__ray_actor_class__") else trace(cls))

            def remote(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
                return before[2](
                    self, args, with_carrier(self, args or (), kwargs or {}), **options
                )

            patch(init, modify_class, remote)
            self._originals = before

    def uninstrument(self, **_: object) -> None:
        """Trace nothing that is defined from now on. What is traced already stays so."""
        with self._lock:
            if self._originals is not None:
                patch(*self._originals)
                self._originals = None


def _subclass(cls: type) -> type:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), names)


def _within(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)
