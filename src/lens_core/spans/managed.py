"""Spans that cost next to nothing when their group is off.

:func:`managed_span` for a block, :func:`trace_fn` for a function of any kind, :func:`span_cm` where
no group applies. Attributes are given at the start, so that samplers see them; an exception of any
kind marks the span and propagates unchanged; nothing that telemetry does can raise into the body.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
)
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context, Token, copy_context
from typing import Final, ParamSpec, TypeVar, cast

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context as OtelContext
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Tracer

from lens_core.compiling import is_compiling
from lens_core.current_context import detach
from lens_core.diagnostics import describe, diagnostics
from lens_core.spans.start import span_attributes, start_span
from lens_core.spans.status import record_error
from lens_core.spans.switch import span_groups

__all__ = [
    "SpanTracer",
    "managed_span",
    "span_attributes",
    "span_cm",
    "span_tracer",
    "trace_fn",
    "with_current_context",
]

P = ParamSpec("P")
R = TypeVar("R")

_SCOPE: Final = "lens_core"
_CHECK_PROVIDER: Final = "Correct OTEL_PYTHON_TRACER_PROVIDER, or unset it."
_INTERNAL: Final = SpanKind.INTERNAL


class SpanTracer:
    """Holds the tracer of this module's spans.

    Attributes:
        tracer: By default one that follows the global provider; ``setup_telemetry`` puts its own
            here, which saves that detour, and takes it away again.
    """

    __slots__ = ("tracer",)

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Follow the global provider again."""
        try:
            self.tracer: Tracer = trace.get_tracer(_SCOPE)
        except Exception as error:  # noqa: BLE001 - the API raises what loading a provider raises
            # Runs at import, where a wrong OTEL_PYTHON_TRACER_PROVIDER must not stop the job.
            self.tracer = NoOpTracer()
            diagnostics.record("provider.invalid", describe(error), todo=_CHECK_PROVIDER)


#: The tracer of this process's spans.
span_tracer: Final = SpanTracer()


#: What a site gets whose group is off; one for all of them, of a class that Dynamo knows.
_OFF: Final[AbstractContextManager[None]] = nullcontext()


class _Scope:
    """One span, started by ``__enter__`` and ended by ``__exit__``."""

    __slots__ = ("_attributes", "_name", "_outer", "_span", "_token", "_tracer")

    def __init__(self, name: str, tracer: Tracer | None, attributes: Mapping[str, object]) -> None:
        self._name = name
        self._tracer = tracer
        self._attributes = attributes
        self._span: Span | None = None
        self._token: Token[OtelContext] | None = None
        self._outer: list[tuple[Span | None, Token[OtelContext] | None]] | None = None

    def __enter__(self) -> Span | None:
        if self._token is not None:
            self._enter_again()
        try:
            tracer = self._tracer or span_tracer.tracer
            span = start_span(tracer, self._name, None, _INTERNAL, self._attributes)
            self._token = otel_context.attach(trace.set_span_in_context(span))
            self._span = span
        except Exception as failure:  # noqa: BLE001 - the body runs whatever telemetry does
            _failed(failure)
        return self._span

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        span, token = self._span, self._token
        if span is None or token is None:
            return
        if error is not None:
            record_error(span, error)
        detach(token)
        if self._outer:
            self._span, self._token = self._outer.pop()
        else:
            self._span = self._token = None
        _end(span)

    def _enter_again(self) -> None:
        """Where the group is off such an object may be entered twice; so it may where it is on."""
        self._outer = self._outer or []
        self._outer.append((self._span, self._token))
        self._span = self._token = None


