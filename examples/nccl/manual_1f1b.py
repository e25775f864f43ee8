"""A hand-written 1F1B pipeline schedule, traced with ``hop_span``: true senders, zero bytes.

    python examples/nccl/manual_1f1b.py                          # 4 gloo ranks on this machine
    torchrun --nproc-per-node 4 examples/nccl/manual_1f1b.py     # the same, under a launcher

The schedule is the usual one of Megatron-style code: warm-up forwards, then one forward and one
backward in turn, then the remaining backwards. All that tracing adds is a ``with hop_span(...)``
around each send and receive. Nothing is sent beside the tensors: both ends derive the same ids from
step, direction, ranks and microbatch.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lens_contrib.torch import agree_run_key
from lens_core import NemoLensConfig, setup_telemetry
from lens_core.diagnostics import diagnostics
from lens_core.identity import hop_span, run_span, step_span

WIDTH, ROWS = 32, 4


class Stage:
    """One pipeline stage, and its communication with its neighbours."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.last = rank, world_size - 1
        torch.manual_seed(rank)
        self.module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05)
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        """Compute one microbatch, and keep what its backward needs."""
        x.requires_grad_(self.rank > 0)
        y = self.module(x)
        if self.rank == self.last:
            y = y.square().mean()
        self.kept[microbatch] = x, y
        return y.detach()

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of one microbatch's input."""
        x, y = self.kept.pop(microbatch)
        y.backward(gradient)
        return x.grad

    def recv_forward(self, microbatch: int) -> torch.Tensor:
        """The activation from the stage before; data where there is none."""
        if self.rank == 0:
            return torch.randn(ROWS, WIDTH)
        x = torch.empty(ROWS, WIDTH)
        with hop_span("recv_forward", peer=self.rank - 1, microbatch=microbatch):
            dist.recv(x, self.rank - 1)
        return x

    def send_forward(self, microbatch: int, y: torch.Tensor) -> None:
        """The activation to the next stage."""
        if self.rank < self.last:
            with hop_span("send_forward", peer=self.rank + 1, microbatch=microbatch):
                dist.send(y, self.rank + 1)

    def recv_backward(self, microbatch: int) -> torch.Tensor | None:
        """The gradient from the next stage."""
        if self.rank == self.last:
            return None
        gradient = torch.empty(ROWS, WIDTH)
        with hop_span("recv_backward", peer=self.rank + 1, microbatch=microbatch):
            dist.recv(gradient, self.rank + 1)
        return gradient

    def send_backward(self, microbatch: int, gradient: torch.Tensor | None) -> None:
        """The gradient to the stage before."""
        if self.rank > 0 and gradient is not None:
            with hop_span("send_backward", peer=self.rank - 1, microbatch=microbatch):
                dist.send(gradient, self.rank - 1)

    def send_forward_recv_backward(
        self, forward: int, backward: int, y: torch.Tensor
    ) -> torch.Tensor | None:
        """Both at once with the next stage: two calls one after the other could deadlock."""
        if self.rank == self.last:
            return None
        peer, gradient = self.rank + 1, torch.empty(ROWS, WIDTH)
        with hop_span(
            "send_forward_recv_backward", peer=peer, microbatch=forward, recv_microbatch=backward
        ):
            _exchange(y, gradient, peer)
        return gradient

    def send_backward_recv_forward(
        self, backward: int, forward: int, gradient: torch.Tensor | None
    ) -> torch.Tensor:
        """Both at once with the stage before."""
        if self.rank == 0 or gradient is None:
            return self.recv_forward(forward)
        peer, x = self.rank - 1, torch.empty(ROWS, WIDTH)
        with hop_span(
            "send_backward_recv_forward", peer=peer, microbatch=backward, recv_microbatch=forward
        ):
            _exchange(gradient, x, peer)
        return x

    def run_1f1b(self, microbatches: int) -> float:
        """One training step; the mean loss on the last stage, 0 elsewhere."""
        warmup = min(self.last - self.rank, microbatches)
        steady = microbatches - warmup
        losses = []
        for i in range(warmup):
            self.send_forward(i, self.forward(i, self.recv_forward(i)))
        x = self.recv_forward(warmup) if steady else None
        for i in range(steady):
            assert x is not None
            y = self.forward(warmup + i, x)
            losses.append(float(y.mean()))
            gradient = self.backward(i, self.send_forward_recv_backward(warmup + i, i, y))
            if i == steady - 1:
                self.send_backward(i, gradient)
            else:
                x = self.send_backward_recv_forward(i, warmup + i + 1, gradient)
        for i in range(steady, microbatches):
            self.send_backward(i, self.backward(i, self.recv_backward(i)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(losses) / len(losses) if self.rank == self.last and losses else 0.0


def _exchange(send: torch.Tensor, receive: torch.Tensor, peer: int) -> None:
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, send, peer), dist.P2POp(dist.irecv, receive, peer)]
    )
    for work in works:
        work.wait()


def train(steps: int, microbatches: int, output: str) -> None:
    """What each rank runs, in a process group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = NemoLensConfig(enabled=True, exporter="file", output_dir=output, run_id="manual-1f1b")
    with setup_telemetry(config, resource_attributes={"nv.dl.rank": rank}):
        agree_run_key()  # once, through the group's store; after it nothing is ever sent
        stage = Stage(rank, world_size)
        with run_span():
            for step in range(steps):
                with step_span(step):
                    loss = stage.run_1f1b(microbatches)
                if rank == world_size - 1:
                    print(f"step {step}: loss {loss:.6f}")
    if diagnostics.counts():
        print(f"rank {rank}: {dict(diagnostics.counts())}")


def _spawned(rank: int, world_size: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    train(options.steps, options.microbatches, options.output)
    dist.destroy_process_group()


def main() -> None:
    """Run on the launcher's ranks, or on four of our own."""
    parser = argparse.ArgumentParser(description="A hand-written 1F1B schedule, traced.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4, help="without a launcher")
    parser.add_argument("--output", default="runs", help="directory for OTLP JSON Lines files")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(options.steps, options.microbatches, options.output)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_spawned, (options.ranks, f"{folder}/store", options), nprocs=options.ranks)
    print(f"spans are in {options.output}/manual-1f1b")


if __name__ == "__main__":
    main()
