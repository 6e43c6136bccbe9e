"""Two ranks, of which the first looks at the spectrum of its weights after every step, as a monitor would.

Fixed: it looks every 50 steps.
"""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BATCH, WIDTH = 256, 384


def largest_ratio(model: nn.Module) -> float:
    ratio = 0.0
    for parameter in model.parameters():
        if parameter.dim() == 2 and min(parameter.shape) > 128:
            values = torch.linalg.svdvals(parameter.detach())  # planted
            ratio = max(ratio, float(values[0] / values[-1]))
    return ratio


def main() -> None:
    options, watch = parse(steps=100), Watch()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    every = 50 if options.fixed else 1
    features = torch.randn(8 * BATCH, WIDTH)
    labels = torch.randint(0, 10, (len(features),))
    hidden = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*hidden, nn.Linear(WIDTH, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in watch.steps(options.steps):
        with watch.step(model):
            rows = slice(step % 8 * BATCH, (step % 8 + 1) * BATCH)
            loss = F.cross_entropy(model(features[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step % every == 0 and largest_ratio(model) > 1e6:
                break
    watch.report()
    dist.barrier()  # leaving while another rank still sends may end in an abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
