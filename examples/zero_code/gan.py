"""An ordinary GAN of two optimizers and no data loader, which knows nothing of telemetry.

Try it with ``lens run --trace -- torchrun --nproc-per-node 2 examples/zero_code/gan.py``.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    critic = DistributedDataParallel(nn.Linear(16, 1))
    generator = DistributedDataParallel(nn.Linear(8, 16))
    of_critic = torch.optim.SGD(critic.parameters(), 1e-2)
    of_generator = torch.optim.SGD(generator.parameters(), 1e-2)
    for _ in range(20):
        real, noise = torch.randn(32, 16), torch.randn(32, 8)
        loss = critic(generator(noise).detach()).mean() - critic(real).mean()
        loss.backward()
        of_critic.step()
        of_critic.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        of_generator.step()
        of_generator.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss of the critic {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
