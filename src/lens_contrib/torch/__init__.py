"""What a torch job can do about its traces beyond sending: agree, wait, publish, carry on.

:func:`instrument` traces a script that knows nothing of it; :func:`uninstrument` undoes that.
:func:`agree_run_key` once after ``init_process_group()``, and every rank derives the same ids;
:func:`waiting` around an operation that waits for other ranks, so that a hang can be explained;
:func:`publish_trace_context` and :func:`latest_trace_context` for contexts from outside, through
the store; :func:`in_forward_context` and :func:`backward_context` for autograd hooks. The adapters
(``torch_distributed``, ``nccl``, ``pipelining``) stand on the other modules of this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lens_core.errors import MissingExtraError

if TYPE_CHECKING:
    from lens_contrib.torch.autotrace import instrument, uninstrument

try:
    from lens_contrib.torch.autograd import backward_context, in_forward_context
    from lens_contrib.torch.device_mesh import mesh_coordinates
    from lens_contrib.torch.published_context import latest_trace_context, publish_trace_context
    from lens_contrib.torch.run_id_agreement import agree_run_id
    from lens_contrib.torch.run_key_agreement import agree_run_key
    from lens_contrib.torch.waits import waiting
except MissingExtraError as _missing:
    __getattr__ = _missing.when_asked(globals())
else:

    def __getattr__(name: str) -> object:
        # Only who traces an untouched script pays for all that this needs.
        if name in ("instrument", "uninstrument"):
            return getattr(import_module("lens_contrib.torch.autotrace"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "agree_run_id",
    "agree_run_key",
    "backward_context",
    "in_forward_context",
    "instrument",
    "latest_trace_context",
    "mesh_coordinates",
    "publish_trace_context",
    "uninstrument",
    "waiting",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
