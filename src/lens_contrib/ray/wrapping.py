"""The wrapper around a traced function: what travels to the workers.

Three properties of Ray decide its form (Ray 2.60; each has a test):

- Ray pickles it by value. Its closure may hold only builtins and objects that reduce to builtins
  (:mod:`lens_contrib.ray.process_local`), and it imports this package in its body: in a worker
  without this package it calls the user's function, untraced.
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

from lens_contrib.ray.outer import OuterDecorators
from lens_contrib.ray.process_local import CallSpec
from lens_contrib.ray.transports import CARRIER_ARGUMENT

__all__ = ["RAY_CARRIER_ARGUMENT", "TRACED_MARK", "wrap_function"]

#: Keyword in which Ray's own tracing passes its context.
RAY_CARRIER_ARGUMENT: Final = "_ray_trace_ctx"
#: Attribute of a function that is traced already.
TRACED_MARK: Final = "__lens_traced__"

_Function = Callable[..., Any]


def wrap_function(function: _Function, spec: CallSpec, *, inject: bool) -> _Function:
    """The function with a carrier argument and a span around its body.

    Args:
        function: A plain function, coroutine function, generator function or async generator
            function. One that is traced already comes back as it is.
        spec: What the span is; builtins only.
        inject: Whether Ray's callers inject the current context by themselves.
    """
    if getattr(function, TRACED_MARK, False):
        return function
    signature = _signature(function)
    wants = _wants(signature)
    most = _most_positional(signature) if inject else sys.maxsize
    method = spec["method"]
    bound = "." in str(method) and next(iter(signature.parameters), "") in _BOUND
    if inspect.isasyncgenfunction(function):
        wrapper = _async_generator(function, spec, wants, most)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(function, spec, wants, most)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(function, spec, wants, most)
    else:
        wrapper = _plain(function, spec, wants, most)
    functools.update_wrapper(wrapper, function)
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    attributes: dict[str, object] = {
        "__signature__": _with_carriers(signature, most),
        "__ray_invocation_decorator__": _hook(
            OuterDecorators(wrapper, CARRIER_ARGUMENT),
            spec,
            inject and wants >= 0,
            wants - bound,
        ),
        TRACED_MARK: True,
    }
    wrapper.__dict__.update(attributes)
    return wrapper


def _wants(signature: inspect.Signature) -> int:
    """Whether the user declares the argument, and so gets its value: 0 if not.

    Otherwise how many positional arguments a call has at least if the user passes the value as one
    of them; -1 if that is the only way to pass it.
    """
    parameter = signature.parameters.get(CARRIER_ARGUMENT)
    if parameter is None:
        return 0
    if parameter.kind is _KEYWORD_ONLY:
        return sys.maxsize
    if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return list(signature.parameters).index(CARRIER_ARGUMENT) + 1
    return -1


def _most_positional(signature: inspect.Signature) -> int:
    """How many positional arguments the function takes: a carrier may come as one more.

    As one more positional argument the bytes of a ``traceparent`` cost Ray less than as a keyword
    argument, whose name Ray serializes with each call (``benchmarks/bench_ray.py``). Where the user
    declares the argument or takes any number of arguments there is no such place.
    """
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if CARRIER_ARGUMENT in signature.parameters or inspect.Parameter.VAR_POSITIONAL in kinds:
        return sys.maxsize
    return sum(kind not in (_KEYWORD_ONLY, _VAR_KEYWORD) for kind in kinds)


def _signature(function: _Function) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without one
        kinds = inspect.Parameter
        return inspect.Signature(
            [kinds("args", kinds.VAR_POSITIONAL), kinds("kwargs", kinds.VAR_KEYWORD)]
        )


def _with_carriers(signature: inspect.Signature, most: int) -> inspect.Signature:
    """The signature with both carrier arguments, with defaults."""
    parameters = list(signature.parameters.values())
    last = parameters.pop() if parameters and parameters[-1].kind is _VAR_KEYWORD else None
    if most < sys.maxsize:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.insert(most, inspect.Parameter(CARRIER_ARGUMENT, kind, default=None))
    elif CARRIER_ARGUMENT not in signature.parameters:
        parameters.append(inspect.Parameter(CARRIER_ARGUMENT, _KEYWORD_ONLY, default=None))
    if RAY_CARRIER_ARGUMENT not in signature.parameters:
        parameters.append(inspect.Parameter(RAY_CARRIER_ARGUMENT, _KEYWORD_ONLY, default=None))
    if last is not None:
        parameters.append(last)
    return signature.replace(parameters=parameters)


_VAR_KEYWORD: Final = inspect.Parameter.VAR_KEYWORD
_KEYWORD_ONLY: Final = inspect.Parameter.KEYWORD_ONLY
#: First parameters that callers do not pass.
_BOUND: Final = frozenset({"self", "cls"})


# From here on, nested functions: they are pickled by value, so their bodies import what they need,
# and their closures hold nothing of ours that would have to be imported in order to unpickle it.


def _hook(guard: OuterDecorators, spec: CallSpec, automatic: bool, given_at: int) -> _Function:
    """What Ray calls in the caller's process, before each submission of the traced function."""
    injector: Any = None
    tolerance: Any = guard

    def invocation_decorator(invocation: _Function) -> _Function:
        nonlocal injector, tolerance
        if not automatic or tolerance == 0:
            return invocation
        if injector is None:
            try:
                from lens_contrib.ray.injection import Injector

                if type(tolerance) is not int:
                    tolerance = tolerance.tolerance()
                injector = Injector(spec, given_at, by_position=tolerance > 1)
            except Exception:  # noqa: BLE001 - a caller without this package calls untraced
                return invocation
            if tolerance == 0:
                return invocation
        submit: _Function = injector.around(invocation)
        return submit

    invocation_decorator.__lens_tolerance__ = tolerance  # type: ignore[attr-defined]
    return invocation_decorator


