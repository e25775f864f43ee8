"""One run id for all ranks of a process group, where neither the user nor a launcher gave one."""

from __future__ import annotations

from typing import Final

from lens_contrib.torch.store import group_store
from lens_core.errors import MissingExtraError, ProcessGroupError

try:
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["agree_run_id"]

_KEY: Final = "lens/run_id"
#: A store that does not answer within this gives no run id.
_OPERATION_S: Final = 10.0


def agree_run_id(proposal: str) -> str:
    """The run id of this process group: the proposal of the rank that asked first.

    For ``setup_telemetry(config, agree_run_id=agree_run_id)`` after ``init_process_group``. Goes
    through the group's key-value store and is no collective: ranks that never ask hold nobody up.
    A restart of the job has a new store, so it gets a new id; set ``NEMO_LENS_RUN_ID`` to keep one.

    Args:
        proposal: What to use if no other rank has asked.

    Raises:
        ProcessGroupError: the default process group is not initialized.
        StoreError: the store did not answer within 10 s. What it raises itself is raised as it is.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ProcessGroupError(None, "the default process group is not initialized")
    store = group_store(timeout_s=_OPERATION_S)
    # With nothing expected, the first call sets the key and every later one reads it.
    return bytes(store.compare_set(_KEY, "", proposal)).decode()
