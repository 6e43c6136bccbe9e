"""What the scripts of the zoo share: their arguments, and a watch on their own steps.

A script goes through its loop in `with watch.step(model):` and ends with `watch.report()`, which prints the mean of its
steady steps and writes it as JSON to the file named by ZOO_RESULT. With ZOO_TRACEML set the same block is wrapped the
way TraceML's documentation asks for.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

RESULT = "ZOO_RESULT"
TRACEML = "ZOO_TRACEML"
WARMUP = 0.1  # of the steps, at least five: first batches, allocations, first compilations


def parse(*, steps: int) -> argparse.Namespace:
    """`--steps` (the default is the script's own) and `--fixed`, which leaves out the one cost the script is about."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--fixed", action="store_true")
    return parser.parse_args()


class Watch:
    """Times steps from the end of one to the end of the next, so that the wait for data counts."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._wrapped: Any = None
        self._fetched: Any = None
        if os.environ.get(TRACEML):
            traceml = import_module("traceml_ai")
            traceml.init(mode="auto")
            self._wrapped, self._fetched = traceml.trace_step, traceml.wrap_dataloader_fetch

    def steps(self, count: int) -> Iterable[int]:
        """`range(count)`, for loops without a DataLoader."""
        numbers: Iterable[int] = range(count)
        return numbers if self._fetched is None else self._fetched(numbers)

    @contextmanager
    def step(self, model: object) -> Iterator[None]:
        """One step of training `model`."""
        around: AbstractContextManager[object] = nullcontext() if self._wrapped is None else self._wrapped(model)
        with around:
            yield
        self._ends.append(time.perf_counter())

    def after(self, optimizer: Any) -> None:
        """For a loop that a framework runs: every update of `optimizer` (of torch) ends a step."""
        optimizer.register_step_post_hook(lambda *_: self._ends.append(time.perf_counter()))

    def report(self) -> None:
        """Say the mean of the steady steps; the first rank speaks for all."""
        if os.environ.get("RANK", "0") != "0":
            return
        first = max(5, round(len(self._ends) * WARMUP))
        steady = self._ends[first:]
        mean_ms = (steady[-1] - steady[0]) / (len(steady) - 1) * 1e3
        print(f"{len(self._ends)} steps, {mean_ms:.2f} ms each")
        if os.environ.get(RESULT):
            Path(os.environ[RESULT]).write_text(json.dumps({"mean_ms": mean_ms, "steps": len(steady) - 1}))
