"""Ranks that hang, each in one of the ways that a training job does."""

import os
import signal
import time

import torch
import torch.distributed as dist

from lens_contrib.torch.waits import waiting
from lens_core import NemoLensConfig, setup_telemetry

#: More than a connection buffers, so that a send waits for its receiver.
LARGE = 32 << 20


def sleeps_before_its_send(rank, world_size):
    """Rank r receives from r - 1 and sends to r + 1; rank 1 sleeps before it sends."""
    tensor = torch.zeros(4)
    if rank > 0:
        with waiting("recv", peer=rank - 1, microbatch=7):
            dist.recv(tensor, rank - 1)
    if rank == 1:
        time.sleep(600)
    if rank + 1 < world_size:
        with waiting("send", peer=rank + 1, microbatch=7):
            dist.send(tensor, rank + 1)
    with waiting("all_reduce"):
        dist.all_reduce(tensor)


def different_collectives(rank, world_size):
    tensor = torch.zeros(4)
    with waiting("all_reduce"):
        dist.all_reduce(tensor)
    if rank == 2:
        with waiting("barrier"):
            dist.barrier()
    else:
        with waiting("all_reduce"):
            dist.all_reduce(tensor)
    time.sleep(600)


def sends_in_a_circle(rank, world_size):
    tensor = torch.zeros(LARGE // 4)
    peer = (rank + 1) % world_size
    with waiting("send", peer=peer):
        dist.send(tensor, peer)
    with waiting("recv", peer=(rank - 1) % world_size):
        dist.recv(tensor, (rank - 1) % world_size)


def one_is_killed(rank, world_size):
    """As on NCCL, the others do not notice: gloo's error is swallowed inside of the wait."""
    if rank == 2:
        time.sleep(1.0)  # the others are waiting by then
        os.kill(os.getpid(), signal.SIGKILL)
    with waiting("all_reduce"):
        try:
            dist.all_reduce(torch.zeros(4))
        except RuntimeError:
            time.sleep(600)


def stuck_in_python(rank, world_size):
    if rank == 3:
        spin_for_ever()
    with waiting("all_reduce"):
        dist.all_reduce(torch.zeros(4))


def spin_for_ever():
    while True:
        pass


def run(rank, world_size, case, directory):
    config = NemoLensConfig(
        enabled=True,
        exporter="file",
        metrics_enabled=False,
        run_id="run",
        output_dir=directory,
        journal_dir=f"{directory}/journals",
    )
    handle = setup_telemetry(
        config, resource_attributes={"nv.dl.rank": rank, "nv.dl.world_size": world_size}
    )
    with handle.tracer.start_as_current_span("train.step"):
        globals()[case](rank, world_size)
