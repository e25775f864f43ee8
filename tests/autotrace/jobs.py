"""Ordinary training jobs, as functions of a rank's script; none of them knows of tracing."""

import contextlib
import io
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 16


def batches(count=64, size=4):
    data = torch.arange(count * WIDTH, dtype=torch.float32).reshape(count, WIDTH) / count
    return DataLoader(TensorDataset(data), size)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def loss_of(model, x):
    return model(x).square().mean()


def ddp(rank, world_size):
    """Accumulation of two, an evaluation and a checkpoint: 6 steps."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    held_out = batches(8)
    for number, (x,) in enumerate(batches(48)):
        is_last = number % 2 == 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss_of(model, x + rank).backward()
        if not is_last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if number == 5:
            model.eval()
            with torch.no_grad():
                total = sum(loss_of(model, y) for (y,) in held_out)
            dist.all_reduce(total)
            model.train()
            torch.save(model.state_dict(), io.BytesIO())
    return model


def fsdp2(rank, world_size):
    """4 steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(4):
        loss_of(model, torch.ones(4, WIDTH) + rank).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def pipeline(rank, world_size):
    """3 steps of four microbatches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(rank)
    model = nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(model, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        given = (torch.ones(8, WIDTH),) if rank == 0 else ()
        target = {"target": torch.zeros(8, WIDTH)} if rank == world_size - 1 else {}
        schedule.step(*given, **target)
        optimizer.step()
        optimizer.zero_grad()
    return model


def raw(rank, world_size):
    """Collectives and sends of its own, in the default group and in one of two: 5 steps."""
    pair = dist.new_group([0, 1])
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        x, got = torch.ones(4, WIDTH) * rank, torch.empty(4, WIDTH)
        loss_of(model, x).backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for work in works:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()
        ring = [
            dist.P2POp(dist.isend, x, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, got, (rank - 1) % world_size),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        if rank < 2:
            dist.all_reduce(got, group=pair)
    return model


def gan(rank, world_size, loader=True):
    one, other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
    first, second = (torch.optim.SGD(m.parameters(), 0.1) for m in (one, other))
    source = iter(batches())
    for _ in range(5):
        x = next(source)[0] if loader else torch.ones(4, WIDTH)
        for optimizer in (first, second):
            loss_of(one, other(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return one


def gan_without_a_loader(rank, world_size):
    return gan(rank, world_size, loader=False)


def several_steps_a_fetch(rank, world_size):
    """2 fetches, 6 steps."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    source = iter(batches())
    for _ in range(2):
        (x,) = next(source)
        for _ in range(3):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def scaler(rank, world_size):
    """6 steps, of which the scaler leaves one out."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    source = iter(batches())
    for number in range(6):
        scaler.scale(loss_of(model, next(source)[0])).backward()
        if number == 3:
            model.weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def lbfgs(rank, world_size):
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    source = iter(batches())
    for _ in range(4):
        (x,) = next(source)

        def closure(x=x):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def frozen_teacher(rank, world_size):
    """A model that is never trained, a gradient of the input, and an evaluation at the end."""
    teacher, model = nn.Linear(WIDTH, WIDTH).eval(), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (x,) in batches(16):
        teacher.eval()
        x.requires_grad_()
        (penalty,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
        (loss_of(model, teacher(x)) + penalty.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


#: Job to the number of its steps.
JOBS = {
    ddp: 6,
    fsdp2: 4,
    pipeline: 3,
    raw: 5,
    gan: 5,
    gan_without_a_loader: 5,
    several_steps_a_fetch: 6,
    scaler: 6,
    lbfgs: 4,
    frozen_teacher: 4,
}
SLOW_S = 0.03
SLOW_STEPS = 9


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(context, x, forward_s, backward_s):
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.backward_s)
        return gradient, None, None


class SlowData(TensorDataset):
    slow_s = 0.0

    def __getitem__(self, index):
        time.sleep(self.slow_s / 4)
        return super().__getitem__(index)


class SlowOptimizer(torch.optim.SGD):
    slow_s = 0.0

    def step(self, closure=None):
        time.sleep(self.slow_s)
        return super().step(closure)


def slow(rank, phase):
    """A DDP job in which rank 1 takes longer in one phase."""
    late_s = {phase: SLOW_S} if rank == 1 else {}
    model = DistributedDataParallel(network())
    optimizer = SlowOptimizer(model.parameters(), 0.1)
    optimizer.slow_s = late_s.get("optimizer", 0.0)
    data = SlowData(torch.ones(64, WIDTH))
    data.slow_s = late_s.get("data", 0.0)
    source = iter(DataLoader(data, 4))
    for _ in range(SLOW_STEPS):
        (x,) = next(source)
        y = Sleeps.apply(model(x), late_s.get("forward", 0.0), late_s.get("backward", 0.0))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
