"""A loop that spends its time where it should: in large matrix products, fed from memory."""

import torch
from plain_sgd import PlainSGD
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(1024, 512), torch.randn(1024, 512))
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))
optimizer = PlainSGD(model.parameters(), lr=0.01)
for _ in range(25):
    for inputs, targets in DataLoader(data, batch_size=256):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("trained")
