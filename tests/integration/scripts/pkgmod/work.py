import torch
from torch import nn


def train() -> int:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(30):
        loss = model(torch.ones(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return 30
