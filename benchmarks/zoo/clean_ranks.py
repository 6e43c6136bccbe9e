"""Two ranks of data-parallel training with equal work: gradients in few large buckets, batches in memory."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

# much work for few parameters: exchanging gradients and giving memory back take little of a step
BATCH, FEATURES, CLASSES, LAYERS = 1024, 384, 10, 6


def network() -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(inplace=True)) for _ in range(LAYERS)]
    return nn.Sequential(*hidden, nn.Linear(FEATURES, CLASSES))


def main() -> None:
    options, watch = parse(steps=80), Watch()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    torch.set_num_threads(1)
    vectors, labels = torch.randn(8, BATCH, FEATURES), torch.randint(0, CLASSES, (8, BATCH))
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in watch.steps(options.steps):
        with watch.step(model):
            loss = F.cross_entropy(model(vectors[step % 8]), labels[step % 8])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()
    dist.barrier()  # leaving while another rank still sends may end in an abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
