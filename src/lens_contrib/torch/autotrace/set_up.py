"""Telemetry of a process whose script does not set it up: when, and as which rank of which run.

A rank of torchrun is set up when torch is imported, so that one that never comes to
``init_process_group`` can be seen not to; any other one when it gets there; one without a process
group at its first optimizer step. Launchers and data loaders' workers get to none of these.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lens_contrib.torch.autotrace.late_spans import watch
from lens_contrib.torch.autotrace.operation_hooks import forget_groups
from lens_contrib.torch.autotrace.operations import Operation
from lens_contrib.torch.autotrace.patches import Patches, never_raises
from lens_contrib.torch.autotrace.recorder import recorder
from lens_contrib.torch.run_key_agreement import agree_run_key
from lens_contrib.traced_report import report_traced
from lens_core.identity import Identity, install_identity, run_key_from_environment
from lens_core.semconv import NV_DL_RANK, NV_DL_WORLD_SIZE
from lens_core.telemetry.config import NemoLensConfig
from lens_core.telemetry.handle import current_telemetry
from lens_core.telemetry.setup import let_next_setup_replace, setup_telemetry

__all__ = ["hook_process_groups", "set_up_rank", "start_without_a_group"]

#: Set by the rank itself, for its children: they inherit its ``RANK`` and are not that rank.
_TAKEN: Final = "LENS_TRACED_RANK"
#: How long ranks wait for each other's word on the run key. The last to leave
#: ``init_process_group`` is there by then; one that is not traced never is.
_AGREE_S: Final = 5.0


def set_up_rank() -> None:
    """Set telemetry up now if this process is a rank that torchrun started."""
    if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ and _TAKEN not in os.environ:
        os.environ[_TAKEN] = os.environ["RANK"]
        _set_up()


@never_raises
def start_without_a_group() -> None:
    """A script without a process group has come to its first optimizer step."""
    if not dist.is_initialized():
        _set_up()


@never_raises
def _set_up() -> None:
    if recorder.is_live:
        return
    if current_telemetry() is None:  # else it is the script's own
        config = NemoLensConfig.from_env()
        if not os.environ.get("NEMO_LENS_ENABLED"):
            config = dataclasses.replace(config, enabled=True)
        known = {}
        if dist.is_initialized():
            known = {NV_DL_RANK: dist.get_rank(), NV_DL_WORLD_SIZE: dist.get_world_size()}
        handle = setup_telemetry(config, resource_attributes=known)
        if current_telemetry() is None:
            return  # disabled
        # The script may still come to a set-up of its own, which is no mistake of its.
        let_next_setup_replace(handle)
    recorder.go_live()
    report_traced()
    atexit.register(recorder.stop)
    watch()


def hook_process_groups(patches: Patches) -> None:
    """Have the recorder told when the process group is made, and when it ends."""
    modules = (distributed_c10d, dist)
    patches.wrap(modules, "init_process_group", _around_init)
    patches.wrap(modules, "destroy_process_group", _around_destroy)


def _around_init(inner: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if "RANK" in os.environ:
            _set_up()
        operation = _begin_rendezvous()
        try:
            result = inner(*args, **kwargs)
        finally:
            _end_rendezvous(operation)
        _set_up()
        _agree()
        return result

    return init_process_group


@never_raises
def _begin_rendezvous() -> Operation | None:
    if not recorder.is_live:
        return None
    operation = Operation("init_process_group", None, time.time_ns(), waits=False)
    operation.opened.append(recorder.open_operation(operation))
    recorder.enter_operation(operation)
    return operation


@never_raises
def _end_rendezvous(operation: Operation | None) -> None:
    if operation is not None:
        recorder.leave_operation(operation)


@never_raises
def _agree() -> None:
    """One run key on all ranks; without a message where the launcher's environment holds one."""
    if not recorder.is_live:
        return
    forget_groups()
    environ = os.environ
    if environ.get("RANK") == str(dist.get_rank()) and (
        environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    ):  # all ranks are children of one launcher, whose environment they share
        key = run_key_from_environment()
        if key is not None:
            install_identity(Identity(key, rank=dist.get_rank()))
            return
    agree_run_key(timeout_s=_AGREE_S)


def _around_destroy(inner: Callable[..., Any]) -> Callable[..., Any]:
    def destroy_process_group(group: Any = None) -> Any:
        if group is None and recorder.is_training_thread:
            _end()
        return inner(group)

    return destroy_process_group


_end: Final = never_raises(recorder.end)
