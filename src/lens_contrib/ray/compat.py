"""All that this package uses of Ray and that Ray does not promise, and one test of it.

Ray has a hook in the caller, ``__ray_invocation_decorator__``, but none of what the hook needs to
know is public: what is called, which arguments that takes, what is wrapped around it. Everything
here was read off Ray 2.60. :func:`check_private_names` says what is lost with a version that is
built differently; ``lens doctor`` shows it.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import ray
import ray._private.runtime_env.constants
import ray._private.worker
import ray._raylet
import ray.actor
from ray.actor import ActorClass
from ray.exceptions import AsyncioActorExit
from ray.remote_function import RemoteFunction

from lens_core.private_names import PrivateNames, missing_names

__all__ = [
    "PRIVATE_NAMES",
    "CARRIER_OF_RAY",
    "INVOCATION_DECORATOR",
    "ActorClass",
    "RemoteFunction",
    "callee",
    "check_private_names",
    "current_task",
    "decorators",
    "definition",
    "in_worker",
    "invocation_hook",
    "job_variables",
    "leaves_actor",
    "outermost",
    "outermost_method",
    "parameters",
    "patch",
    "patches",
    "without_options",
]

#: Attribute of a function that Ray calls in the caller's process around each submission of it.
INVOCATION_DECORATOR: Final = "__ray_invocation_decorator__"
#: Keyword in which Ray's own tracing passes its context.
CARRIER_OF_RAY: Final = "_ray_trace_ctx"
#: In a driver that the job server started: the job's configuration.
_JOB_CONFIG: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"

_Function = Callable[..., Any]


def in_worker() -> bool:
    """Whether Ray started this process to run tasks or an actor."""
    return bool(ray._private.worker.global_worker.mode == ray.WORKER_MODE)


def current_task() -> tuple[str, int]:
    """Id and attempt of the call that this worker runs; Ray's public functions are slower."""
    core: Any = ray._private.worker.global_worker.core_worker  # type: ignore[attr-defined]
    return core.get_current_task_id().hex(), core.get_current_task_attempt_number()


def job_variables() -> Collection[str]:
    """Variables that the job sets as which this driver was submitted, and the driver may not."""
    if os.environ.get("RAY_OVERRIDE_JOB_RUNTIME_ENV") == "1":
        return ()
    try:
        return (json.loads(os.environ[_JOB_CONFIG])["runtime_env"] or {}).get("env_vars") or ()
    except (KeyError, ValueError, TypeError):  # of no job, or one without a runtime_env
        return ()


def leaves_actor(error: BaseException) -> bool:
    """Whether ``ray.actor.exit_actor()`` raised it: a ``SystemExit`` that Ray marks."""
    return isinstance(error, AsyncioActorExit) or (
        isinstance(error, SystemExit) and hasattr(error, "ray_terminate_msg")
    )


def callee(invocation: _Function) -> object:
    """The remote function or actor method whose submission the hook was given."""
    names = invocation.__code__.co_freevars
    return cast("Any", invocation.__closure__)[names.index("self")].cell_contents


def definition(target: Any) -> tuple[Any, Mapping[str, object]]:
    """The function or class behind what ``@ray.remote`` made, and the options given to it."""
    if isinstance(target, RemoteFunction):
        return target._function, target._default_options
    return target.__ray_metadata__.modified_class.__ray_actor_class__, target._default_options


def invocation_hook(target: object) -> object:
    """What Ray calls in the caller's process for an actor's method; ``None`` if nothing."""
    return getattr(target, "_decorator", None)


def without_options(target: object) -> object:
    """The remote function, class or method on which ``.options(...)`` was called."""
    for name in ("_actor_method", "_remote_stub"):  # the latter in Ray Client
        original = getattr(target, name, None)
        if original is not None:
            return cast("object", original)
    # For functions and classes it is a local class, which holds the original in a closure.
    remote: Any = getattr(type(target), "remote", None)
    names = getattr(getattr(remote, "__code__", None), "co_freevars", ())
    for name in ("func_cls", "actor_cls"):
        if name in names:
            return cast("object", remote.__closure__[names.index(name)].cell_contents)
    return target


def parameters(target: Any) -> Sequence[inspect.Parameter]:
    """What ``target.remote`` takes, as Ray checks it."""
    metadata = getattr(target, "__ray_metadata__", None)
    if metadata is not None:
        return cast("Sequence[inspect.Parameter]", metadata.method_meta.signatures["__init__"])
    for name in ("_init_signature", "_signature"):  # the former of an actor class in Ray Client
        signature = getattr(target, name, None)
        if signature is not None:
            break
    else:
        actor = getattr(target, "_actor", None)
        if actor is not None:  # of a method that travelled without its actor's handle
            signature = actor._ray_method_signatures[target._method_name]
        else:
            # Something that is called like Ray's own shows the signature on its remote method.
            signature = inspect.signature(getattr(target, "_function", None) or target.remote)
    if isinstance(signature, inspect.Signature):
        return list(signature.parameters.values())
    return cast("Sequence[inspect.Parameter]", signature)


def outermost(target: Any) -> _Function | None:
    """The function that a worker calls, with all decorators; ``None`` where it is not known here.

    Of an actor's method it is known in the process that defined the class.
    """
    metadata = getattr(target, "__ray_metadata__", None)
    if metadata is not None:
        return cast("_Function", metadata.modified_class.__init__)
    client = getattr(target, "actor_cls", None)
    if client is not None:
        return cast("_Function", client.__init__)
    actor = getattr(target, "_actor", None)
    if actor is not None:
        described = actor._ray_actor_creation_function_descriptor
        methods: Any = ray.actor._ActorClassMethodMetadata._cache.get(described)
        return None if methods is None else methods.methods.get(target._method_name)
    return getattr(target, "_function", None) or getattr(target, "_func", None)


