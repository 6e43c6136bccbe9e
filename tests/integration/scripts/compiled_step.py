"""A full-graph forward, a loss that breaks its graph, and a compiled optimizer step whose learning rate changes.

Prints how many graphs each of them was compiled to, the breaks, and the versions of every frame.
"""

from collections import Counter

import torch
from torch import nn
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.utils.data import DataLoader

graphs = Counter()


def compiled(name, function, **options):
    def backend(graph, _inputs):
        graphs[name] += 1
        return graph.forward

    return torch.compile(function, backend=backend, **options)


def loss_of(y):
    loss = y.square().mean()
    print("loss of", len(y))
    return loss * 2


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
forward = compiled("forward", model, fullgraph=True, dynamic=False)
breaking = compiled("loss", loss_of, dynamic=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = compiled("optimizer", optimizer.step)
for number, x in enumerate(DataLoader(torch.randn(11 * 4, 8), batch_size=4)):
    if number == 6:
        optimizer.param_groups[0]["lr"] = 0.01
    optimizer.zero_grad()
    loss = breaking(forward(x[: 4 if number < 4 else 3]))
    loss.backward()
    step()
versions = Counter(entry.co_name for entry in get_compilation_metrics())
print("graphs", dict(graphs), "breaks", dict(counters["graph_break"]), "versions", dict(versions))
print("stats", dict(counters["stats"]), f"loss {loss.item():.9f}")
