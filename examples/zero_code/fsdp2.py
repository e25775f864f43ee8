"""An ordinary FSDP2 script with a distributed checkpoint, which knows nothing of telemetry.

Try it with ``lens run --trace -- torchrun --nproc-per-node 2 examples/zero_code/fsdp2.py``.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(20):
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}, saved in {folder[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
