"""A loop over slices of tensors in memory, an optimizer, no loader and no evaluation."""

from __future__ import annotations

import torch
from control import Control, Vectors, network
from torch.nn import functional as F

BATCH = 64


def main() -> None:
    torch.manual_seed(0)
    control, model = Control(loader=False), network()
    optimizer = control.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    data = Vectors(10 * BATCH)
    for step in range(80):
        rows = slice(step % 10 * BATCH, (step % 10 + 1) * BATCH)
        optimizer.zero_grad()
        with control.phase("forward"):
            loss = F.cross_entropy(model(data.inputs[rows]), data.labels[rows])
        control.loss(loss)
        with control.phase("backward"):
            loss.backward()
        optimizer.step()
    control.tell(loss=loss.item())


if __name__ == "__main__":
    main()
