"""A classifier that counts its hits and ranks item by item with `.item()`. `--fixed`: the same by tensor operators."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, CLASSES = 512, 128, 20


class Metrics:
    """Hits and the summed rank of the right class, over all items seen."""

    def __init__(self, *, batched: bool) -> None:
        self.batched = batched
        self.hits, self.ranks = 0, 0

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        if self.batched:
            right = scores.gather(1, labels.unsqueeze(1))
            self.hits += int((scores.argmax(1) == labels).sum())
            self.ranks += int((scores > right).sum())
            return
        for row, label in zip(scores, labels, strict=True):  # planted
            self.hits += row.argmax().item() == label.item()
            self.ranks += (row > row[label.item()]).sum().item()


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=700), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    centres = torch.randn(CLASSES, FEATURES)
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    metrics = Metrics(batched=options.fixed)
    for _ in watch.steps(options.steps):
        with watch.step(model):
            labels = torch.randint(CLASSES, (BATCH,))
            scores = model(centres[labels] + torch.randn(BATCH, FEATURES))
            loss = F.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metrics.update(scores.detach(), labels)
    watch.report()


if __name__ == "__main__":
    main()