def outermost_method(function: _Function) -> _Function | None:
    """The same of a function that is a method of an actor class that this process defined."""
    for known in ray.actor._ActorClassMethodMetadata._cache.values():
        for method in known.methods.values():
            if inspect.unwrap(method) is function:
                return cast("_Function", method)
    return None


def decorators(function: _Function) -> Iterator[_Function]:
    """What is wrapped around a function, outermost first, without what Ray wraps around it."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if not str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("ray."):
            yield function
        function = inner


def patches() -> tuple[_Function, _Function, _Function]:
    """The functions of Ray through which every task, actor class and new actor goes.

    Raises:
        AttributeError: If one of them is not there.
    """
    return (
        RemoteFunction.__init__,
        ray.actor._modify_class,
        ActorClass._remote,
    )


def patch(init: _Function, modify_class: _Function, remote: _Function) -> None:
    """Replace them."""
    function_class, actor_class = cast("tuple[Any, Any]", (RemoteFunction, ActorClass))
    function_class.__init__ = init
    ray.actor._modify_class = modify_class
    actor_class._remote = remote


_raylet: Any = ray._raylet


def _exit_of_actor() -> object:
    try:
        _raylet.raise_sys_exit_with_custom_error_message("")
    except SystemExit as error:
        return error
    return None


def _client(name: str) -> Any:
    # A process without Ray Client has no use for its gRPC.
    from ray.util.client import common  # noqa: PLC0415

    return getattr(common, name).__init__


def _tracing() -> object:
    from ray.util.tracing import tracing_helper  # noqa: PLC0415 - as Ray does

    return tracing_helper._inject_tracing_into_function


_actor: Final = ray.actor
_CALLS: Final = "calls carry no context by themselves"
_DISPATCH: Final = "ray_dispatch_with_context sends no context"
_STRICT: Final = "@traced inside of a decorator that takes no keyword arguments breaks the call"
_OUTSIDE: Final = "@traced cannot be put outside of @ray.remote"
_CLIENT: Final = "ray_dispatch_with_context sends no context in Ray Client"
_INSTRUMENT: Final = "RayInstrumentor traces nothing"
PRIVATE_NAMES: Final = (
    PrivateNames(INVOCATION_DECORATOR, lambda: RemoteFunction.__init__, _CALLS),
    PrivateNames(INVOCATION_DECORATOR, lambda: _actor._ActorClassMethodMetadata.create, _CALLS),
    PrivateNames("self", lambda: RemoteFunction._remote, _STRICT),
    PrivateNames("self", lambda: _actor.ActorMethod._remote, _STRICT),
    PrivateNames("_function _default_options", lambda: RemoteFunction.__init__, _OUTSIDE),
    PrivateNames(
        "__ray_metadata__ _default_options", lambda: ActorClass._ray_from_modified_class, _OUTSIDE
    ),
    PrivateNames("__ray_actor_class__", lambda: _actor._modify_class, _OUTSIDE),
    PrivateNames(
        "method_meta modified_class", lambda: _actor._ActorClassMetadata.__init__, _DISPATCH
    ),
    PrivateNames("signatures", lambda: _actor._ActorClassMethodMetadata.create, _DISPATCH),
    PrivateNames(
        "_signature _actor _method_name _decorator", lambda: _actor.ActorMethod.__init__, _DISPATCH
    ),
    PrivateNames("_ray_method_signatures", lambda: _actor.ActorHandle.__init__, _DISPATCH),
    PrivateNames("_actor_method", lambda: _actor._ActorMethodOptionsWrapper.__init__, _DISPATCH),
    PrivateNames("func_cls", lambda: RemoteFunction.options, _DISPATCH),
    PrivateNames("actor_cls", lambda: ActorClass.options, _DISPATCH),
    PrivateNames(
        "_ray_actor_creation_function_descriptor", lambda: _actor.ActorHandle.__init__, _STRICT
    ),
    PrivateNames("methods", lambda: _actor._ActorClassMethodMetadata.create, _STRICT),
    PrivateNames("_cache", lambda: _actor._ActorClassMethodMetadata, _STRICT),
    PrivateNames("_modify_class", lambda: _actor, _INSTRUMENT),
    PrivateNames("_remote", lambda: ActorClass, _INSTRUMENT),
    PrivateNames("mode", lambda: ray._private.worker.global_worker, "workers set up no telemetry"),
    PrivateNames(
        "get_current_task_id get_current_task_attempt_number",
        lambda: _raylet.CoreWorker,
        "spans have no task id and attempt",
    ),
    PrivateNames("ray_terminate_msg", _exit_of_actor, "exit_actor() is an error on the span"),
    PrivateNames(
        _JOB_CONFIG,
        lambda: ray._private.runtime_env.constants,
        "runtime_env() cannot be used under ray job submit",
    ),
    PrivateNames(CARRIER_OF_RAY, _tracing, "spans do not nest in those of Ray's own tracing"),
    PrivateNames("_init_signature actor_cls", lambda: _client("ClientActorClass"), _CLIENT),
    PrivateNames("_signature", lambda: _client("ClientRemoteMethod"), _CLIENT),
    PrivateNames("_signature _func", lambda: _client("ClientRemoteFunc"), _CLIENT),
    PrivateNames("_remote_stub", lambda: _client("OptionWrapper"), _CLIENT),
)
check_private_names: Final = partial(missing_names, PRIVATE_NAMES)
