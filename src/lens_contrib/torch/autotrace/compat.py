"""The private names of torch that tracing without a word in the script uses, each tested alone.

One that is missing costs what it is for, and nothing else: ``autotrace.hook_off`` says which.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

from lens_core.private_names import PrivateNames, missing_names

__all__ = [
    "COLLECTIVES",
    "HOOKS",
    "P2P",
    "PRIVATE_NAMES",
    "BaseLoaderIterator",
    "backward_owner",
    "check_private_names",
    "ddp_times_ns",
    "leave_uncompiled",
    "log_every_ddp_step",
    "problem_of",
    "process_group_class",
    "ranks_of",
    "recorded_collectives",
    "sequence_of",
    "work_class",
]

#: Methods of a process group to the operation that users know.
COLLECTIVES: Final[Mapping[str, str]] = {
    method: op
    for op, methods in {
        "all_reduce": "allreduce allreduce_coalesced",
        "broadcast": "broadcast",
        "reduce": "reduce",
        "all_gather": "allgather allgather_coalesced",
        "all_gather_into_tensor": "_allgather_base all_gather_single all_gather_single_coalesced "
        "allgather_into_tensor_coalesced",
        "gather": "gather",
        "scatter": "scatter",
        "reduce_scatter": "reduce_scatter",
        "reduce_scatter_tensor": "_reduce_scatter_base reduce_scatter_single "
        "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced",
        "all_to_all": "alltoall",
        "all_to_all_single": "alltoall_base all_to_all_single",
        "barrier": "barrier",
    }.items()
    for method in methods.split()
}
P2P: Final[Mapping[str, str]] = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
#: What ``torch.compiler.disable`` sets on a function, once it has imported the compiler.
_DISABLED: Final = "_torchdynamo_disable"
#: The names in the flight recorder that differ from those of the methods above.
_RECORDED: Final[Mapping[str, str]] = {
    **{name.lstrip("_"): op for name, op in COLLECTIVES.items()},
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}
#: What ``next(iter(loader))`` calls.
BaseLoaderIterator: Final[Any] = getattr(dataloader, "_BaseDataLoaderIter", None)
#: Where ``torch.autograd.backward`` looks for the engine's function. Not that function itself: one
#: more around it is one more graph break under ``torch.compile``.
backward_owner: Final[Any] = torch.autograd


def _c10d() -> Any:
    from torch._C import _distributed_c10d  # noqa: PLC0415 - a build may have no torch.distributed

    return _distributed_c10d


def leave_uncompiled(function: Any, *, with_calls: bool) -> None:
    """Have ``torch.compile`` leave a function as it is, wherever it is called from.

    It would look into ours as into the user's own, and break its graphs there.

    Args:
        function: The function.
        with_calls: Whether what it calls is left as well.
    """
    if not problem_of("compile"):
        frames: Any = torch._C._dynamo.eval_frame
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if with_calls else default)
        frames.set_code_exec_strategy(function.__code__, strategy)
    if with_calls:
        setattr(function, _DISABLED, True)  # where a compiled function calls it by itself


def process_group_class() -> Any:
    """The class of process groups, whose methods Python code calls for every operation."""
    return _c10d().ProcessGroup


def work_class() -> Any:
    """The class of what they return, whose ``wait`` waits."""
    return _c10d().Work


def sequence_of(group: Any, p2p_count: int) -> int | None:
    """The number of the collective that a group is about to begin; ``None`` if it does not tell.

    That of the flight recorder. Gloo's groups count sends and receives along: those are taken off.
    """
    try:
        return int(group._get_sequence_number_for_group()) + 1 - p2p_count
    except RuntimeError:
        return None


def log_every_ddp_step(model: Any) -> None:
    """Have a model's log speak of every step, and not of every hundredth."""
    # On another device the log waits for its events at the next forward.
    if model.device_type == "cpu":
        model.reducer._set_ddp_runtime_logging_sample_rate(1)


def ddp_times_ns(model: Any) -> tuple[int, int, int] | None:
    """Of a model's last backward: begin, last gradient ready, all of them reduced.

    Nanoseconds on the clock of ``time.time_ns``; ``None`` where it is not known.
    """
    if model.device_type != "cpu" or model.logger is None:
        return None
    model.logger.set_runtime_stats_and_log()  # what its next forward would do
    log = model.logger._get_ddp_logging_data().ints_map
    times = (
        log.get("backward_compute_time_start", 0),
        log.get("backward_compute_time_end", 0),
        log.get("backward_comm_time_end", 0),
    )
    return times if all(times) else None


