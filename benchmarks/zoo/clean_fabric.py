"""A loop of one's own with Lightning Fabric, data in memory."""

from __future__ import annotations

import lightning
import torch
from common import Watch, parse
from perceptron import BATCH, Vectors, network
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    options, watch = parse(steps=80), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = DataLoader(Vectors(options.steps * BATCH), batch_size=BATCH, shuffle=True)
    for inputs, labels in fabric.setup_dataloaders(loader):
        with watch.step(model):
            loss = F.cross_entropy(model(inputs), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    watch.report()


if __name__ == "__main__":
    main()