def _plain(function: _Function, spec: CallSpec, wants: int, most: int) -> _Function:
    entry: Any = None

    def call(
        *args: Any, _otel_carrier: Any = None, _ray_trace_ctx: Any = None, **kwargs: Any
    ) -> Any:
        nonlocal entry
        if len(args) > most and type(args[-1]) is bytes and len(args[-1]) == 55:
            args, _otel_carrier = args[:-1], args[-1]
        elif wants > 0 and len(args) >= wants:
            _otel_carrier = args[wants - 1]
        elif wants > 0:
            carrier = _otel_carrier
            if type(carrier) is bytes:  # a traceparent alone travels as its bytes
                carrier = {"traceparent": carrier.decode("ascii", "replace")}
            kwargs["_otel_carrier"] = carrier
        scope = None
        try:
            if entry is None:
                from lens_contrib.ray.execution import Entry

                entry = Entry(spec)
            scope = entry.open(_otel_carrier, _ray_trace_ctx)
        except Exception:  # noqa: BLE001 - a worker without this package runs untraced
            pass
        if scope is None:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            scope.fail(error)
            raise
        finally:
            scope.close()

    return call


def _coroutine(function: _Function, spec: CallSpec, wants: int, most: int) -> _Function:
    entry: Any = None

    async def call(
        *args: Any, _otel_carrier: Any = None, _ray_trace_ctx: Any = None, **kwargs: Any
    ) -> Any:
        nonlocal entry
        if len(args) > most and type(args[-1]) is bytes and len(args[-1]) == 55:
            args, _otel_carrier = args[:-1], args[-1]
        elif wants > 0 and len(args) >= wants:
            _otel_carrier = args[wants - 1]
        elif wants > 0:
            carrier = _otel_carrier
            if type(carrier) is bytes:  # a traceparent alone travels as its bytes
                carrier = {"traceparent": carrier.decode("ascii", "replace")}
            kwargs["_otel_carrier"] = carrier
        scope = None
        try:
            if entry is None:
                from lens_contrib.ray.execution import Entry

                entry = Entry(spec)
            scope = entry.open(_otel_carrier, _ray_trace_ctx)
        except Exception:  # noqa: BLE001 - a worker without this package runs untraced
            pass
        if scope is None:
            return await function(*args, **kwargs)
        try:
            return await function(*args, **kwargs)
        except BaseException as error:
            scope.fail(error)
            raise
        finally:
            scope.close()

    return call


