"""What ranks of these tests run: jobs as they are, and as they are traced."""

import os
import time

import torch
import torch.distributed as dist

from tests.autotrace import jobs


def init_group(rank, world_size, name="store"):
    store = dist.FileStore(os.environ["LENS_TEST_STORE"] + name, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def parameters(model):
    local = [getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()]
    return [p.detach().tolist() for p in local]


def untraced_and_traced(rank, world_size, names):
    """Parameters without and with tracing, and when each job began."""
    torch.set_num_threads(1)
    chosen = [job for job in jobs.JOBS if job.__name__ in names]
    init_group(rank, world_size, "plain")
    torch.manual_seed(1)
    plain = [parameters(job(rank, world_size)) for job in chosen]
    dist.destroy_process_group()

    from lens_contrib.torch import instrument

    instrument()
    torch.manual_seed(1)
    traced, began_ns = [], {}
    for job in chosen:
        init_group(rank, world_size, job.__name__)
        began_ns[job.__name__] = time.time_ns()
        traced.append(parameters(job(rank, world_size)))
        dist.destroy_process_group()
    _end()
    return plain == traced, began_ns


def slow_in(rank, world_size, phases):
    from lens_contrib.torch import instrument

    torch.set_num_threads(1)
    instrument()
    init_group(rank, world_size)
    began_ns = {}
    for phase in phases:
        began_ns[phase] = time.time_ns()
        jobs.slow(rank, phase)
    dist.destroy_process_group()
    _end()
    return began_ns


def sets_telemetry_up_itself(rank, world_size):
    """A script that comes to a set-up of its own after torch is traced already."""
    from lens_contrib.torch import instrument, uninstrument
    from lens_core import NemoLensConfig, setup_telemetry
    from lens_core.telemetry.handle import current_telemetry

    os.environ["TORCHELASTIC_RUN_ID"] = "run"
    instrument()
    ours = current_telemetry()
    config = NemoLensConfig.from_env()
    config.enabled = True
    handle = setup_telemetry(config)
    init_group(rank, world_size)
    jobs.gan(rank, world_size)
    dist.destroy_process_group()
    uninstrument()
    return ours is not handle, handle.shutdown()


def _end():
    """What the end of the process would do; ranks of these tests end otherwise."""
    from lens_core.telemetry.handle import current_telemetry

    handle = current_telemetry()
    if handle is not None:
        handle.shutdown()


def hang(rank, world_size, case):
    from lens_contrib.torch import instrument

    torch.set_num_threads(1)
    instrument()
    if case == "never_comes" and rank == 1:
        time.sleep(600)
    init_group(rank, world_size)
    HANGS[case](rank)
    time.sleep(600)


def asleep_under_ddp(rank):
    model = torch.nn.parallel.DistributedDataParallel(jobs.network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, (x,) in enumerate(jobs.batches()):
        if (rank, number) == (1, 3):
            time.sleep(600)
        jobs.loss_of(model, x).backward()
        optimizer.step()


def asleep_under_fsdp2(rank):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(jobs.WIDTH, jobs.WIDTH)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, (x,) in enumerate(jobs.batches()):
        if (rank, number) == (1, 3):
            time.sleep(600)
        jobs.loss_of(model, x).backward()
        optimizer.step()


def asleep_in_its_loader(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(jobs.WIDTH, jobs.WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = jobs.SlowData(torch.ones(64, jobs.WIDTH))
    for number, (x,) in enumerate(torch.utils.data.DataLoader(data, 4)):
        jobs.loss_of(model, x).backward()
        optimizer.step()
        data.slow_s = 2400.0 if (rank, number) == (1, 2) else 0.0


def send_against_barrier(rank):
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        dist.barrier()
    else:
        dist.send(torch.ones(1 << 23), 1)


def killed(rank):
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(2)
        os.kill(os.getpid(), 9)
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError:
        time.sleep(600)


HANGS = {
    "asleep_under_ddp": asleep_under_ddp,
    "asleep_under_fsdp2": asleep_under_fsdp2,
    "asleep_in_its_loader": asleep_in_its_loader,
    "send_against_barrier": send_against_barrier,
    "never_comes": lambda rank: None,
    "killed": killed,
}
