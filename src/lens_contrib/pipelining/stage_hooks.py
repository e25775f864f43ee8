"""The hooks of one stage: its methods, overridden on the instance, and put back.

A schedule looks the methods up on the stage object at each call. Each hook calls the original with
the very same arguments and returns what it returned, with frames added where they are sent; what
telemetry does around it cannot raise.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace

from lens_contrib.pipelining.compat import PipelineStage
from lens_contrib.pipelining.hook import KEPT_AS, Hook, LeftOutOfCopies, guarded, hook_copying
from lens_contrib.pipelining.schedule_run import PipelineTrace
from lens_core.current_context import detach
from lens_core.spans.status import record_error

__all__ = ["StageHooks"]

_Method = Callable[..., Any]
_Around = Callable[[_Method], _Method]
_NOT_GIVEN: Final = object()
#: What torch calls the index of the microbatch.
_CHUNK_ID: Final = {
    "forward": "fwd_chunk_id",
    "backward": "bwd_chunk_id",
    "weight": "bwd_chunk_id",
}


class StageHooks(LeftOutOfCopies):
    """Traces one stage until the last of those who asked for it calls :meth:`release`.

    Args:
        stage: The stage.
        shared: What all stages of the pipeline share.
    """

    def __init__(self, stage: PipelineStage, shared: PipelineTrace) -> None:
        self.trace: Final = shared
        #: Who wants the stage traced: the schedules that run on it.
        self.users: list[Any] = []
        self._stage = stage
        self._index: int = stage.stage_index
        around: dict[str, _Around] = {
            "clear_runtime_states": self._clearing,
            "_prepare_forward_infra": self._preparing,
            "forward_one_chunk": self._computing("forward", "forward"),
            "backward_one_chunk": self._backward,
            "backward_weight_one_chunk": self._computing("backward_weight", "weight"),
            "get_fwd_send_ops": self._sending("forward", 1, self._forward_destinations),
            "get_bwd_send_ops": self._sending("backward", -1, self._backward_destinations),
            "get_fwd_recv_ops": self._receiving("forward", -1, self._forward_sources),
            "get_bwd_recv_ops": self._receiving("backward", 1, self._backward_sources),
            "set_local_fwd_input": self._handing_over("forward", -1),
            "set_local_bwd_input": self._handing_over("backward", 1),
        }
        self._hooks = [Hook(stage, name, hook) for name, hook in around.items()]
        self._hooks.append(hook_copying(stage))
        setattr(stage, KEPT_AS, self)
        shared.indices.add(self._index)

    def release(self, user: object) -> None:
        """Put every method back, if nobody else wants the stage traced."""
        self.users.remove(user)
        if self.users:
            return
        for hook in self._hooks:
            hook.remove()
        delattr(self._stage, KEPT_AS)
        self.trace.indices.discard(self._index)
        if not self.trace.indices:
            guarded(self.trace.finish)

    def _clearing(self, original: _Method) -> _Method:
        def clear(*args: Any, **kwargs: Any) -> Any:
            guarded(self.trace.cleared, self._index)
            return original(*args, **kwargs)

        return clear

    def _preparing(self, original: _Method) -> _Method:
        def prepare(*args: Any, **kwargs: Any) -> Any:  # the first messages of a schedule
            self.trace.run()
            return original(*args, **kwargs)

        return prepare

    def _backward(self, original: _Method) -> _Method:
        full = self._computing("backward", "backward")(original)
        inputs = self._computing("backward_input", "backward")(original)
        full_backward = _argument(original, 2, "full_backward")

        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self._stage.has_backward:  # in eval() it is called, and does nothing
                return original(*args, **kwargs)
            return (full if full_backward(args, kwargs) else inputs)(*args, **kwargs)

        return backward

    def _computing(self, name: str, direction: str) -> _Around:
        def around(original: _Method) -> _Method:
            shared, index = self.trace, self._index
            chunk = _number(original, 0, _CHUNK_ID[direction])

            def compute(*args: Any, **kwargs: Any) -> Any:
                chunk_id = chunk(args, kwargs)
                if chunk_id is None:
                    return original(*args, **kwargs)
                run = shared.run()
                span = guarded(run.begin, name, (direction, index, chunk_id))
                if span is None:
                    return original(*args, **kwargs)
                token = otel_context.attach(trace.set_span_in_context(span, run.hops.context))
                try:
                    return original(*args, **kwargs)
                except BaseException as error:
                    record_error(span, error)
                    raise
                finally:
                    detach(token)
                    guarded(span.end)

            return compute

        return around

    def _sending(self, direction: str, towards: int, stages: Callable[[], list[int]]) -> _Around:
        def around(original: _Method) -> _Method:
            chunk = _number(original, 0, _CHUNK_ID[direction])

            def get_send_ops(*args: Any, **kwargs: Any) -> Any:
                ops = original(*args, **kwargs)
                if not ops:
                    return ops
                chunk_id = chunk(args, kwargs)
                place = None if chunk_id is None else (direction, self._index, chunk_id)
                return self.trace.run().send(place, stages, self._index + towards, ops)

            return get_send_ops

        return around

    def _receiving(
        self, direction: str, towards: int, stages: Callable[[int], list[int]]
    ) -> _Around:
        def around(original: _Method) -> _Method:
            chunk = _number(original, 0, _CHUNK_ID[direction])

            def get_recv_ops(*args: Any, **kwargs: Any) -> Any:
                ops = original(*args, **kwargs)
                if not ops:
                    return ops
                chunk_id = chunk(args, kwargs)
                place = None if chunk_id is None else (direction, self._index, chunk_id)
                return self.trace.run().receive(
                    place, lambda: stages(chunk_id or 0), self._index + towards, ops
                )

            return get_recv_ops

        return around

    def _handing_over(self, direction: str, towards: int) -> _Around:
        def around(original: _Method) -> _Method:
            chunk = _number(original, 1, "mb_index")

            def set_local_input(*args: Any, **kwargs: Any) -> Any:
                chunk_id = chunk(args, kwargs)
                if chunk_id is not None:
                    place = (direction, self._index, chunk_id)
                    guarded(self.trace.run().handed_over, self._index + towards, place)
                return original(*args, **kwargs)

            return set_local_input

        return around

    # In the order of the operations that torch makes of them.

    def _forward_destinations(self) -> list[int]:
        stages = self._stage.act_send_info.values()
        return [stage for of_output in stages for stage in of_output if stage is not None]

    def _backward_destinations(self) -> list[int]:
        return [stage for stage in self._stage.grad_send_info or () if stage is not None]

    def _forward_sources(self, microbatch: int) -> list[int]:
        return _sources(self._stage.args_recv_info[microbatch])

    def _backward_sources(self, microbatch: int) -> list[int]:
        return _sources(self._stage.grad_recv_info[microbatch])


def _sources(infos: Any) -> list[int]:
    return [info.source for info in infos if not info.is_root_arg and info.buffer is not None]


def _argument(method: _Method, position: int, name: str) -> Callable[[Any, Any], Any]:
    """Finds an argument of a call, by position or by name; its default where it is not given."""
    default: Any = _NOT_GIVEN
    try:
        parameter = list(inspect.signature(method).parameters.values())[position]
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            name, default = parameter.name, parameter.default
    except (IndexError, TypeError, ValueError):
        pass  # a method that shows no signature takes torch's names
    default = _NOT_GIVEN if default is inspect.Parameter.empty else default

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[position] if len(args) > position else kwargs.get(name, default)

    return find


def _number(method: _Method, position: int, name: str) -> Callable[[Any, Any], int | None]:
    """Finds the index of the microbatch among the arguments; ``None`` where there is none."""
    find = _argument(method, position, name)

    def number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        try:
            return operator.index(find(args, kwargs))
        except TypeError:
            return None  # the method itself will say what is wrong with the call

    return number
