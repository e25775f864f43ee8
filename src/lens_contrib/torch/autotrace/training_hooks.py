"""Sees what makes up a training step: fetches, backward, optimizers, evaluation, checkpoints.

No module has a hook: those cost graphs under ``torch.compile``, and a saved model would need us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Final

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lens_contrib.post_import import forget_import, when_imported
from lens_contrib.torch.autotrace.compat import BaseLoaderIterator, backward_owner
from lens_contrib.torch.autotrace.ddp_waits import read_ddp_waits
from lens_contrib.torch.autotrace.patches import Patches, never_raises
from lens_contrib.torch.autotrace.recorder import recorder
from lens_contrib.torch.autotrace.set_up import start_without_a_group

__all__ = ["hook_backward", "hook_loader", "hook_training"]

_CHECKPOINTS: Final = {
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "torch.distributed.checkpoint.state_dict_loader": ("load",),
}


def hook_training(patches: Patches) -> None:
    """Have the recorder told through what torch shows: optimizers, evaluation, checkpoints."""
    before = register_optimizer_step_pre_hook(_before_optimizer)
    after = register_optimizer_step_post_hook(_after_optimizer)
    patches.on_restore(before.remove)
    patches.on_restore(after.remove)
    patches.wrap([torch.amp.GradScaler], "step", _around_scaler)
    patches.wrap([torch.nn.Module], "train", _around_train)
    for name in ("save", "load"):
        patches.wrap([torch, torch.serialization], name, _around("checkpoint"))
    for name, functions in _CHECKPOINTS.items():
        # Before the package takes the functions from it.
        when_imported(name, _checkpoints(patches, functions))
        patches.on_restore(lambda name=name: forget_import(name))  # type: ignore[misc]


def _checkpoints(patches: Patches, functions: Iterable[str]) -> Callable[[ModuleType], None]:
    def hook(module: ModuleType) -> None:
        package = torch.distributed.__dict__.get("checkpoint")
        owners = [module] if package is None else [module, package]
        for name in functions:
            patches.wrap(owners, name, _around("checkpoint"))

    return hook


@never_raises
def _before_optimizer(optimizer: Any, args: object, kwargs: object) -> None:
    if not recorder.is_live:
        start_without_a_group()
    if recorder.is_training_thread:
        read_ddp_waits()
        recorder.begin(recorder.rule.optimizer(optimizer))
        recorder.enter("optimizer")


@never_raises
def _after_optimizer(optimizer: Any, args: object, kwargs: object) -> None:
    if recorder.is_training_thread:
        recorder.leave("optimizer")
        recorder.rule.stepped(optimizer)
        recorder.optimizer_steps += 1


def _around_scaler(inner: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = recorder.optimizer_steps
        result = inner(self, optimizer, *args, **kwargs)
        if recorder.is_training_thread and recorder.optimizer_steps == before:
            _skipped(optimizer)
        return result

    return step


@never_raises
def _skipped(optimizer: Any) -> None:
    """Gradients were not finite: the optimizer was not called, and the step is one all the same."""
    recorder.begin(recorder.rule.optimizer(optimizer))
    recorder.rule.stepped(optimizer)
    recorder.skipped += 1


def hook_backward(patches: Patches) -> None:
    """Have it told of backward passes."""
    patches.wrap([backward_owner], "_engine_run_backward", _around_backward)


def _around_backward(inner: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # torch.autograd.grad comes here too, and is not the backward pass of a step.
        if not (kwargs.get("accumulate_grad") and recorder.is_training_thread):
            return inner(*args, **kwargs)
        _before_backward()
        try:
            return inner(*args, **kwargs)
        finally:
            _leave("backward")

    return run


@never_raises
def _before_backward() -> None:
    if recorder.end_evaluation():
        recorder.begin(recorder.rule.fetch())
    recorder.begin(recorder.rule.backward())
    recorder.enter("backward")


def hook_loader(patches: Patches) -> None:
    """Have it told of fetches from data loaders."""
    patches.wrap([BaseLoaderIterator], "__next__", _around_next)


def _around_next(inner: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(self: Any) -> Any:
        if not recorder.is_training_thread or recorder.is_evaluating:
            return inner(self)
        _before_fetch()
        try:
            batch = inner(self)
        finally:
            _leave("data")
        recorder.samples += _sample_count(batch) or 0
        return batch

    return fetch


@never_raises
def _before_fetch() -> None:
    recorder.begin(recorder.rule.fetch())
    recorder.enter("data")


@never_raises
def _sample_count(batch: object) -> int:
    """Length of the first tensor in a batch: along its first dimension are the samples."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((n for part in batch if (n := _sample_count(part))), 0)
    return 0


def _around_train(inner: Callable[..., Any]) -> Callable[..., Any]:
    def train(self: Any, mode: bool = True) -> Any:
        # Called for each submodule: only the outermost call changes anything here.
        if recorder.is_live and recorder.is_evaluating == mode and recorder.is_training_thread:
            _evaluate(not mode)
        return inner(self, mode)

    return train


@never_raises
def _evaluate(begins: bool) -> None:
    if not begins:
        recorder.end_evaluation()
    elif recorder.rule.has_stepped:  # a model that is frozen before the first step is no evaluation
        recorder.is_evaluating = True
        recorder.enter("evaluate")


def _around(phase: str) -> Callable[..., Any]:
    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # A distributed checkpoint calls torch.save for each of its tensors.
            if not recorder.is_training_thread or recorder.clock.phase == phase:
                return inner(*args, **kwargs)
            _enter(phase)
            try:
                return inner(*args, **kwargs)
            finally:
                _leave(phase)

        return call

    return around


_enter: Final = never_raises(recorder.enter)
_leave: Final = never_raises(recorder.leave)
