"""An ordinary DDP script, which knows nothing of telemetry.

Try it with ``lens run --trace -- torchrun --nproc-per-node 2 examples/zero_code/ddp.py``.
"""

import time

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@click.command()
@click.option("--steps", default=20)
@click.option("--workers", default=0, help="Workers of each data loader.")
@click.option("--slow-rank", default=-1, help="A rank whose forward takes 20 ms longer.")
@click.option("--hang-rank", default=-1, help="A rank that sleeps from its sixth step on.")
def main(steps: int, workers: int, slow_rank: int, hang_rank: int) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 8, (4096,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler, num_workers=workers)
    for step, (x, y) in zip(range(steps), loader, strict=False):
        if rank == hang_rank and step == 5:
            time.sleep(3600)
        if rank == slow_rank:
            time.sleep(0.02)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    total = sum(p.detach().double().sum() for p in model.parameters())
    if rank == 0:
        print(f"loss {loss.item():.6f}, sum of the parameters {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
