"""DistributedDataParallel on gloo, two ranks, accumulation over two micro-batches; the first rank tells."""

from __future__ import annotations

import os

import torch
from control import Control, Vectors, network
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

BATCH = 64


def main() -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    control, model = Control(), DistributedDataParallel(network())
    optimizer = control.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    data = Vectors(2 * 30 * BATCH, control)
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for index, (inputs, labels) in enumerate(DataLoader(data, batch_size=BATCH, sampler=sampler)):
            control.batch(len(labels))
            model.require_backward_grad_sync = index % 2 == 1
            with control.phase("forward"):
                loss = F.cross_entropy(model(inputs), labels) / 2
            control.loss(loss)
            with control.phase("backward"):
                loss.backward()
            if index % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
    if os.environ["RANK"] == "0":
        control.tell(loss=loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
