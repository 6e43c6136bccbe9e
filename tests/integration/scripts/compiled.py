"""A full-graph forward and a compiled optimizer step; prints how often the compiler made or broke a graph."""

import torch
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = nn.Linear(8, 8)
forward = torch.compile(model, backend="eager", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = torch.compile(optimizer.step, backend="eager")
for _ in range(12):
    loss = forward(torch.ones(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    step()
stats = counters["stats"]
print("graphs", stats["unique_graphs"], "breaks", sum(counters["graph_break"].values()), f"loss {loss.item():.9f}")
