"""Runs cases in processes that may be ended: one that hangs or takes too much memory takes no other with it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

CASE_S = 60.0  # a case takes some tenths of a second; on a busy machine ten times that
START_S = 120.0  # for a process to be ready
MAX_BYTES = 2**30
TOLD_EVERY = 500  # cases


@dataclass
class Outcome:
    """What became of the cases, by word; `bad` are lines on those that must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    seconds: float = 0.0
    most_bytes: int = 0
    slowest_s: float = 0.0

    def text(self) -> str:
        """A table of one line each, then the bad ones."""
        words = ("report", "refused", "traceback", "hang", "memory")
        lines = [f"{word:10} {self.counts[word]:7,}" for word in words]
        lines.append(
            f"in {self.seconds:.0f} s; slowest {self.slowest_s:.1f} s, most memory {self.most_bytes / 2**20:.0f} MiB"
        )
        return "\n".join([*lines, *self.bad])


class _Worker:
    """A process that is given a share of the numbers, and tells of each when it begins and when it is over."""

    def __init__(self, numbers: Sequence[int], folder: Path) -> None:
        self.numbers = list(numbers)
        self._folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.deadline = 0.0
        self.hung = False

    def start(self) -> IO[str]:
        command = [sys.executable, "-m", "tests.fuzz.worker", str(self._folder)]
        environment = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, self.numbers)) + "\n")
        self.process.stdin.close()
        self.deadline = time.monotonic() + START_S
        self.hung = False
        return self.process.stdout

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


def run(
    numbers: Sequence[int], folder: Path, *, workers: int = 2, tell: Callable[[str], object] = lambda _: None
) -> Outcome:
    """Run the cases with these numbers; inputs lie below `folder` while they are read."""
    outcome, began = Outcome(), time.monotonic()
    waiting = [_Worker(numbers[at::workers], folder) for at in range(workers)]
    with selectors.DefaultSelector() as selector:
        for worker in waiting:
            if worker.numbers:
                selector.register(worker.start(), selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select(timeout=1.0):
                worker = key.data
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if line:
                    _take(json.loads(line), worker, outcome, tell)
                else:
                    selector.unregister(key.fileobj)
                    if worker.numbers and not worker.hung:  # it died in the middle of a case
                        _fail(worker, "traceback", f"its process ended with {worker.process.wait()}", outcome)
                    worker.end()
                    if worker.numbers:
                        selector.register(worker.start(), selectors.EVENT_READ, worker)
            for worker in waiting:
                late = worker.process is not None and worker.numbers and time.monotonic() > worker.deadline
                if late and not worker.hung and worker.process is not None:
                    _fail(worker, "hang", f"nothing for {CASE_S:.0f} s", outcome)
                    worker.hung = True  # its end, which follows, is ours
                    worker.process.kill()
    for worker in waiting:
        worker.end()
    outcome.seconds = time.monotonic() - began
    return outcome


def _take(row: dict[str, object], worker: _Worker, outcome: Outcome, tell: Callable[[str], object]) -> None:
    worker.deadline = time.monotonic() + CASE_S
    if "word" not in row:
        return
    worker.numbers.pop(0)
    word, most = str(row["word"]), int(str(row["most_bytes"]))
    outcome.counts[word] += 1
    outcome.most_bytes = max(outcome.most_bytes, most)
    outcome.slowest_s = max(outcome.slowest_s, float(str(row["seconds"])))
    if word == "traceback":
        outcome.bad.append(f"case {row['case']}: {row['text']}")
    if most > MAX_BYTES:
        outcome.counts["memory"] += 1
        outcome.bad.append(f"case {row['case']}: {most / 2**20:.0f} MiB")
    done = sum(outcome.counts.values())
    if done % TOLD_EVERY == 0:
        tell(f"{done:,} cases, {len(outcome.bad)} bad")


def _fail(worker: _Worker, word: str, why: str, outcome: Outcome) -> None:
    outcome.counts[word] += 1
    outcome.bad.append(f"case {worker.numbers.pop(0)}: {word}: {why}")
