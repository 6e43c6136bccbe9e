"""A loop of one's own with Lightning Fabric: accumulation over two micro-batches."""

from __future__ import annotations

import lightning
import torch
from control import Control, Vectors, network
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH = 64


def main() -> None:
    control = Control()
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    lightning.seed_everything(0, verbose=False)
    network_of_fabric = network()
    optimizer = control.optimizer(torch.optim.AdamW(network_of_fabric.parameters(), lr=1e-4))
    model, optimizer = fabric.setup(network_of_fabric, optimizer)
    train = fabric.setup_dataloaders(DataLoader(Vectors(40 * BATCH, control), batch_size=BATCH, shuffle=True))
    for _ in range(2):
        for index, (inputs, labels) in enumerate(train):
            accumulates = index % 2 == 0
            control.batch(len(labels))
            with fabric.no_backward_sync(model, enabled=accumulates):
                with control.phase("forward"):
                    loss = F.cross_entropy(model(inputs), labels)
                control.loss(loss, 2)
                with control.phase("backward"):
                    fabric.backward(loss / 2)
            if not accumulates:
                optimizer.step()
                optimizer.zero_grad()
    control.tell(loss=loss.item())


if __name__ == "__main__":
    main()
