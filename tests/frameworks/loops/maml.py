"""MAML's shape: inner updates by `torch.autograd.grad` through which the outer backward goes."""

from __future__ import annotations

import torch
from control import Control, Vectors, network
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH = 64


def main() -> None:
    torch.manual_seed(0)
    control, model = Control(), network(width=512)
    optimizer = control.optimizer(torch.optim.Adam(model.parameters(), 1e-4))
    for _ in range(2):
        for inputs, labels in DataLoader(Vectors(25 * BATCH, control), batch_size=BATCH, shuffle=True):
            control.batch(len(labels))
            optimizer.zero_grad()
            with control.phase("forward"):  # the inner updates are part of the outer forward pass
                values = dict(model.named_parameters())
                for _ in range(2):
                    inner = F.cross_entropy(functional_call(model, values, (inputs[:32],)), labels[:32])
                    steps = torch.autograd.grad(inner, list(values.values()), create_graph=True)
                    values = {name: value - 0.01 * g for (name, value), g in zip(values.items(), steps, strict=True)}
                loss = F.cross_entropy(functional_call(model, values, (inputs[32:],)), labels[32:])
            control.loss(loss)
            with control.phase("backward"):
                loss.backward()
            optimizer.step()
    control.tell(loss=loss.item())


if __name__ == "__main__":
    main()
