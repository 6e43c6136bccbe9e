"""A fullgraph forward, a compiled step and a whole iteration, hooks, a changing batch; prints Dynamo's counters."""

import json

import torch
import torch._dynamo.utils as dynamo
from torch.utils.data import DataLoader, TensorDataset


class Hooked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        self.linear.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
        self.linear.register_forward_hook(lambda _module, _args, output: output + 1)
        self.linear.register_full_backward_hook(lambda _module, _input, _output: None)

    def forward(self, x):
        x = self.linear(x)
        if x.mean().item() > 1e6:
            x = x / 2
        return x


torch.manual_seed(0)
plain, hooked = torch.nn.Linear(8, 1), Hooked()
forward = torch.compile(plain, backend="eager", fullgraph=True)
model = torch.compile(hooked, backend="eager")
optimizer = torch.optim.SGD([*plain.parameters(), *hooked.parameters()], lr=0.01)


@torch.compile(backend="eager")
def update():
    optimizer.step()


@torch.compile(backend="eager")
def iteration(x):
    plain(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


loader = DataLoader(TensorDataset(torch.randn(10, 8)), batch_size=4)  # the last batch is smaller
for (x,) in loader:
    (forward(x).mean() + model(x).mean()).backward()
    update()
    optimizer.zero_grad()
    iteration(x)
entries = [(entry.compile_id, entry.co_name, entry.is_forward) for entry in dynamo.get_compilation_metrics()]
counters = {name: dict(dynamo.counters[name]) for name in ("stats", "graph_break")}
print(json.dumps({"counters": counters, "entries": entries}))
