"""Trains 60 steps; half-way it takes away what recorders write with. Its own files are told on standard output."""

import os
import resource
import sys
import time
from pathlib import Path

import torch
from plain_sgd import PlainSGD

STEPS = 60


def fill(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (65536, 1):
        try:
            while os.write(file, b"x" * size) == size:
                pass
        except OSError:
            continue


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    model = torch.nn.Linear(16, 16)
    optimizer = PlainSGD(model.parameters(), lr=0.1)
    own = []
    for step in range(STEPS):
        if step == STEPS // 2:
            if how == "descriptors":
                os.closerange(3, 256)
                own = [os.open(folder / f"own-{number}", os.O_WRONLY | os.O_CREAT) for number in range(40)]
            elif how == "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            elif how == "disk":
                fill(folder / "filled")
                time.sleep(1.5)  # what is read every second finds it full
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.randn(300_000).sort()  # steps are written in several pieces
    print(how, [os.fstat(file).st_size for file in own].count(0))


main()
