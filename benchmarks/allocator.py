#!/usr/bin/env python
"""Does recording leave the memory allocator as it found it? Page faults and steps: plain, without and with a window.

    python benchmarks/allocator.py              # five idle minutes; writes its section of RESULTS.md
    python benchmarks/allocator.py --rounds 2   # to see that it runs

The network is one whose time depends on how often glibc gives memory back and gets it anew. Each process counts its
own page faults and times its own steps; the arms take turns, their order another one each round.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median, stdev

from results import RESULTS, machine, put_between_markers

WARMUP = 20  # steps, a window's among them
RECORD = [sys.executable, "-m", "stepscope", "run", "--quiet", "--no-report"]
ARMS = {"plain": None, "recorded, no window": ["--no-window"], "recorded, with a window": []}


def train(steps: int) -> None:
    """Print [mean milliseconds, mean minor faults] of the steps after the warm-up."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = nn.Sequential(
        *(nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
    walls, faults = [], []
    for _ in range(steps):
        begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        walls.append(1e3 * (time.perf_counter() - begun))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(json.dumps([mean(walls[WARMUP:]), mean(faults[WARMUP:])]))


def measured(arm: str, steps: int) -> tuple[float, float]:
    """(milliseconds, minor faults) per step of one process."""
    command = [sys.executable, __file__, "--train", str(steps)]
    options = ARMS[arm]
    with tempfile.TemporaryDirectory() as folder:
        line = command if options is None else [*RECORD, *options, "--out", str(Path(folder, "run")), "--", *command]
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    wall_ms, faults = json.loads(done.stdout)
    return wall_ms, faults


def table(found: dict[str, list[tuple[float, float]]]) -> list[str]:
    """A line for each arm, with the difference of its mean step to the plain one's and that difference's error."""
    lines = [
        "| arm | ms a step, mean | median | scatter | to plain | faults a step | scatter |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = [wall for wall, _ in found["plain"]]
    for arm, pairs in found.items():
        walls, faults = [wall for wall, _ in pairs], [count for _, count in pairs]
        apart = [wall / other - 1 for wall, other in zip(walls, plain, strict=True)]
        error = stdev(apart) / len(apart) ** 0.5
        versus = "–" if arm == "plain" else f"{mean(walls) / mean(plain) - 1:+.1%} ± {error:.1%}"
        lines.append(
            f"| {arm} | {mean(walls):.1f} | {median(walls):.1f} | {stdev(walls):.1f} | {versus} "
            f"| {mean(faults):,.0f} | {stdev(faults):,.0f} |"
        )
    return lines


def main() -> None:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="processes of each arm (10)")
    parser.add_argument("--steps", type=int, default=140, help=f"steps of each, the first {WARMUP} left out (140)")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return
    about = [f"- {key}: {value}" for key, value in machine("torch").items()]
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    order = random.Random(0)
    for number in range(options.rounds):
        for arm in order.sample(list(ARMS), len(ARMS)):
            found[arm].append(measured(arm, options.steps))
        print(f"  round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    made = f"Made with `python benchmarks/allocator.py`: {options.rounds} processes of {options.steps} steps each."
    lines = [made, "", *about, "", *table(found)]
    print("\n".join(lines))
    put_between_markers(RESULTS, "allocator", "\n".join(lines))


if __name__ == "__main__":
    main()