def _generator(function: _Function, spec: CallSpec, wants: int, most: int) -> _Function:
    entry: Any = None

    def call(
        *args: Any, _otel_carrier: Any = None, _ray_trace_ctx: Any = None, **kwargs: Any
    ) -> Any:
        nonlocal entry
        if len(args) > most and type(args[-1]) is bytes and len(args[-1]) == 55:
            args, _otel_carrier = args[:-1], args[-1]
        elif wants > 0 and len(args) >= wants:
            _otel_carrier = args[wants - 1]
        elif wants > 0:
            carrier = _otel_carrier
            if type(carrier) is bytes:  # a traceparent alone travels as its bytes
                carrier = {"traceparent": carrier.decode("ascii", "replace")}
            kwargs["_otel_carrier"] = carrier
        scope = None
        try:
            if entry is None:
                from lens_contrib.ray.execution import Entry

                entry = Entry(spec)
            scope = entry.start(_otel_carrier, _ray_trace_ctx)
        except Exception:  # noqa: BLE001 - a worker without this package runs untraced
            pass
        if scope is None:
            return (yield from function(*args, **kwargs))
        # The span is current while the user's code runs, and not while the consumer's does: each
        # step attaches and detaches. So this is "yield from" by hand.
        steps = None
        try:
            steps = function(*args, **kwargs)
            advance, value = steps.send, None
            while True:
                scope.attach()
                try:
                    item = advance(value)
                except StopIteration as stop:
                    return stop.value
                finally:
                    scope.detach()
                try:
                    value = yield item
                    advance = steps.send
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - passed on, as "yield from" does
                    advance, value = steps.throw, error
        except BaseException as error:
            scope.fail(error)
            raise
        finally:
            if steps is not None:
                scope.attach()
                try:
                    steps.close()
                finally:
                    scope.detach()
            scope.close()

    return call


def _async_generator(function: _Function, spec: CallSpec, wants: int, most: int) -> _Function:
    entry: Any = None

    async def call(
        *args: Any, _otel_carrier: Any = None, _ray_trace_ctx: Any = None, **kwargs: Any
    ) -> Any:
        nonlocal entry
        if len(args) > most and type(args[-1]) is bytes and len(args[-1]) == 55:
            args, _otel_carrier = args[:-1], args[-1]
        elif wants > 0 and len(args) >= wants:
            _otel_carrier = args[wants - 1]
        elif wants > 0:
            carrier = _otel_carrier
            if type(carrier) is bytes:  # a traceparent alone travels as its bytes
                carrier = {"traceparent": carrier.decode("ascii", "replace")}
            kwargs["_otel_carrier"] = carrier
        scope = None
        try:
            if entry is None:
                from lens_contrib.ray.execution import Entry

                entry = Entry(spec)
            scope = entry.start(_otel_carrier, _ray_trace_ctx)
        except Exception:  # noqa: BLE001 - a worker without this package runs untraced
            pass
        steps = None
        try:
            steps = function(*args, **kwargs)
            advance, value = steps.asend, None
            while True:
                if scope is not None:
                    scope.attach()
                try:
                    item = await advance(value)
                except StopAsyncIteration:
                    return
                finally:
                    if scope is not None:
                        scope.detach()
                try:
                    value = yield item
                    advance = steps.asend
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - passed on, as "yield from" does
                    advance, value = steps.athrow, error
        except BaseException as error:
            if scope is not None:
                scope.fail(error)
            raise
        finally:
            if scope is not None:
                scope.attach()
            try:
                if steps is not None:
                    await steps.aclose()
            finally:
                if scope is not None:
                    scope.close()

    return call
