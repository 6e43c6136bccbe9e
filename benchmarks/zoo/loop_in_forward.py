"""A sequence model that attends position by position. `--fixed`: to all positions at once."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH, WIDTH, WORDS = 16, 48, 64, 50


class Attention(nn.Module):
    """One head over (batch, length, width), causal."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, dim=-1)
        if self.whole:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        rows = [attend(query[:, i : i + 1], key[:, : i + 1], value[:, : i + 1]) for i in range(x.shape[1])]  # planted
        return torch.cat(rows, dim=1)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What one position gathers from (batch, past, width)."""
    weights = torch.softmax(query @ key.transpose(1, 2) / WIDTH**0.5, dim=-1)
    return weights @ value


def main() -> None:
    """Train for the given number of steps to tell which word stood at the start of a sequence."""
    options, watch = parse(steps=250), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        *(nn.Embedding(WORDS, WIDTH), Attention(whole=options.fixed), nn.Linear(WIDTH, 512)),
        *(nn.ReLU(), nn.Linear(512, WORDS)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in watch.steps(options.steps):
        with watch.step(model):
            words = torch.randint(WORDS, (BATCH, LENGTH))
            targets = words[:, :1].expand(-1, LENGTH)
            loss = F.cross_entropy(model(words).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
