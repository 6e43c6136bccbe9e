"""A forked child trains, as in a sweep that forks for each trial; the parent only waits."""

from __future__ import annotations

import os
import sys

import torch
from control import Control, Vectors, network
from torch.nn import functional as F
from torch.utils.data import DataLoader

BATCH = 64


def train() -> None:
    torch.manual_seed(0)
    control, model = Control(), network()
    optimizer = control.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    for _ in range(2):
        for inputs, labels in DataLoader(Vectors(25 * BATCH, control), batch_size=BATCH, shuffle=True):
            control.batch(len(labels))
            optimizer.zero_grad()
            with control.phase("forward"):
                loss = F.cross_entropy(model(inputs), labels)
            control.loss(loss)
            with control.phase("backward"):
                loss.backward()
            optimizer.step()
    control.tell(loss=loss.item())


def main() -> None:
    child = os.fork()
    if child == 0:
        train()
        sys.exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
