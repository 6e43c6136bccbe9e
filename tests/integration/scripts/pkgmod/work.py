import torch
from plain_sgd import PlainSGD
from torch import nn


def train() -> int:
    model = nn.Linear(4, 4)
    optimizer = PlainSGD(model.parameters(), lr=0.1)
    for _ in range(30):
        loss = model(torch.ones(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return 30
