"""Before a byte is added to a user's group: every rank of it says that it will do so too."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from lens_contrib.pipelining.wire_links import WIRE_VERSION
from lens_contrib.torch.agreement import Facts, KeyStore, agree, group_store
from lens_core.diagnostics import describe
from lens_core.errors import AgreementError, MissingExtraError
from lens_core.frame import P2P_CAPACITY

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["shake_hands"]


def shake_hands(
    pipeline: str,
    group: dist.ProcessGroup | None,
    *,
    timeout_s: float,
    store: KeyStore | None = None,
) -> None:
    """Return only if every rank of the group adds the same frames to this pipeline.

    Through the group's store, with one verdict for all (:mod:`lens_contrib.torch.agreement`).
    After a refusal all ranks may try again, also those that had missed it: which attempt it is, is
    not counted in each process, but read off the store.

    Raises:
        AgreementError: If a rank did not come by the deadline, or differs in version, capacity,
            torch release or pipeline; on every rank that did come. Nothing was changed.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    shared = group_store(group, timeout_s=timeout_s) if store is None else store
    topic = _open_topic(shared, rank)
    mine: Facts = {
        "pipeline": pipeline,
        "wire version": WIRE_VERSION,
        "frame bytes": P2P_CAPACITY,
        "torch": ".".join(torch.__version__.split(".")[:2]),
    }
    verdict = agree(
        shared,
        topic,
        rank=rank,
        world_size=world_size,
        report=mine,
        judge=lambda reports: {"refused": _problem(reports, world_size)},
        timeout_s=timeout_s,
    )
    problem = verdict.get("refused")
    if problem != "":
        raise AgreementError(topic, rank, str(problem))


def _open_topic(store: KeyStore, rank: int) -> str:
    """The first handshake of the group that has no verdict yet.

    One that has a verdict is over, for a rank that missed it too: the verdict is not about what
    that rank does now. So all ranks come to the same one, however often each has tried.

    Raises:
        AgreementError: If the store failed.
    """
    try:
        for number in itertools.count():
            topic = f"pipelining/{number}"
            if not store.check([f"lens/{topic}/verdict"]):
                break
    except RuntimeError as error:
        raise AgreementError("pipelining", rank, describe(error)) from error
    return topic


def _problem(reports: Mapping[int, Facts], world_size: int) -> str:
    missing = sorted(set(range(world_size)) - set(reports))
    if missing:
        return (
            f"group ranks {missing} did not call instrument_pipelining(links='wire') in time; "
            "call it on every rank, or use links='derived'"
        )
    for rank, report in sorted(reports.items()):
        for name, value in reports[0].items():
            if report.get(name) != value:
                return f"rank {rank} has {name} {report.get(name)!r}, rank 0 has {value!r}"
    return ""
