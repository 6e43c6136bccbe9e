"""Trains 60 steps; half-way it takes away what recorders write with. Its own files are told on standard output."""

import os
import resource
import sys
import time
from pathlib import Path

import stub_torch

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
    own = []
    for step in stub_torch.steps(STEPS, 0.02):  # so that they are written in several pieces
        if step == STEPS // 2:
            if how == "descriptors":
                os.closerange(3, 256)
                own = [os.open(folder / f"own-{number}", os.O_WRONLY | os.O_CREAT) for number in range(40)]
            elif how == "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            elif how == "disk":
                while not (beside := list(folder.glob("run/host-*/system.jsonl"))):
                    time.sleep(0.05)
                fill(folder / "filled")
                while beside[0].stat().st_size % resource.getpagesize():  # the last page is filled every second
                    time.sleep(0.1)
    print(how, [os.fstat(file).st_size for file in own].count(0))


main()
