"""A regression whose hidden layer is computed in float64 and copied back. `--fixed`: in float32 throughout."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, WIDTH = 256, 128, 768


class Model(nn.Module):
    """Three layers from (batch, FEATURES) to (batch, 1)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first = nn.Linear(FEATURES, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = F.linear(x.to(self.dtype), self.second.weight.to(self.dtype), self.second.bias.to(self.dtype))  # planted
        return self.last(torch.relu(x).float())


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=200), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mixing = torch.randn(FEATURES, 1)
    model = Model(torch.float32 if options.fixed else torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in watch.steps(options.steps):
        with watch.step(model):
            inputs = torch.randn(BATCH, FEATURES)
            loss = F.mse_loss(model(inputs), torch.tanh(inputs @ mixing))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
