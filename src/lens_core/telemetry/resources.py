"""The resource: what is true of this process for as long as it lives.

For each attribute the first source that has it wins: the caller's ``resource_attributes``;
``OTEL_SERVICE_NAME``; ``OTEL_RESOURCE_ATTRIBUTES``; the configuration; what is detected.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.util.types import AttributeValue

from lens_core.semconv import (
    NEMO_RUN_ATTEMPT,
    NEMO_RUN_ID,
    NEMO_RUN_ID_SOURCE,
    NEMO_USER_ID,
    NV_DL_LOCAL_RANK,
    NV_DL_RANK,
    NV_DL_WORLD_SIZE,
)
from lens_core.telemetry.config import NemoLensConfig
from lens_core.telemetry.run_identity import RunIdentity

__all__ = ["build_resource"]

_SERVICE_NAME: Final = "service.name"
_LAUNCHER: Final = (
    (NV_DL_RANK, "RANK"),
    (NV_DL_WORLD_SIZE, "WORLD_SIZE"),
    (NV_DL_LOCAL_RANK, "LOCAL_RANK"),
)


def build_resource(
    config: NemoLensConfig,
    identity: RunIdentity,
    attributes: Mapping[str, AttributeValue] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> Resource:
    """The resource of this process."""
    source = os.environ if environ is None else environ
    named: dict[str, AttributeValue] = {
        _SERVICE_NAME: config.service_name,
        NEMO_RUN_ID: identity.run_id,
        NEMO_RUN_ID_SOURCE: identity.source,
        NEMO_RUN_ATTEMPT: identity.attempt,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    if config.user:
        named[NEMO_USER_ID] = config.user
    for name, variable in _LAUNCHER:
        if (text := source.get(variable, "")).isdigit():
            named[name] = int(text)
    from_environment = dict(Resource.create({}).attributes)
    if str(from_environment.get(_SERVICE_NAME, "")).startswith("unknown_service"):
        del from_environment[_SERVICE_NAME]  # the SDK's placeholder, not something the user said
    return Resource(
        {**named, **from_environment, NEMO_RUN_ID: identity.run_id, **(attributes or {})}
    )
