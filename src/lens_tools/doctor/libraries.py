"""What ``lens doctor`` says of the libraries that are installed, and of their private names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from lens_core.compat import check_private_names
from lens_core.diagnostics import diagnostics
from lens_core.global_textmap import get_global_textmap
from lens_core.native import NATIVE

__all__ = [
    "Finding",
    "Verdict",
    "examine_propagators",
    "examine_ray",
    "examine_torch",
    "examine_versions",
]

Verdict = Literal["ok", "note", "problem"]
_PACKAGES: Final = ("opentelemetry-api", "opentelemetry-sdk", "torch", "ray", "msgpack")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What it is about.
        verdict: ``ok``, ``note`` (worth knowing) or ``problem`` (telemetry will not work so).
        text: What was found, and what to do about a problem.
    """

    subject: str
    verdict: Verdict
    text: str


def examine_versions() -> Iterator[Finding]:
    """What is installed."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    yield Finding("versions", "ok", f"Python {platform.python_version()}, " + ", ".join(found))
    yield Finding("native", "ok", f"a message's context is made in {NATIVE}")
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        yield Finding(
            "versions",
            "problem",
            "without the SDK nothing is recorded: pip install 'lens-otel[sdk]'",
        )
        return
    from lens_core.sdk.compat import check_private_names as of_sdk  # noqa: PLC0415 - may be missing

    for problem in of_sdk():
        yield Finding("versions", "note", f"opentelemetry-sdk has no {problem}")


def examine_propagators() -> Iterator[Finding]:
    """The global propagator: what headers contexts are carried in."""
    for problem in check_private_names():
        yield Finding("propagators", "note", f"opentelemetry-api has no {problem}")
    fields = sorted(get_global_textmap().fields)
    if diagnostics.count("propagators.invalid"):
        yield Finding(
            "propagators",
            "problem",
            f"OTEL_PROPAGATORS={os.environ.get('OTEL_PROPAGATORS')!r} cannot be loaded; "
            f"using {', '.join(fields)}",
        )
    elif not fields:
        yield Finding(
            "propagators",
            "problem",
            f"OTEL_PROPAGATORS={os.environ.get('OTEL_PROPAGATORS')!r}: no context is carried; "
            "unset it, or name tracecontext and baggage",
        )
    elif "traceparent" not in fields:
        yield Finding(
            "propagators",
            "note",
            f"headers are {', '.join(fields)}; frames are made for traceparent",
        )
    else:
        yield Finding("propagators", "ok", f"headers {', '.join(fields)}")


def examine_torch() -> Iterator[Finding]:
    """torch: its back ends, and its private names that the adapters use."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "note", "not installed; collectives and sends carry nothing")
        return
    import torch  # noqa: PLC0415 - seconds, and may be missing
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_available():
        yield Finding("torch", "problem", "this build of torch has no torch.distributed")
        return
    found = [
        name
        for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
        if there
    ]
    yield Finding("torch", "ok", f"back ends {', '.join(found) or 'none'}")
    # What the adapters rely on is private in torch.
    from lens_contrib.pipelining.compat import check_private_names as of_pipelining  # noqa: PLC0415
    from lens_contrib.torch.autotrace.compat import (  # noqa: PLC0415
        check_private_names as of_autotrace,
    )
    from lens_contrib.torch.compat import check_private_names as of_torch  # noqa: PLC0415

    for problem in (*of_torch(), *of_pipelining(), *of_autotrace()):
        yield Finding("torch", "problem", f"torch {torch.__version__} has no {problem}")


def examine_ray() -> Iterator[Finding]:
    """Ray: its private names that the decorator uses."""
    if importlib.util.find_spec("ray") is None:
        yield Finding("Ray", "note", "not installed; calls carry nothing")
        return
    import ray  # noqa: PLC0415 - seconds, and may be missing

    from lens_contrib.ray.compat import check_private_names as of_ray  # noqa: PLC0415

    # What the decorator relies on is private in Ray.
    for problem in (problems := of_ray()):
        yield Finding("Ray", "problem", f"Ray {ray.__version__} has no {problem}")
    if problems:
        return
    yield Finding("Ray", "ok", f"Ray {ray.__version__} carries contexts on decorated calls")
