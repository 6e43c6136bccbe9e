"""A fullgraph forward, a compiled optimizer step and a compiled whole iteration; prints Dynamo's counters."""

import json

import torch
import torch._dynamo.utils as dynamo
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 1)
forward = torch.compile(model, backend="eager", fullgraph=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


@torch.compile(backend="eager")
def update():
    optimizer.step()


@torch.compile(backend="eager")
def iteration(x):
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for _ in range(4):
    forward(torch.randn(4, 8)).mean().backward()
    update()
for (x,) in DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4):
    iteration(x)
frames = [(metrics.co_name, metrics.recompile_reason) for metrics in dynamo.get_compilation_metrics()]
print(json.dumps([dynamo.counters["stats"]["unique_graphs"], dynamo.counters["graph_break"], frames]))
