"""Graph breaks and recompilations while the script turns torch's logs on and off; `compile_logs.py WHAT`."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        print("forward")
        return self.linear(x) + self.calls


def change_logs(step, what):
    if what == "set_logs" and step in (2, 4, 6):
        torch._logging.set_logs(**({"graph_breaks": True, "recompiles": True} if step == 4 else {}))


def main():
    torch.manual_seed(0)
    net = Net()
    model = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.ones(28, 4)), batch_size=4)
    for step, (x,) in enumerate(loader):
        change_logs(step, sys.argv[1])
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            torch._dynamo.reset()
        if step == 4 and hasattr(torch._dynamo, "reset_recompile_user_contexts"):
            torch._dynamo.reset_recompile_user_contexts()


main()