def managed_span(
    group: str, name: str, tracer: Tracer | None = None, /, **attributes: object
) -> AbstractContextManager[Span | None]:
    """A block under a span, if the group is on.

    Yields the span, current in the block, or ``None`` where the group is off, and in code that
    ``torch.compile`` compiles; the block runs the same in all cases. Off, it costs about as much as
    a ``with`` on an object that does nothing (``benchmarks/bench_spans.py`` measures it).

    Args:
        group: The span's group (:mod:`lens_core.spans.groups`).
        name: Name of the span.
        tracer: Tracer that starts it; that of this library if not given. A tracer is also
            accepted by keyword.
        **attributes: Attributes of the span, under any name, also ``group``, ``name`` and
            ``tracer``. Values are cleaned and redacted (:mod:`lens_core.spans.attributes`).
    """
    if group not in span_groups.enabled:
        if group not in span_groups.known:
            span_groups.report_unknown(group)
        return _OFF
    if is_compiling():
        return _OFF
    if tracer is None and isinstance(given := attributes.get("tracer"), Tracer):
        tracer = given
        del attributes["tracer"]
    return _Scope(name, tracer, attributes)


def span_cm(
    name: str, tracer: Tracer | None = None, /, **attributes: object
) -> AbstractContextManager[Span | None]:
    """A block under a span of no group; otherwise as :func:`managed_span`."""
    if is_compiling():
        return _OFF
    return _Scope(name, tracer, attributes)


