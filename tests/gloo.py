"""Real process groups for tests: ranks in fresh processes, joined by gloo over a file store.

:func:`run_ranks` runs a function on every rank and returns what each returned;
:func:`rank_outcomes` does the same where ranks are meant to fail. A test cannot hang: at the
deadline every rank writes the stacks of all its threads and is killed, and the failure shows them.

Ranks are forked from a server process that has imported what takes long and done nothing else, so
that they inherit nothing of the test process and still start in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "RanksFailed", "rank_outcomes", "run_ranks"]

#: One thread a rank: more would oversubscribe the cores, and hide what is being tested.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: What the server imports: seconds a rank otherwise. Nothing of this project, whose import each
#: rank does for itself, as it would in a job.
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.pipelining",
    "opentelemetry.sdk.trace.export",
    "msgpack",
)
#: Once one rank has failed, the others have this long to notice.
_GRACE_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
        rank: The global rank.
        value: What the function returned; ``None`` where it did not return.
        error: The traceback of what it raised, or how the process ended; ``None`` if it returned.
        log: What the process wrote to standard output and error.
    """

    rank: int
    value: Any = None
    error: str | None = None
    log: str = ""


class RanksFailed(AssertionError):  # noqa: N818 - a test failure, not an error of the library
    """At least one rank did not return; shows every rank's traceback and output."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        parts = []
        for outcome in outcomes:
            parts.append(f"--- rank {outcome.rank}: {outcome.error or 'returned'}")
            if outcome.log:
                parts.append(outcome.log)
        super().__init__("\n".join(["not every rank returned", *parts]))
        self.outcomes = outcomes


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    timeout_s: float,
    *args: Any,
    group_timeout_s: float = 60.0,
    init_group: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """What ``fn(rank, world_size, *args)`` returned on each rank, by rank.

    Args:
        fn: A function at the top of an importable module. It, its arguments and its results are
            pickled.
        world_size: Number of ranks.
        timeout_s: Hard limit for all of it.
        *args: Further arguments of ``fn``, the same on every rank.
        group_timeout_s: Timeout of the default process group.
        init_group: Whether the default group is made before ``fn``; if not, ``fn`` makes it from
            ``LENS_TEST_STORE``, the path for a file store.
        env: Further environment variables of every rank.

    Raises:
        RanksFailed: If a rank raised, died, or did not end in time.
    """
    outcomes = rank_outcomes(
        fn,
        world_size,
        timeout_s,
        *args,
        group_timeout_s=group_timeout_s,
        init_group=init_group,
        env=env,
    )
    if any(outcome.error for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    fn: Callable[..., Any],
    world_size: int,
    timeout_s: float,
    *args: Any,
    group_timeout_s: float = 60.0,
    init_group: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """:func:`run_ranks` for ranks that may fail: what became of each, by rank."""
    with tempfile.TemporaryDirectory(prefix="lens-gloo-") as folder:
        work = Path(folder)
        context = _fork_server()
        processes = []
        for rank in range(world_size):
            variables = {
                **_ONE_THREAD,
                "GLOO_SOCKET_IFNAME": "lo",
                "LENS_TEST_STORE": str(work / "store"),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                **(env or {}),
            }
            job = _Job(rank, world_size, work, timeout_s, group_timeout_s, init_group, variables)
            process = context.Process(target=_run_rank, args=(job, fn, args))
            process.start()
            processes.append(process)
        try:
            _wait(processes, work, time.monotonic() + timeout_s)
        finally:
            _stop(processes)
        return [_outcome(rank, process, work) for rank, process in enumerate(processes)]


@dataclass(frozen=True)
class _Job:
    rank: int
    world_size: int
    work: Path
    timeout_s: float
    group_timeout_s: float
    init_group: bool
    env: Mapping[str, str]


def _fork_server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    with _environment(_ONE_THREAD):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _run_rank(job: _Job, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The whole life of one rank, in its own process."""
    log = (job.work / f"log{job.rank}").open("wb", buffering=0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    # Also where the test process dies: no rank outlives its deadline.
    faulthandler.dump_traceback_later(job.timeout_s + 2 * _GRACE_S, exit=True, file=log)
    os.environ.update(job.env)
    try:
        if job.init_group:
            _init_group(job)
        result: tuple[Any, str | None] = (fn(job.rank, job.world_size, *args), None)
        content = pickle.dumps(result)
    except BaseException:  # shown by the test process
        content = pickle.dumps((None, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    written = job.work / f"result{job.rank}.part"
    written.write_bytes(content)
    written.rename(job.work / f"result{job.rank}")
    # A rank that leaves closes its connections, so it stays until all are done.
    while not (job.work / "leave").exists():
        time.sleep(0.005)
    # Not through the interpreter's end: a broken group's destructors may wait for its peers.
    os._exit(0)


def _init_group(job: _Job) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(job.work / "store"), job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.group_timeout_s),
    )


def _wait(processes: Sequence[ForkServerProcess], work: Path, deadline: float) -> None:
    """Wait until every rank has a result or is gone, or time is up."""
    while time.monotonic() < deadline:
        pending = []
        for rank, process in enumerate(processes):
            # Alive is asked first: a rank may write its result between the two questions.
            alive = process.is_alive()
            result = work / f"result{rank}"
            if not result.exists():
                failed = not alive
                if alive:
                    pending.append(process)
            else:
                failed = pickle.loads(result.read_bytes())[1] is not None
            if failed:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not pending:
            break
        connection.wait([process.sentinel for process in pending], timeout=0.005)
    for rank, process in enumerate(processes):
        if process.is_alive() and not (work / f"result{rank}").exists():
            os.kill(process.pid or 0, signal.SIGUSR1)
    (work / "leave").touch()


def _stop(processes: Sequence[ForkServerProcess]) -> None:
    for process in processes:
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()


def _outcome(rank: int, process: ForkServerProcess, work: Path) -> Outcome:
    path = work / f"log{rank}"
    log = path.read_text(errors="replace").strip() if path.exists() else ""
    result = work / f"result{rank}"
    if result.exists():
        value, error = pickle.loads(result.read_bytes())
        return Outcome(rank, value, error, log)
    code = process.exitcode
    if code == -signal.SIGKILL:
        return Outcome(rank, None, "did not end in time (its stacks follow)", log)
    return Outcome(rank, None, f"ended with exit code {code} and no result", log)
