"""Trains on one core for some seconds of its time, beside processes that it starts on the same core: two of its own,
one of a shell that has ended since.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
from plain_sgd import PlainSGD
from torch import nn

BURN = "for _ in range(1_000_000): sum(range(1000))"  # ends by itself, should nobody end it
LOOP = "i=0; while [ $i -lt 30000000 ]; do i=$((i+1)); done"


def train(seconds: float) -> None:
    model = nn.Linear(64, 64)
    optimizer = PlainSGD(model.parameters(), lr=0.1)
    end = time.process_time() + seconds
    while time.process_time() < end:
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    two = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(2)]
    shell = subprocess.Popen(f"sh -c '{LOOP}' &", shell=True, start_new_session=True)
    shell.wait()
    try:
        train(float(sys.argv[1]))
    finally:
        for child in two:
            child.kill()
            child.wait()
        os.killpg(shell.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