def recorded_collectives() -> list[tuple[str, str, int, int]]:
    """Of each group the first collective that has not ended, also where C++ began it.

    Group, operation, sequence, and when it began in nanoseconds. From torch's flight recorder,
    which holds the interpreter up while it is read: ask it on suspicion only.
    """
    text = _c10d()._dump_fr_trace_json(includeCollectives=True, onlyActive=False)
    first: dict[str, tuple[str, str, int, int]] = {}
    for entry in json.loads(text).get("entries", ()):
        group = str(entry["process_group"][0])
        sequence = int(entry["collective_seq_id"])
        # Its state says nothing on gloo; an entry is retired when its operation has ended.
        if entry["is_p2p"] or entry["retired"] or (group in first and first[group][2] < sequence):
            continue
        name = str(entry["profiling_name"]).partition(":")[2]
        op = _RECORDED.get(name, name)
        first[group] = (group, op, sequence, int(entry["time_created_ns"]))
    return list(first.values())


def ranks_of(name: str) -> list[int] | None:
    """The global ranks of the process group of this name; ``None`` if there is none."""
    groups = {str(group.group_name): group for group in dist.distributed_c10d._world.pg_names}
    return dist.get_process_group_ranks(groups[name]) if name in groups else None


def _check_operations() -> None:
    """Do to the class what :mod:`operation_hooks` does: one that takes no attributes raises."""
    owner = process_group_class()
    owner.barrier = vars(owner)["barrier"]
    weakref.ref(_c10d().FakeWork())


#: Hook to the names that it needs; it is off where one of them is missing.
HOOKS: Final[dict[str, tuple[PrivateNames, ...]]] = {
    "operations": tuple(
        PrivateNames(names, where, "collectives, sends and receives are not seen")
        for names, where in (
            ("_C", lambda: torch),
            ("_distributed_c10d", lambda: torch._C),
            ("allreduce broadcast barrier group_name " + " ".join(P2P), process_group_class),
            ("wait", work_class),
        )
    ),
    "sequence": (
        PrivateNames(
            "_get_sequence_number_for_group",
            process_group_class,
            "collectives have no sequence number",
        ),
    ),
    "ddp": tuple(
        PrivateNames(names, where, "waiting in DDP's backward counts as the rank's own time")
        for names, where in (
            ("_set_ddp_runtime_logging_sample_rate", lambda: _c10d().Reducer),
            ("_get_ddp_logging_data set_runtime_stats_and_log", lambda: _c10d().Logger),
            ("_sync_buffers", lambda: DistributedDataParallel),
        )
    ),
    "flight_recorder": tuple(
        PrivateNames(names, where, "collectives that C++ begins are not seen in a hang")
        for names, where in (
            ("_dump_fr_trace_json", _c10d),
            ("_world", lambda: dist.distributed_c10d),
        )
    ),
    "loader": (
        PrivateNames(
            "_BaseDataLoaderIter",
            lambda: dataloader,
            "fetches from data loaders are not seen; steps begin with backward",
        ),
    ),
    "compile": (
        PrivateNames("_dynamo", lambda: torch._C, "torch.compile has more graph breaks"),
        PrivateNames(
            "_FrameExecStrategy _FrameAction set_code_exec_strategy",
            lambda: torch._C._dynamo.eval_frame,
            "torch.compile has more graph breaks where a compiled function trains",
        ),
    ),
    "backward": (
        PrivateNames(
            "_engine_run_backward",
            lambda: backward_owner,
            "backward is not told apart from forward",
        ),
    ),
}
PRIVATE_NAMES: Final = tuple(use for uses in HOOKS.values() for use in uses)


def problem_of(hook: str) -> str:
    """What is missing for a hook, and what stops working; empty if nothing is."""
    problems = missing_names(HOOKS[hook])
    if hook == "operations" and not problems:
        try:
            _check_operations()
        except Exception as error:  # noqa: BLE001 - whatever it is, the hook stays off
            problems = [f"ProcessGroup, {error!r}: {HOOKS[hook][0].loses}"]
    return "; ".join(problems)


def check_private_names() -> list[str]:
    """What is missing of the private names, and what stops working without it; empty if none."""
    return [problem for hook in HOOKS if (problem := problem_of(hook))]
