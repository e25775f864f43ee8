"""The wrapper around a traced function: what travels to the workers.

Three properties of Ray decide its form (Ray 2.60; each has a test):

- Ray pickles it by value. Its closure may hold only builtins and objects that reduce to builtins,
  and it imports this package in its body: in a worker without this package it calls the user's
  function, untraced.
- For actor methods Ray reads signature and options from ``inspect.unwrap(method)``. So the wrapper
  has no ``__wrapped__``, its own ``__signature__``, and a copy of the function's ``__dict__``.
- Ray and asyncio look at the kind of the function: a coroutine function gets a coroutine
  function as its wrapper, a generator function a generator function, and so on.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Final

from lens_contrib.ray.call_spec import CallSpec
from lens_contrib.ray.compat import CARRIER_OF_RAY, INVOCATION_DECORATOR
from lens_contrib.ray.injection import Injector
from lens_contrib.ray.transports import CARRIER_ARGUMENT

__all__ = ["TRACED_MARK", "wrap_function"]

#: Attribute of a function that is traced already.
TRACED_MARK: Final = "__lens_traced__"
_KEYWORD_ONLY: Final = inspect.Parameter.KEYWORD_ONLY
_BY_POSITION: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD
_VAR_POSITIONAL: Final = inspect.Parameter.VAR_POSITIONAL
_VAR_KEYWORD: Final = inspect.Parameter.VAR_KEYWORD

_Function = Callable[..., Any]


def wrap_function(function: _Function, spec: CallSpec, *, inject: bool) -> _Function:
    """The function with a carrier argument and a span around its body.

    Args:
        function: A plain function, coroutine function, generator function or async generator
            function. One that is traced already comes back as it is.
        spec: What the span is.
        inject: Whether Ray's callers inject the current context by themselves.
    """
    if getattr(function, TRACED_MARK, False):
        return function
    signature = _signature(function)
    most = _most_positional(signature) if inject else sys.maxsize
    declared = _declared(signature)
    begin = _begin(spec, declared, most)
    if inspect.isasyncgenfunction(function):
        wrapper = _async_generator(function, begin)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(function, begin)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(function, begin)
    else:
        wrapper = _plain(function, begin)
    functools.update_wrapper(wrapper, function)
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    wrapper.__dict__.update({"__signature__": _with_carriers(signature, most), TRACED_MARK: True})
    if inject and declared >= 0:
        method = "." in spec["method"] and next(iter(signature.parameters), "") in ("self", "cls")
        injector = Injector(spec, declared - method, wrapper)
        setattr(wrapper, INVOCATION_DECORATOR, _hook(injector, spec, declared - method))
    return wrapper


def _declared(signature: inspect.Signature) -> int:
    """Whether the user declares the argument, and so gets its value: 0 if not.

    Otherwise how many positional arguments a call has at least if the user passes the value as one
    of them; -1 if that is the only way to pass it.
    """
    parameter = signature.parameters.get(CARRIER_ARGUMENT)
    if parameter is None:
        return 0
    if parameter.kind is _KEYWORD_ONLY:
        return sys.maxsize
    return (
        list(signature.parameters).index(CARRIER_ARGUMENT) + 1
        if (parameter.kind is _BY_POSITION)
        else -1
    )


def _most_positional(signature: inspect.Signature) -> int:
    """How many positional arguments the function takes: a carrier may come as one more.

    Where the user declares the argument or takes any number of arguments there is no such place.
    """
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if CARRIER_ARGUMENT in signature.parameters or _VAR_POSITIONAL in kinds:
        return sys.maxsize
    return sum(kind not in (_KEYWORD_ONLY, _VAR_KEYWORD) for kind in kinds)


def _signature(function: _Function) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without one
        kinds = {"args": _VAR_POSITIONAL, "kwargs": _VAR_KEYWORD}
        return inspect.Signature([inspect.Parameter(*one) for one in kinds.items()])


def _with_carriers(signature: inspect.Signature, most: int) -> inspect.Signature:
    """The signature with both carrier arguments, with defaults."""
    parameters = list(signature.parameters.values())
    last = parameters[-1:] if parameters and parameters[-1].kind is _VAR_KEYWORD else []
    del parameters[len(parameters) - len(last) :]
    if most < sys.maxsize:
        parameters.insert(most, inspect.Parameter(CARRIER_ARGUMENT, _BY_POSITION, default=None))
    for name in (CARRIER_ARGUMENT, CARRIER_OF_RAY):
        if all(parameter.name != name for parameter in parameters):
            parameters.append(inspect.Parameter(name, _KEYWORD_ONLY, default=None))
    return signature.replace(parameters=[*parameters, *last])


# From here on, nested functions: they are pickled by value, so their bodies import what they need,
# and their closures hold nothing of ours that would have to be imported in order to unpickle it.


def _hook(injector: Any, spec: CallSpec, declared: int) -> _Function:
    """What Ray calls in the caller's process, before each submission of the traced function."""

    def invocation_decorator(invocation: _Function) -> _Function:
        nonlocal injector
        try:
            if type(injector) is int:  # it came from another process
                # A copy of this closure takes nothing with it: it imports where it arrives.
                from lens_contrib.ray.injection import Injector  # noqa: PLC0415

                injector = Injector(spec, declared, injector)
            submit: _Function = injector.around(invocation)
        except Exception:  # noqa: BLE001 - a caller without this package calls untraced
            return invocation
        return submit

    invocation_decorator.__lens_acceptance__ = injector  # type: ignore[attr-defined]
    return invocation_decorator


