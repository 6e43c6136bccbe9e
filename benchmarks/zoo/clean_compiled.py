"""A compiled model with inputs of one shape: it compiles in the first step and never again."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, WIDTH = 256, 512


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    options, watch = parse(steps=250), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    features = torch.randn(4 * BATCH, WIDTH)
    labels = torch.randint(0, 10, (len(features),))
    model = nn.Sequential(Residual(), Residual(), nn.Linear(WIDTH, 10))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in watch.steps(options.steps):
        with watch.step(model):
            rows = slice(step % 4 * BATCH, (step % 4 + 1) * BATCH)
            loss = F.cross_entropy(compiled(features[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
