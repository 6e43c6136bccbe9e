"""A classifier that tells the median loss of all items so far, sorted anew in every step. `--fixed`: of the last."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, CLASSES = 64, 256, 10
KEPT = 512


class History:
    """Losses of single items; `kept` is how many of the last ones count, None for all."""

    def __init__(self, kept: int | None) -> None:
        self.kept = kept
        self.seen: list[float] = []

    def median(self, losses: torch.Tensor) -> float:
        """With `losses` (BATCH,) taken in."""
        self.seen += losses.tolist()
        if self.kept is not None:
            self.seen = self.seen[-self.kept :]
        return sorted(self.seen)[len(self.seen) // 2]  # planted


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=900), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    centres = torch.randn(CLASSES, FEATURES)
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    history = History(KEPT if options.fixed else None)
    for _ in watch.steps(options.steps):
        with watch.step(model):
            labels = torch.randint(CLASSES, (BATCH,))
            losses = F.cross_entropy(model(centres[labels] + torch.randn(BATCH, FEATURES)), labels, reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            history.median(losses.detach())
    watch.report()


if __name__ == "__main__":
    main()