def _begin(spec: CallSpec, declared: int, most: int) -> _Function:
    callee: Any = None

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The user's arguments, without the carriers, and the execution; None where untraced."""
        nonlocal callee
        carrier = kwargs.pop("_otel_carrier", None)
        of_ray = kwargs.pop("_ray_trace_ctx", None)
        if len(args) > most and type(args[-1]) is bytes and len(args[-1]) == 55:
            args, carrier = args[:-1], args[-1]
        elif declared > 0 and len(args) >= declared:
            carrier = args[declared - 1]
        elif declared > 0 and carrier is not None:
            if type(carrier) is bytes:  # a traceparent alone travels as its bytes
                carrier = {"traceparent": carrier.decode("ascii", "replace")}
            kwargs["_otel_carrier"] = carrier
        try:
            if callee is None:
                from lens_contrib.ray.execution import Callee  # noqa: PLC0415 - as above

                callee = Callee(spec)
            return args, callee.start(of_ray if carrier is None else carrier)
        except Exception:  # noqa: BLE001 - a worker without this package runs untraced
            return args, None

    return begin


def _plain(function: _Function, begin: _Function) -> _Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        args, execution = begin(args, kwargs)
        if execution is None:
            return function(*args, **kwargs)
        with execution:
            return function(*args, **kwargs)

    return call


def _coroutine(function: _Function, begin: _Function) -> _Function:
    async def call(*args: Any, **kwargs: Any) -> Any:
        args, execution = begin(args, kwargs)
        if execution is None:
            return await function(*args, **kwargs)
        with execution:
            return await function(*args, **kwargs)

    return call


def _generator(function: _Function, begin: _Function) -> _Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        args, execution = begin(args, kwargs)
        if execution is None:
            return (yield from function(*args, **kwargs))
        return (yield from execution.generate(function, args, kwargs))

    return call


def _async_generator(function: _Function, begin: _Function) -> _Function:
    async def call(*args: Any, **kwargs: Any) -> Any:
        args, execution = begin(args, kwargs)
        steps = None
        try:  # there is no "yield from" for these, so it is done by hand
            steps = function(*args, **kwargs)
            advance, value = steps.asend, None
            while True:
                if execution is not None:
                    execution.attach()
                try:
                    item = await advance(value)
                except StopAsyncIteration:
                    return
                finally:
                    if execution is not None:
                        execution.detach()
                try:
                    value = yield item
                    advance = steps.asend
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - passed on, as "yield from" does
                    advance, value = steps.athrow, error
        except BaseException as error:
            if execution is not None:
                execution.fail(error)
            raise
        finally:
            if execution is not None:
                execution.attach()
            try:
                if steps is not None:
                    await steps.aclose()
            finally:
                if execution is not None:
                    execution.close()

    return call
