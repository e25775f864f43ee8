"""One identity for a run, the same on all of its ranks without asking any of them.

The launcher already told every rank which job it belongs to. The rules are tried in the order of
:func:`resolve_run_identity`; the rule that won is recorded as ``nemo.run.id.source``.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from lens_core.diagnostics import describe, diagnostics
from lens_core.semconv import NEMO_RUN_ID
from lens_core.spans.attributes import to_utf8
from lens_core.whole_number import whole_number

__all__ = ["RunIdentity", "parse_resource_attributes", "resolve_run_identity", "run_attempt"]


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which run a process belongs to.

    Attributes:
        run_id: The same on all ranks, and in every restart.
        source: The rule that gave it.
        attempt: Restarts of the run before this one; larger in every restart.
    """

    run_id: str
    source: str
    attempt: int


def resolve_run_identity(
    explicit: str = "",
    *,
    environ: Mapping[str, str] | None = None,
    agree: Callable[[str], str] | None = None,
    is_used: bool = True,
) -> RunIdentity:
    """The identity of the run of this process, from the first rule that applies.

    1. ``explicit``; 2. ``NEMO_LENS_RUN_ID``; 3. ``nemo.run.id`` in ``OTEL_RESOURCE_ATTRIBUTES``;
    4. Slurm: the job, with the task of an array; 5. torchelastic's run id; 6. Ray's job id;
    7. the Kubernetes job; 8. ``agree``; 9. a random id, which differs on every rank and is
    reported as a diagnostic (``run_id.random``).

    Args:
        explicit: The id that the caller chose.
        environ: The environment; that of the process if not given.
        agree: Called with a proposal, returns the one that all ranks share.
        is_used: Whether telemetry will carry it; where not, a random id is nothing to report.
    """
    source = os.environ if environ is None else environ
    attempt = run_attempt(source)
    if explicit.strip() == source.get("NEMO_LENS_RUN_ID", "").strip():
        explicit = ""  # NemoLensConfig.from_env() read it there: the variable won
    for name, rule in _RULES:
        # Of UTF-8 also where the variable is not: all telemetry is found by it.
        if run_id := to_utf8(explicit if name == "explicit" else rule(source)).strip():
            return RunIdentity(run_id, name, attempt)
    proposal = uuid.uuid4().hex
    if agree is not None:
        try:
            return RunIdentity(agree(proposal), "process_group", attempt)
        except Exception as error:  # noqa: BLE001 - any store may fail in any way
            diagnostics.record("run_id.agreement_failed", describe(error))
    if is_used:
        diagnostics.record(
            "run_id.random",
            f"no run id is set or derivable; this process uses {proposal}, other ranks another",
            todo="Set NEMO_LENS_RUN_ID to the same value on all ranks.",
        )
    return RunIdentity(proposal, "random", attempt)


def parse_resource_attributes(text: str) -> dict[str, str]:
    """``OTEL_RESOURCE_ATTRIBUTES`` as a mapping; pairs without ``=`` are passed over."""
    pairs = (item.partition("=") for item in text.split(",") if "=" in item)
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs}


def _slurm(environ: Mapping[str, str]) -> str:
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def _torchelastic(environ: Mapping[str, str]) -> str:
    # "none" is what torchrun sets where the user gave no rendezvous id.
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if run_id.lower() == "none" else run_id


def _kubernetes(environ: Mapping[str, str]) -> str:
    for name in ("K8S_JOB_UID", "K8S_JOB_NAME"):
        if value := environ.get(name, ""):
            return value
    # A pod of an Indexed Job is named after the job and its index.
    index, host = environ.get("JOB_COMPLETION_INDEX", ""), environ.get("HOSTNAME", "")
    if environ.get("KUBERNETES_SERVICE_HOST") and index and host.endswith(f"-{index}"):
        return host[: -len(index) - 1]
    return ""


_RULES: Final[tuple[tuple[str, Callable[[Mapping[str, str]], str]], ...]] = (
    ("explicit", lambda environ: ""),
    ("NEMO_LENS_RUN_ID", lambda environ: environ.get("NEMO_LENS_RUN_ID", "")),
    (
        "OTEL_RESOURCE_ATTRIBUTES",
        lambda environ: parse_resource_attributes(environ.get("OTEL_RESOURCE_ATTRIBUTES", "")).get(
            NEMO_RUN_ID, ""
        ),
    ),
    ("slurm", _slurm),
    ("torchelastic", _torchelastic),
    ("ray", lambda environ: environ.get("RAY_JOB_ID", "")),
    ("kubernetes", _kubernetes),
)


#: So that the product of two is still a 64-bit attribute.
_MOST_RESTARTS: Final = 10**9


def run_attempt(environ: Mapping[str, str]) -> int:
    """Restarts of the run before this one, from the counts of Slurm and torchelastic.

    A count that is no number, or larger than 10**9, counts as 0.
    """
    # A requeue by Slurm starts torchelastic's own count anew: both together must still grow.
    slurm = _count(environ, "SLURM_RESTART_COUNT")
    elastic = _count(environ, "TORCHELASTIC_RESTART_COUNT")
    per_requeue = max(_count(environ, "TORCHELASTIC_MAX_RESTARTS"), elastic) + 1
    return slurm * per_requeue + elastic


def _count(environ: Mapping[str, str], name: str) -> int:
    return whole_number(environ.get(name, ""), largest=_MOST_RESTARTS) or 0
