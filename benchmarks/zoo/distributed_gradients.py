"""Two ranks that average the gradient of every parameter by a call of its own, in a deep and narrow network.

Fixed: the gradients are averaged in one flat tensor.
"""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

BATCH, WIDTH, DEPTH = 256, 96, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.linear(self.norm(x)))


def average(model: nn.Module, flat: bool) -> None:
    """Replaces every gradient by its mean over the ranks."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not flat:
        for gradient in gradients:
            dist.all_reduce(gradient)  # planted
            gradient /= dist.get_world_size()
        return
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(joined)
    joined /= dist.get_world_size()
    parts = joined.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(like) for part, like in zip(parts, gradients, strict=True)])


def main() -> None:
    options, watch = parse(steps=120), Watch()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    features = torch.randn(8 * BATCH, WIDTH)
    labels = torch.randint(0, 10, (len(features),))
    model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 10))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in watch.steps(options.steps):
        with watch.step(model):
            rows = slice(step % 8 * BATCH, (step % 8 + 1) * BATCH)
            loss = F.cross_entropy(model(features[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            average(model, options.fixed)
            optimizer.step()
    watch.report()
    dist.barrier()  # leaving while another rank still sends may end in an abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
