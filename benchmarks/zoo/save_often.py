"""A classifier that saves its weights and the optimizer's state every third step. `--fixed`: every 100 steps."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, CLASSES = 32, 512, 10


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=250), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    every = 100 if options.fixed else 3
    centres = torch.randn(CLASSES, FEATURES)
    model = nn.Sequential(
        nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        for step in watch.steps(options.steps):
            with watch.step(model):
                labels = torch.randint(CLASSES, (BATCH,))
                loss = F.cross_entropy(model(centres[labels] + torch.randn(BATCH, FEATURES)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % every == 0:
                    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, Path(folder) / "last.pt")  # planted
    watch.report()


if __name__ == "__main__":
    main()
