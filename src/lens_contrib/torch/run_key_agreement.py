"""The run key, agreed once at set-up through the process group's store.

Call it after ``init_process_group()`` and after telemetry is set up::

    handle = setup_telemetry(config)
    dist.init_process_group("nccl")
    agree_run_key()
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Tracer

from lens_contrib.torch.agreement import Facts, agree
from lens_contrib.torch.store import KeyStore, group_store
from lens_core.compat import real_tracer
from lens_core.diagnostics import diagnostics
from lens_core.errors import (
    AgreementError,
    ConfigError,
    LensError,
    MissingExtraError,
    ProcessGroupError,
)
from lens_core.identity import (
    Identity,
    MeshCoordinates,
    RunKey,
    install_identity,
    random_run_key,
    run_key_from_environment,
)
from lens_core.identity.owned import honours_derived_ids
from lens_core.identity.run import run_attempt
from lens_core.spans.groups import OWN_GROUPS
from lens_core.spans.switch import span_groups

try:
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["agree_run_key"]

#: Before the name of a span group, in a verdict: the ranks on which it is off.
_SILENT: Final = "silent "
#: Agreements of this process so far: a topic is used once, all ranks count alike.
_agreements: Final = itertools.count()


def agree_run_key(
    *,
    owner_rank: int = 0,
    mesh: MeshCoordinates | None = None,
    timeout_s: float = 30.0,
    store: KeyStore | None = None,
    tracer: Tracer | None = None,
) -> Identity:
    """This process's identity, with a key that all ranks of the default group share; installed.

    Not a collective: it uses the store alone, once, and never a rank's communicator. Rank 0's key
    counts: that of its environment where that has entropy, else 16 random bytes. The store's
    traffic is as private as the job's network is.

    What is agreed too is who takes part: a rank whose tracer cannot start spans under derived ids
    (telemetry disabled there, or a provider with a generator of its own) is known to the others,
    which then make no links to it. So is one whose sampler takes no span, where others' take some;
    samplers that differ are counted, as ``identity.sampler_differs``. And so is a rank on which a
    group of this library's own spans is off (:data:`~lens_core.spans.groups.OWN_GROUPS`): what is
    on at this call holds for these spans, and for links to them, until the next one.

    A rank that gets no verdict by the deadline says so loudly (``identity.random``), uses random
    ids from then on and marks its spans ``lens.identity = random``. It does not raise and does not
    hang: training does not depend on it.

    Args:
        owner_rank: The rank whose step spans the others link to.
        mesh: Coordinates of the ranks, for links.
        timeout_s: How long rank 0 waits for the other ranks; they wait twice that for rank 0. A
            store whose server does not answer is given up after ``timeout_s``, at least 1 s.
        store: The store to use; a clone of the default group's if not given.
        tracer: The tracer whose spans will be linked; one of the global provider if not given.

    Raises:
        ConfigError: On rank 0, if ``NEMO_LENS_RUN_KEY`` is set and is not a key. On another rank,
            whose key does not count, that is counted as ``identity.bad_key``.
        ProcessGroupError: If there is no process group.
    """
    rank, world_size = _ranks()
    used = trace.get_tracer("lens_core") if tracer is None else tracer
    attempt = run_attempt(os.environ)
    proposed = _proposal(rank, attempt)
    participants: frozenset[int] | None
    silent: dict[str, list[int]] | None
    try:
        connection = group_store(timeout_s=timeout_s) if store is None else store
        verdict = agree(
            connection,
            f"run_key/{attempt}/{next(_agreements)}",
            rank=rank,
            world_size=world_size,
            report={
                "derives": honours_derived_ids(used),
                "sampler": _sampler(used),
                "off": ",".join(sorted(span_groups.removed & OWN_GROUPS)),
            },
            judge=lambda reports: _judge(proposed, reports),
            timeout_s=timeout_s,
        )
        key, participants = _read(verdict, attempt, rank)
        silent = _read_silent(verdict)
        _tell_samplers(verdict)
    except LensError as error:
        diagnostics.record(
            "identity.random",
            f"{error}; this rank uses random ids from now on, and its spans say so",
            todo="Call agree_run_key() on every rank, at the same point of the program.",
        )
        key, participants, silent = random_run_key(attempt=attempt), None, None
    identity = Identity(
        key,
        rank=rank,
        owner_rank=owner_rank,
        participants=participants,
        mesh=mesh,
        silent=silent,
    )
    install_identity(identity)
    if participants is not None and len(participants) < world_size:
        missing = sorted(set(range(world_size)) - participants)
        diagnostics.record(
            "identity.absent_ranks",
            f"ranks {missing} start no spans under derived ids",
            todo="Set up telemetry on those ranks before agree_run_key(); no links lead to them.",
        )
    return identity


def _ranks() -> tuple[int, int]:
    if not dist.is_available() or not dist.is_initialized():
        raise ProcessGroupError(None, "has no process group; call init_process_group() first")
    return dist.get_rank(), dist.get_world_size()


def _proposal(rank: int, attempt: int) -> RunKey:
    """The key that counts if this is rank 0."""
    try:
        known = run_key_from_environment()
    except ConfigError as error:
        if rank == 0:
            raise
        diagnostics.record(
            "identity.bad_key",
            f"rank {rank}: {error}; the key of rank 0 counts",
            todo="Set it on all ranks to the same 32 hexadecimal digits, or on none.",
        )
        known = None
    return known or random_run_key(attempt=attempt, source="store", agreed=True)


def _judge(key: RunKey, reports: Mapping[int, Facts]) -> Facts:
    """Rank 0's verdict: the key, and who starts spans under derived ids."""
    deriving = sorted(rank for rank, report in reports.items() if report.get("derives"))
    samplers = {rank: str(reports[rank].get("sampler", "")) for rank in deriving}
    taking = [rank for rank in deriving if "AlwaysOffSampler" not in _root(samplers[rank])]
    return {
        "secret": key.secret.hex(),
        "source": key.source,
        "present": sorted(reports),
        # Where no rank takes spans, none is missing.
        "deriving": taking or deriving,
        **{_SILENT + group: _ranks_without(group, reports) for group in sorted(OWN_GROUPS)},
        "other samplers": [r for r in deriving if samplers[r] != samplers[deriving[0]]],
    }


