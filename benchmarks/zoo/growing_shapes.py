"""A compiled sequence model whose sequences grow, compiled anew for each length. `--fixed`: for any length."""

from __future__ import annotations

import sys

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, WIDTH, WORDS = 8, 64, 50
SHORTEST, GROWS_EVERY = 16, 5
FIXED = "--fixed" in sys.argv

torch._dynamo.config.recompile_limit = 64


class Model(nn.Module):
    """Plain attention over (batch, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, 256)
        self.head = nn.Linear(256, WORDS)

    @torch.compile(backend="aot_eager", dynamic=FIXED)  # planted
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        x = x + torch.softmax(x @ x.transpose(1, 2) / WIDTH**0.5, dim=-1) @ x
        return self.head(torch.relu(self.mix(x)))


def main() -> None:
    """Train for the given number of steps to copy sequences."""
    options, watch = parse(steps=80), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in watch.steps(options.steps):
        with watch.step(model):
            words = torch.randint(WORDS, (BATCH, SHORTEST + step // GROWS_EVERY))
            loss = F.cross_entropy(model(words).flatten(0, 1), words.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
