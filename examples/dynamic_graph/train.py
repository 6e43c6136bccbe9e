"""Trains a small classifier of signals and evaluates it after every epoch, both compiled by torch.compile.

    python train.py [--fixed] [--epochs N] [--backend inductor|aot_eager|eager]

The signals are made up. An evaluation keeps all scores, because average precision needs them together; it keeps them
inside the compiled part, where they grow with every batch, or with --fixed outside of it.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, CHANNELS, LENGTH, BATCH = 10, 4, 256, 8
TRAINED, EVALUATED = 160, 400  # signals an epoch


class Block(nn.Module):
    """A gated residual layer, the same for every moment of the signal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.wide = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.wide(self.norm(x)).chunk(2, -1)
        return x + torch.tanh(value) * torch.sigmoid(gate)


class Net(nn.Module):
    """Two blocks, the mean over time, and a linear layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(CHANNELS, width), Block(width), Block(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


class Report:
    """What an evaluation saw: a row of scores and a label for every signal."""

    def __init__(self) -> None:
        self.scores = torch.empty(0, CLASSES)
        self.labels = torch.empty(0, dtype=torch.long)

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """Appends a batch."""
        self.scores = torch.cat([self.scores, scores])
        self.labels = torch.cat([self.labels, labels])

    def average_precision(self) -> float:
        """The mean over all classes."""
        found = F.one_hot(self.labels, CLASSES).gather(0, self.scores.argsort(0, descending=True))
        precision = found.cumsum(0) / torch.arange(1, len(found) + 1).unsqueeze(1)
        return ((precision * found).sum(0) / found.sum(0)).mean().item()


def loss_of(model: Net, signals: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(signals), labels)


def scores_of(model: Net, signals: torch.Tensor) -> torch.Tensor:
    return model(signals).softmax(1)


def evaluate_into(report: Report, model: Net, signals: torch.Tensor, labels: torch.Tensor) -> None:
    report.update(scores_of(model, signals), labels)


def signals(count: int) -> DataLoader:
    """Ten patterns of four channels under noise, and which of them each signal is; an item is a batch."""
    patterns = torch.randn(CLASSES, 1, CHANNELS, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(count) % CLASSES
    noisy = patterns[labels] + 4 * torch.randn(count, LENGTH, CHANNELS)
    return DataLoader(TensorDataset(noisy.unflatten(0, (-1, BATCH)), labels.unflatten(0, (-1, BATCH))), batch_size=None)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="train and evaluate a small classifier with torch.compile")
    parser.add_argument("--fixed", action="store_true", help="keep the scores outside of the compiled part")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors this small gain nothing from a second thread
    training, evaluation = signals(TRAINED), signals(EVALUATED)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def compiled(function):
        return torch.compile(function, dynamic=False, backend=args.backend)

    compiled_loss, compiled_evaluate, compiled_scores = map(compiled, (loss_of, evaluate_into, scores_of))
    for epoch in range(args.epochs):
        begin = time.perf_counter()
        for batch, labels in training:
            loss = compiled_loss(model, batch, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        middle = time.perf_counter()
        report, kept = Report(), []
        with torch.no_grad():
            for batch, labels in evaluation:
                if args.fixed:
                    kept.append((compiled_scores(model, batch), labels))
                else:
                    compiled_evaluate(report, model, batch, labels)
        if args.fixed:
            report.update(*map(torch.cat, zip(*kept, strict=True)))
        precision, end = report.average_precision(), time.perf_counter()
        print(f"epoch {epoch + 1}: average precision {precision:.3f}, ", end="")
        print(f"trained in {middle - begin:.3f} s, evaluated in {end - middle:.3f} s", flush=True)


if __name__ == "__main__":
    main()
