"""Ranks that hang, each in one of the ways that a training job does."""

import contextlib
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from opentelemetry import trace

from lens_contrib.torch.waits import waiting
from lens_core import NemoLensConfig, setup_telemetry

#: More than a connection buffers, so that a send waits for its receiver.
LARGE = 32 << 20
NO_SPAN_AROUND = ("all_asleep", "all_reduce_without_a_span")


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


def asleep_in_its_data_loader(rank, world_size):
    """DistributedDataParallel, spans of its own, and none that says what it waits for."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    tracer = trace.get_tracer("own")
    for step in range(3):
        with tracer.start_as_current_span("data_loading"):
            if rank == 1 and step == 2:
                time.sleep(600)
        with tracer.start_as_current_span("forward_backward"):
            model(torch.ones(2, 4)).sum().backward()


def all_reduce_without_a_span(rank, world_size):
    if rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.zeros(4))


def all_asleep(rank, world_size):
    time.sleep(600)


def side_threads_go_on(rank, world_size):
    """Each rank has a thread that pushes metrics, in spans."""

    def push():
        while True:
            with trace.get_tracer("metrics").start_as_current_span("push"):
                time.sleep(0.05)

    threading.Thread(target=push, daemon=True).start()
    if rank == 1:
        with trace.get_tracer("own").start_as_current_span("data_loading"):
            time.sleep(600)
    with waiting("recv", peer=1):
        dist.recv(torch.zeros(4), 1)


def one_never_comes(rank, world_size):
    """The others give up after the timeout of the group, and go on living."""
    dist.barrier()
    with trace.get_tracer("own").start_as_current_span("data_loading"):
        if rank == 2:
            time.sleep(600)
    with contextlib.suppress(RuntimeError), waiting("all_reduce"):
        dist.all_reduce(torch.zeros(4))
    time.sleep(600)


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
    if case in NO_SPAN_AROUND:
        globals()[case](rank, world_size)
    with handle.tracer.start_as_current_span("train.step"):
        globals()[case](rank, world_size)
