"""The resource: what is true of this process for as long as it lives.

For each attribute the first source that has it wins: the caller's ``resource_attributes``;
``OTEL_SERVICE_NAME``; ``OTEL_RESOURCE_ATTRIBUTES``; the configuration; what is detected from the
launcher, the scheduler and the host. ``nemo.run.id`` is what :mod:`.run_identity` resolved.
"""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.util.types import AttributeValue

from lens_core import semconv
from lens_core.diagnostics import diagnostics
from lens_core.identity.run import RunIdentity
from lens_core.spans.attributes import to_utf8
from lens_core.telemetry.config import NemoLensConfig
from lens_core.whole_number import whole_number

__all__ = ["build_resource", "child_resource", "detect_attributes"]

_SERVICE_NAME: Final = "service.name"
#: Attribute, the variables that may hold it (the first that is set wins), whether it is a number.
_VARIABLES: Final[tuple[tuple[str, tuple[str, ...], bool], ...]] = (
    (semconv.NV_DL_RANK, ("RANK", "SLURM_PROCID"), True),
    (semconv.NV_DL_WORLD_SIZE, ("WORLD_SIZE", "SLURM_NTASKS"), True),
    (semconv.NV_DL_LOCAL_RANK, ("LOCAL_RANK", "SLURM_LOCALID"), True),
    (semconv.NV_DL_ROLE, ("ROLE_NAME",), False),
    (semconv.SLURM_JOB_ID, ("SLURM_JOB_ID",), False),
    (semconv.SLURM_JOB_NAME, ("SLURM_JOB_NAME",), False),
    (semconv.SLURM_ARRAY_JOB_ID, ("SLURM_ARRAY_JOB_ID",), False),
    (semconv.SLURM_ARRAY_TASK_ID, ("SLURM_ARRAY_TASK_ID",), True),
    (semconv.SLURM_CLUSTER_NAME, ("SLURM_CLUSTER_NAME",), False),
    (semconv.SLURM_PARTITION, ("SLURM_JOB_PARTITION",), False),
    (semconv.SLURM_NODE_COUNT, ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), True),
    (semconv.SLURM_RESTART_COUNT, ("SLURM_RESTART_COUNT",), True),
    (semconv.SLURM_NODE_NAME, ("SLURMD_NODENAME",), False),
    (semconv.TORCHELASTIC_RUN_ID, ("TORCHELASTIC_RUN_ID",), False),
    (semconv.TORCHELASTIC_RESTART_COUNT, ("TORCHELASTIC_RESTART_COUNT",), True),
    (semconv.RAY_JOB_ID, ("RAY_JOB_ID",), False),
    (semconv.K8S_NAMESPACE_NAME, ("K8S_NAMESPACE_NAME", "POD_NAMESPACE"), False),
    (semconv.K8S_POD_NAME, ("K8S_POD_NAME", "POD_NAME"), False),
    (semconv.K8S_NODE_NAME, ("K8S_NODE_NAME", "NODE_NAME"), False),
    (semconv.K8S_JOB_NAME, ("K8S_JOB_NAME",), False),
    (semconv.K8S_JOB_UID, ("K8S_JOB_UID",), False),
)
_NVIDIA_GPUS: Final = Path("/proc/driver/nvidia/gpus")


def build_resource(
    config: NemoLensConfig,
    identity: RunIdentity,
    attributes: Mapping[str, AttributeValue] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> Resource:
    """The resource of this process."""
    named: dict[str, AttributeValue] = {
        **detect_attributes(environ),
        _SERVICE_NAME: config.service_name,
        semconv.NEMO_RUN_ID_SOURCE: identity.source,
        semconv.NEMO_RUN_ATTEMPT: identity.attempt,
    }
    if config.user:
        named[semconv.NEMO_USER_ID] = config.user
    _warn_of_contradictions(attributes or {}, os.environ if environ is None else environ)
    # Holds OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and telemetry.sdk.*.
    from_environment = dict(Resource.create({}).attributes)
    if str(from_environment.get(_SERVICE_NAME, "")).startswith("unknown_service"):
        del from_environment[_SERVICE_NAME]  # the SDK's placeholder, not something the user said
    resolved: dict[str, AttributeValue] = {semconv.NEMO_RUN_ID: identity.run_id}
    # Variables may hold any bytes, which the run would otherwise lose as attributes.
    return Resource(
        {
            to_utf8(str(name)): to_utf8(value) if isinstance(value, str) else value
            for name, value in {
                **named,
                **from_environment,
                **resolved,
                **(attributes or {}),
            }.items()
        }
    )


def _warn_of_contradictions(
    attributes: Mapping[str, AttributeValue], environ: Mapping[str, str]
) -> None:
    # Of torchrun alone: below Slurm, one task may start many ranks, and Ray's workers inherit its.
    for name, variable in ((semconv.NV_DL_RANK, "RANK"), (semconv.NV_DL_WORLD_SIZE, "WORLD_SIZE")):
        told = whole_number(environ.get(variable, ""))
        if told is not None and name in attributes and attributes[name] != told:
            diagnostics.record(
                "config.contradicted",
                f"{name}={attributes[name]!r} was given, and the launcher says {variable}={told}",
                todo=f"Leave {name} out of resource_attributes; lens hang names ranks by it.",
            )


def child_resource() -> Resource:
    """What is different in a forked child: laid over the resource that it inherited."""
    return _child_resource(os.getpid())


@functools.lru_cache(maxsize=1)
def _child_resource(pid: int) -> Resource:
    return Resource({semconv.PROCESS_PID: pid, semconv.SERVICE_INSTANCE_ID: str(uuid.uuid4())})


def detect_attributes(environ: Mapping[str, str] | None = None) -> dict[str, AttributeValue]:
    """What launcher, scheduler and host tell about this process; never asks a network."""
    source = os.environ if environ is None else environ
    found: dict[str, AttributeValue] = {
        semconv.HOST_NAME: socket.gethostname(),
        semconv.PROCESS_PID: os.getpid(),
    }
    for name, variables, is_number in _VARIABLES:
        text = next((source[key].strip() for key in variables if source.get(key, "").strip()), "")
        number = whole_number(text) if is_number else None
        if number is not None:
            found[name] = number
        elif text and not is_number:
            found[name] = text
    if (count := _gpu_count(source)) is not None:
        found[semconv.NV_GPU_COUNT] = count
    return found


def _gpu_count(environ: Mapping[str, str]) -> int | None:
    """GPUs that this process may use, without starting CUDA."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = [device.strip() for device in visible.split(",") if device.strip()]
        # CUDA stops at the first invalid entry; "-1" and "NoDevFiles" are how none is spelled.
        return 0 if devices[:1] in ([], ["-1"], ["NoDevFiles"]) else len(devices)
    try:
        return sum(1 for _ in _NVIDIA_GPUS.iterdir())
    except OSError:
        return None
