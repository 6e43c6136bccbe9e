"""FSDP2 on gloo, two ranks: every layer sharded; the first rank tells."""

from __future__ import annotations

import os

import torch
from control import Control, Vectors, network
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

BATCH = 64


def main() -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    control, model = Control(), network()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = control.optimizer(torch.optim.AdamW(model.parameters(), 1e-4))
    data = Vectors(2 * 25 * BATCH, control)
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=BATCH, sampler=sampler):
            control.batch(len(labels))
            with control.phase("forward"):
                loss = F.cross_entropy(model(inputs), labels)
            control.loss(loss)
            with control.phase("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if os.environ["RANK"] == "0":
        control.tell(loss=loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
