"""What of a DDP backward pass was waiting: DDP's reducer waits in C++, where no hook is.

Backward takes the same time on all ranks, however late one of them is. DDP's own log knows when a
rank's last gradient was ready, and when all of them were reduced; between the two it waited.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel

from lens_contrib.torch.autotrace.compat import ddp_times_ns, log_every_ddp_step
from lens_contrib.torch.autotrace.operation_hooks import next_sequence
from lens_contrib.torch.autotrace.operations import Operation
from lens_contrib.torch.autotrace.patches import Patches, never_raises
from lens_contrib.torch.autotrace.recorder import recorder

__all__ = ["hook_ddp", "read_ddp_waits"]

#: Model to when the reduction ended that was read last.
_models: Final[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()


def hook_ddp(patches: Patches) -> None:
    """Have every DDP model's log read."""
    patches.wrap([DistributedDataParallel], "__init__", _around_init)
    patches.wrap([DistributedDataParallel], "_sync_buffers", _around_sync_buffers)


def _around_init(inner: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        if recorder.is_live:
            _follow(self)

    return init


@never_raises
def _follow(model: Any) -> None:
    log_every_ddp_step(model)
    _models[model] = 0


@never_raises
def read_ddp_waits() -> None:
    """Take what was waiting in the backward passes since the last call out of own time."""
    for model, last_ns in list(_models.items()):
        times = ddp_times_ns(model)
        if times is not None and times[2] > last_ns:
            _, ready_ns, reduced_ns = times
            _models[model] = reduced_ns
            recorder.clock.waited_in("backward", reduced_ns - ready_ns)


def _around_sync_buffers(inner: Callable[..., Any]) -> Callable[..., Any]:
    def _sync_buffers(self: Any) -> Any:
        if not recorder.is_training_thread:
            return inner(self)
        operation = _begin(self.process_group)
        try:
            return inner(self)
        finally:
            if operation is not None:
                _end(operation)

    return _sync_buffers


@never_raises
def _begin(group: Any) -> Operation:
    operation = Operation("broadcast", group, time.time_ns(), next_sequence(group))
    recorder.enter_operation(operation)
    return operation


@never_raises
def _end(operation: Operation) -> None:
    recorder.leave_operation(operation)
