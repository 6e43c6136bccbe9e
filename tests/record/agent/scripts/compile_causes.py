"""A compiled model that is compiled anew for every usual reason; `compile_causes.py BACKEND` trains it for 14 steps."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.last = torch.nn.Linear(16, 1)
        self.calls = 0

    def forward(self, x, scale):
        x = torch.relu(self.first(x)) * scale
        if x.mean().item() > 1e6:
            x = x / 2
        print("forward")
        self.calls += 1
        return self.last(x) + self.calls


class Report:
    """Keeps every step's tensor, so that its mean is of one row more each time."""

    def __init__(self):
        self.rows = torch.zeros(0, 1)

    def add(self, row):
        self.rows = torch.cat([self.rows, row])
        return self.mean(self.rows)

    @staticmethod
    @torch.compile(backend=sys.argv[1], dynamic=False)
    def mean(rows):
        return rows.mean() + rows.std(unbiased=False)


BATCHES = [8, 8, 12, 16, 16, 8, 8, 8, 12, 8, 8, 8, 8, 8]
SCALES = [1.0, 1.0, 1.0, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]


def main():
    torch.manual_seed(0)
    net = Net()
    model = torch.compile(net, backend=sys.argv[1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
    loader = DataLoader(data, batch_sampler=[list(range(size)) for size in BATCHES])
    report = Report()
    for (x, target), scale in zip(loader, SCALES):  # noqa: B905
        loss = torch.nn.functional.mse_loss(
            model(x, scale),
            target,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            report.add(loss.detach().reshape(1, 1))


if __name__ == "__main__":
    main()
