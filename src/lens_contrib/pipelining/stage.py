"""The hooks of one stage: its methods, overridden on the instance, and put back.

A schedule looks the methods up on the stage object at each call. Each hook calls the original with
the very same arguments and returns what it returned; what telemetry does around it cannot raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace

from lens_contrib.pipelining.step import PipelineTrace, guarded
from lens_core.detach import detach
from lens_core.errors import MissingExtraError
from lens_core.outcome import record_error

try:
    import torch.distributed as dist
    from torch.distributed.pipelining.stage import _PipelineStageBase
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["StageHooks"]

_ABSENT: Final = object()


class StageHooks:
    """Traces one stage until :meth:`remove`.

    Args:
        stage: The stage.
        trace: What all stages of the schedule share.
        alone: Whether the stage's schedule is not instrumented, so that the stage itself must
            notice when a new step starts.
    """

    def __init__(self, stage: _PipelineStageBase, trace: PipelineTrace, *, alone: bool) -> None:
        self._stage = stage
        self._trace = trace
        self._index: int = stage.stage_index
        self._replaced: dict[str, object] = {}
        self._hook("forward_one_chunk", self._computing("forward", "forward"))
        self._hook("backward_one_chunk", self._backward)
        self._hook("backward_weight_one_chunk", self._computing("backward_weight", "weight"))
        self._hook("get_fwd_send_ops", self._sending("forward", self._forward_destinations))
        self._hook("get_bwd_send_ops", self._sending("backward", self._backward_destinations))
        self._hook("get_fwd_recv_ops", self._receiving("forward", self._forward_sources))
        self._hook("get_bwd_recv_ops", self._receiving("backward", self._backward_sources))
        self._hook("set_local_fwd_input", self._handing_over("forward", self._index - 1))
        self._hook("set_local_bwd_input", self._handing_over("backward", self._index + 1))
        if alone:
            self._hook("clear_runtime_states", self._new_step)

    def remove(self) -> None:
        """Put every method back."""
        for name, before in self._replaced.items():
            if before is _ABSENT:
                delattr(self._stage, name)
            else:
                setattr(self._stage, name, before)
        self._replaced.clear()

    def _hook(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(self._stage, name)
        self._replaced[name] = vars(self._stage).get(name, _ABSENT)
        setattr(self._stage, name, make(original))

    def _new_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clear_runtime_states(*args: Any, **kwargs: Any) -> Any:
            guarded(self._trace.new_step)
            return original(*args, **kwargs)

        return clear_runtime_states

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        full = self._computing("backward", "backward")(original)
        inputs = self._computing("backward_input", "backward")(original)

        def backward_one_chunk(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if not self._stage.has_backward:  # in eval() it is called, and does nothing
                return original(bwd_chunk_id, *args, **kwargs)
            is_full = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
            return (full if is_full else inputs)(bwd_chunk_id, *args, **kwargs)

        return backward_one_chunk

    def _computing(
        self, name: str, direction: str
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def hook(original: Callable[..., Any]) -> Callable[..., Any]:
            shared, index = self._trace, self._index

            def compute(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
                span = guarded(shared.begin, name, (direction, index, chunk_id))
                if span is None:
                    return original(chunk_id, *args, **kwargs)
                token = otel_context.attach(trace.set_span_in_context(span, shared.context))
                try:
                    return original(chunk_id, *args, **kwargs)
                except BaseException as error:
                    record_error(span, error)
                    raise
                finally:
                    detach(token)
                    guarded(span.end)

            return compute

        return hook

    def _sending(
        self, direction: str, destinations: Callable[[], list[int]]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def hook(original: Callable[..., Any]) -> Callable[..., Any]:
            def get_send_ops(chunk_id: int) -> Any:
                ops: list[dist.P2POp] = original(chunk_id)
                if ops:
                    place = (direction, self._index, chunk_id)
                    self._trace.send(place, destinations(), ops)
                return ops

            return get_send_ops

        return hook

    def _receiving(
        self, direction: str, sources: Callable[[int], list[int]]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def hook(original: Callable[..., Any]) -> Callable[..., Any]:
            def get_recv_ops(chunk_id: int) -> Any:
                ops: list[dist.P2POp] = original(chunk_id)
                if ops:
                    place = (direction, self._index, chunk_id)
                    self._trace.receive(place, sources(chunk_id), ops)
                return ops

            return get_recv_ops

        return hook

    def _handing_over(
        self, direction: str, source: int
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def hook(original: Callable[..., Any]) -> Callable[..., Any]:
            def set_local_input(outputs: Any, mb_index: int) -> Any:
                place = (direction, self._index, mb_index)
                guarded(self._trace.handed_over, source, place)
                return original(outputs, mb_index)

            return set_local_input

        return hook

    def _forward_destinations(self) -> list[int]:
        return _unique(dst for stages in self._stage.act_send_info.values() for dst in stages)

    def _backward_destinations(self) -> list[int]:
        return _unique(self._stage.grad_send_info or ())

    def _forward_sources(self, microbatch: int) -> list[int]:
        infos = self._stage.args_recv_info[microbatch]
        return _unique(info.source for info in infos if not info.is_root_arg)

    def _backward_sources(self, microbatch: int) -> list[int]:
        infos = self._stage.grad_recv_info[microbatch]
        return _unique(info.source for info in infos if not info.is_root_arg)


def _unique(stages: Any) -> list[int]:
    return list(dict.fromkeys(stage for stage in stages if stage is not None))