def _ranks_without(group: str, reports: Mapping[int, Facts]) -> list[int]:
    """The ranks that have switched a group of the library's own spans off."""
    return [rank for rank, report in reports.items() if group in str(report.get("off")).split(",")]


def _read_silent(verdict: Facts) -> dict[str, list[int]]:
    """On which ranks which groups of the library's own spans are off."""
    named = {group: verdict.get(_SILENT + group) for group in OWN_GROUPS}
    return {group: list(ranks) for group, ranks in named.items() if isinstance(ranks, list)}


def _sampler(tracer: Tracer) -> str:
    """How the tracer's sampler describes itself; empty where it shows none."""
    try:
        return str(getattr(real_tracer(tracer), "sampler").get_description())  # noqa: B009 - not of the API
    except Exception:  # noqa: BLE001 - a foreign sampler may raise anything
        return ""


def _root(sampler: str) -> str:
    """What decides on root spans, of the description of a sampler."""
    return sampler.partition("remoteParentSampled")[0]


def _tell_samplers(verdict: Facts) -> None:
    if differing := verdict.get("other samplers"):
        diagnostics.record(
            "identity.sampler_differs",
            f"the samplers of ranks {differing} are not that of the first rank",
            todo="Set OTEL_TRACES_SAMPLER and its argument alike on all ranks: links to spans "
            "that one of them does not sample lead nowhere.",
        )


def _read(verdict: Facts, attempt: int, rank: int) -> tuple[RunKey, frozenset[int]]:
    secret, source = verdict.get("secret"), verdict.get("source")
    present, deriving = verdict.get("present"), verdict.get("deriving")
    if not (
        isinstance(secret, str)
        and isinstance(source, str)
        and isinstance(present, list)
        and isinstance(deriving, list)
    ):
        raise AgreementError("run_key", rank, "the verdict is not readable")
    if rank not in present:
        raise AgreementError("run_key", rank, "it came after the deadline")
    try:
        key = RunKey(bytes.fromhex(secret), attempt, source)
    except ValueError:
        raise AgreementError("run_key", rank, "the verdict holds no key") from None
    return key, frozenset(deriving)