def trace_fn(
    group: str, name: str | None = None, tracer: Tracer | None = None, /, **attributes: object
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: each call runs under a span, if the group is on at that time.

    Right for plain, ``async``, generator and async generator functions: the span covers the real
    work, from the call or the first item to the last, and ``inspect`` still sees the same kind of
    function. The span of a generator is current only while the generator itself runs, not in its
    consumer; one that is left half-way ends its span when it is closed. In code that
    ``torch.compile`` compiles, the function is as if it were not decorated.

    Args:
        group: The span's group.
        name: Name of the span; the function's qualified name if not given.
        tracer: Tracer that starts it; that of this library if not given, and in another process
            to which the function travels (Ray, joblib, a process pool).
        **attributes: Attributes of the span.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        title = name or str(getattr(function, "__qualname__", type(function).__qualname__))
        site = _Site(group, title, tracer, attributes)
        if isinstance(function, (classmethod, staticmethod)):
            # What a class makes of these is not what it makes of a function: wrap the one inside.
            return cast("Callable[P, R]", type(function)(decorate(function.__func__)))
        # mypy cannot know that P and R are those of the kind of function that inspect found.
        if inspect.isasyncgenfunction(function):
            return cast("Callable[P, R]", _wrap_async_generator(function, site))
        if inspect.isgeneratorfunction(function):
            return cast("Callable[P, R]", _wrap_generator(function, site))
        if inspect.iscoroutinefunction(function):
            return cast("Callable[P, R]", _wrap_coroutine(function, site))
        switch = span_groups

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if group not in switch.enabled:
                if group not in switch.known:
                    switch.report_unknown(group)
                # Passing on an empty mapping would make another one.
                return function(*args, **kwargs) if kwargs else function(*args)  # type: ignore[call-arg]
            if is_compiling():
                return function(*args, **kwargs)
            with site.scope():
                return function(*args, **kwargs)

        return call

    return decorate


def with_current_context(function: Callable[P, R]) -> Callable[P, R]:
    """The function, to be run on another thread with the current span and baggage of this one.

    A thread pool starts its threads with an empty context, so spans there would be new roots:
    ``pool.map(with_current_context(load), shards)`` makes them children. Safe to call from many
    threads at once. In another process, to which it is sent, it runs with an empty context.
    """
    captured = _Captured(copy_context())

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # A context can be entered once at a time, so each call has its own.
        return captured.context.copy().run(function, *args, **kwargs)

    return call


class _Captured:
    """A context of this process; in another one, to which a function travelled, an empty one."""

    __slots__ = ("context",)

    def __init__(self, context: Context | None = None) -> None:
        self.context = Context() if context is None else context

    def __reduce__(self) -> tuple[object, ...]:
        return _Captured, ()


class _Site:
    """A decorated function's place to start spans."""

    __slots__ = ("attributes", "group", "title", "tracer")

    def __init__(
        self, group: str, title: str, tracer: Tracer | None, attributes: Mapping[str, object]
    ) -> None:
        self.group = group
        self.title = title
        self.tracer = tracer
        self.attributes = attributes

    def __reduce__(self) -> tuple[object, ...]:
        # A tracer belongs to the provider of its process: elsewhere it is this library's.
        return _Site, (self.group, self.title, None, self.attributes)

    def is_on(self) -> bool:
        if self.group not in span_groups.known:
            span_groups.report_unknown(self.group)
        return self.group in span_groups.enabled

    def scope(self) -> _Scope:
        return _Scope(self.title, self.tracer, self.attributes)

    def start(self) -> Span:
        tracer = self.tracer or span_tracer.tracer
        return start_span(tracer, self.title, None, _INTERNAL, self.attributes)


def _wrap_coroutine(
    function: Callable[..., Awaitable[object]], site: _Site
) -> Callable[..., Awaitable[object]]:
    @functools.wraps(function)
    async def call(*args: object, **kwargs: object) -> object:
        if not site.is_on():
            return await function(*args, **kwargs)
        with site.scope():
            return await function(*args, **kwargs)

    return call


def _wrap_generator(
    function: Callable[..., Generator[object, object, object]], site: _Site
) -> Callable[..., Generator[object, object, object]]:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Generator[object, object, object]:
        items = function(*args, **kwargs)
        span = site.start() if site.is_on() else None
        if span is None:
            return (yield from items)
        value: object = None
        thrown: BaseException | None = None
        try:
            while True:
                # Current only while the generator runs: what the consumer does is not its child.
                token = otel_context.attach(trace.set_span_in_context(span))
                try:
                    item = items.send(value) if thrown is None else items.throw(thrown)
                except StopIteration as stop:
                    return stop.value
                finally:
                    detach(token)
                value = thrown = None
                try:
                    value = yield item
                except GeneratorExit:
                    items.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - thrown in: it is the generator's
                    thrown = error
        except BaseException as error:
            record_error(span, error)
            raise
        finally:
            thrown = None  # or its traceback, which holds this frame, would keep it alive
            _end(span)

    return call


def _wrap_async_generator(
    function: Callable[..., AsyncGenerator[object, object]], site: _Site
) -> Callable[..., AsyncGenerator[object, object]]:
    @functools.wraps(function)
    async def call(*args: object, **kwargs: object) -> AsyncGenerator[object, object]:
        items = function(*args, **kwargs)
        span = site.start() if site.is_on() else None
        value: object = None
        thrown: BaseException | None = None
        try:
            while True:
                token = (
                    None if span is None else otel_context.attach(trace.set_span_in_context(span))
                )
                try:
                    step = items.asend(value) if thrown is None else items.athrow(thrown)
                    item = await step
                except StopAsyncIteration:
                    return
                finally:
                    if token is not None:
                        detach(token)
                value = thrown = None
                try:
                    value = yield item
                except GeneratorExit:
                    await items.aclose()
                    raise
                except BaseException as error:  # noqa: BLE001 - thrown in: it is the generator's
                    thrown = error
        except BaseException as error:
            if span is not None:
                record_error(span, error)
            raise
        finally:
            thrown = None  # or its traceback, which holds this frame, would keep it alive
            if span is not None:
                _end(span)

    return call


def _end(span: Span) -> None:
    try:
        # One that was ended when the process was about to be killed is not ended twice.
        if span.is_recording() or not span.get_span_context().trace_flags.sampled:
            span.end()  # not end_span(): one function more shows (benchmarks/bench_spans.py)
    except Exception as failure:  # noqa: BLE001 - must not replace the user's exception
        _failed(failure)


def _failed(failure: Exception) -> None:
    diagnostics.record("span.failed", describe(failure))
