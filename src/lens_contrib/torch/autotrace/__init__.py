"""Traces a torch job whose code knows nothing of it.

:func:`instrument` hooks torch where every script passes: optimizers, backward, data loaders,
process groups. Each hook on a private name stands alone behind a self-test
(:mod:`~lens_contrib.torch.autotrace.compat`); :func:`uninstrument` puts everything back.
``lens run --trace -- torchrun ...`` calls it in every rank. See ``docs/zero-code.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.distributed as dist

from lens_contrib.torch.autotrace.compat import problem_of
from lens_contrib.torch.autotrace.ddp_waits import hook_ddp
from lens_contrib.torch.autotrace.operation_hooks import hook_operations
from lens_contrib.torch.autotrace.patches import Patches
from lens_contrib.torch.autotrace.recorder import recorder
from lens_contrib.torch.autotrace.set_up import hook_process_groups, set_up_rank
from lens_contrib.torch.autotrace.training_hooks import hook_backward, hook_loader, hook_training
from lens_core.diagnostics import describe, diagnostics

__all__ = ["instrument", "uninstrument"]

#: Those whose name is that of a self-test are installed if it finds everything.
_HOOKS: Final[Mapping[str, Callable[[Patches], None]]] = {
    "training": hook_training,
    "loader": hook_loader,
    "backward": hook_backward,
    "process_groups": hook_process_groups,
    "operations": hook_operations,
    "ddp": hook_ddp,
}
_TESTED: Final = frozenset({"loader", "backward", "operations", "ddp"})
_DISTRIBUTED: Final = frozenset({"process_groups", "operations", "ddp"})
_lock: Final = threading.Lock()
_installed: Final[list[Patches]] = []


def instrument() -> None:
    """Trace this process's training from now on; a second call does nothing. Never raises.

    Call it before the process group is made. Telemetry is set up from ``NEMO_LENS_*`` unless the
    script has done so, or does so later; ``NEMO_LENS_ENABLED=0`` and ``OTEL_SDK_DISABLED`` leave it
    off. There is one span a step, with the rank's own time by phase; what is late becomes an open
    span, and span groups make spans of phases and operations.

    Not a collective, and no message is sent but those of
    :func:`~lens_contrib.torch.agree_run_key`, through the store, once the process group is made and
    where the launcher's environment holds no key.
    """
    with _lock:
        if _installed:
            return
        patches = Patches()
        _installed.append(patches)
        for name, hook in _HOOKS.items():
            if name in _DISTRIBUTED and not dist.is_available():
                continue
            try:
                problem = problem_of(name) if name in _TESTED else ""
                if not problem:
                    hook(patches)
            except Exception as error:  # noqa: BLE001 - the others still work
                problem = describe(error)
            if problem:
                diagnostics.record(
                    "autotrace.hook_off",
                    f"torch {torch.__version__} is built differently: {problem}",
                    todo=f"Report it with this version; without {name} the rest is traced.",
                )
        set_up_rank()


def uninstrument() -> None:
    """Put back what was replaced in torch, and record no longer. Telemetry stays set up."""
    with _lock:
        recorder.stop()
        while _installed:
            _installed.pop().restore()
