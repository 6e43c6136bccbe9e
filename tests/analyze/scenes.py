"""Small runs with a known loss each, as tables: the tests of the facts and of the rules share them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stepscope.tables.schema import Tables
from tests.builders import MS, PID, T0, make_tables, step_rows

TRAIN = "/home/user/project/train.py"
TORCH = "/venv/lib/python3.11/site-packages/torch"
US = 1000

LOOP_SOURCE = """import torch.nn.functional as F

def token_loss(logits, targets):
    total = 0.0
    for t in range(logits.shape[1]):
        total = total + F.cross_entropy(
            logits[:, t], targets[:, t])
    return total

def train(model, x, y):
    return token_loss(model(x), y)
"""
LOOP_LINE, CALL_LINE = 5, 6


class Trace:
    """Slices of a window written as nested calls; ids follow the order of calls."""

    def __init__(self, process: str = "rank-0", rank: int = 0) -> None:
        self.rows: list[dict[str, Any]] = []
        self._open: list[int] = []
        self._base = {"process": process, "rank": rank}

    def add(
        self,
        name: str,
        start_ns: int,
        duration_ns: int,
        *,
        step: int | None,
        category: str = "python_function",
        **more: Any,
    ) -> int:
        """One slice below those that still run at `start_ns`."""
        while self._open and self._end(self._open[-1]) <= start_ns:
            self._open.pop()
        parent = self._open[-1] if self._open else None
        number = len(self.rows)
        self.rows.append(
            {
                **self._base,
                "name": name,
                "category": category,
                "start_ns": start_ns,
                "duration_ns": duration_ns,
                "self_ns": duration_ns,
                "parent": parent,
                "depth": len(self._open),
                "step": step,
                **more,
            }
        )
        if parent is not None:
            self.rows[parent]["self_ns"] -= duration_ns
        self._open.append(number)
        return number

    def _end(self, number: int) -> int:
        row = self.rows[number]
        return int(row["start_ns"] + row["duration_ns"])


def steps_with_window(count: int = 40, window: Sequence[int] = (10, 11), slower: int = 2) -> list[dict[str, Any]]:
    """Steps of 100 ms (40 forward, 50 backward, 10 optimizer); those of the window take `slower` times as long."""
    rows: list[dict[str, Any]] = []
    clock = T0
    for number in range(count):
        factor = slower if number in window else 1
        rows += step_rows(
            1,
            data_wait_ms=0,
            forward_ms=40 * factor,
            backward_ms=50 * factor,
            optimizer_ms=10 * factor,
            other_ms=0,
            start_ns=clock,
            first_step=number,
            in_window=number in window,
            first_batch=False,
        )
        clock += rows[-1]["wall_ns"]
    return rows


def loop_trace(steps: list[dict[str, Any]], items: int = 256, item_us: int = 200, back_us: int = 250) -> Trace:
    """A user function that calls cross_entropy `items` times per step, with its backward nodes."""
    trace = Trace()
    sequence = 1
    inside = [row for row in steps if row["in_window"]]
    trace.add(
        "train.py(10): train", inside[0]["start_ns"], sum(row["wall_ns"] for row in inside), step=inside[0]["step"]
    )
    for row in inside:
        at, step = row["start_ns"] + MS, row["step"]
        trace.add("train.py(3): token_loss", at, items * item_us * US + 100, step=step)
        first = sequence
        for _ in range(items):
            shapes = json.dumps([[8, items, 96], [], []])
            trace.add("aten::select", at, 5 * US, step=step, category="cpu_op", shapes=shapes, sequence=sequence)
            targets = json.dumps([[8, items], [], []])
            trace.add(
                "aten::select", at + 5 * US, 5 * US, step=step, category="cpu_op", shapes=targets, sequence=sequence
            )
            trace.add("torch/nn/functional.py(3472): cross_entropy", at + 10 * US, (item_us - 20) * US, step=step)
            trace.add("<built-in function cross_entropy_loss>", at + 20 * US, 100 * US, step=step)
            operands = json.dumps([[8, 96], [8]])
            name = "aten::cross_entropy_loss"
            trace.add(name, at + 30 * US, 80 * US, step=step, category="cpu_op", shapes=operands, sequence=sequence)
            at += item_us * US
            sequence += 1
        at = row["start_ns"] + 80 * MS
        trace.add("torch/_tensor.py(500): backward", at, items * back_us * US, step=step)
        for number in reversed(range(first, sequence)):
            node = "autograd::engine::evaluate_function: SelectBackward0"
            trace.add(node, at, back_us * US, step=step, category="cpu_op", sequence=number)
            at += back_us * US
    return trace


def loop_tables(
    *, stacks: bool = True, items: int = 256, samples: Sequence[dict[str, Any]] = (), **more: Any
) -> Tables:
    """A run whose forward pass loops over the tokens: 51 of 80 ms forward and 64 of 100 ms backward in the window."""
    steps = steps_with_window()
    rows = []
    if stacks:
        base = ["<module> (/home/user/project/train.py:14)", "train (/home/user/project/train.py:11)"]
        loss = f"token_loss ({TRAIN}:{CALL_LINE})"
        rows = [
            stack([*base, loss, f"cross_entropy ({TORCH}/nn/functional.py:3479)"], 60),
            stack([*base, loss], 15),
            stack([*base, f"Tensor.backward ({TORCH}/_tensor.py:600)"], 125, phase="backward"),
            *samples,
        ]
    return make_tables(steps=steps, events=loop_trace(steps, items).rows, stacks=rows, **more)


def stack(frames: list[str], samples: int, **more: Any) -> dict[str, Any]:
    """A stack of the training process's main thread over the whole of a default run."""
    return {"frames": frames, "samples": samples, "start_ns": T0, "end_ns": T0 + 4000 * MS, "phase": "other", **more}


LOADER_FRAMES = [
    f"<module> ({TRAIN}:90)",
    f"train ({TRAIN}:80)",
    f"_BaseDataLoaderIter.__next__ ({TORCH}/utils/data/dataloader.py:733)",
    f"_MapDatasetFetcher.fetch ({TORCH}/utils/data/_utils/fetch.py:52)",
]
WORKER_FRAMES = [
    f"<module> ({TRAIN}:90)",
    f"train ({TRAIN}:80)",
    f"DataLoader.__iter__ ({TORCH}/utils/data/dataloader.py:400)",
    f"_worker_loop ({TORCH}/utils/data/_utils/worker.py:349)",
]
ITEM = f"PngFolder.__getitem__ ({TRAIN}:30)"
AUGMENT = f"augment ({TRAIN}:12)"


def loader_tables(
    *,
    workers: int = 0,
    wait_ms: float = 60,
    compute_ms: float = 40,
    busy: int = 90,
    affinity: int = 4,
    quota: float | None = None,
    count: int = 40,
    iterable: bool = False,
    **more: Any,
) -> Tables:
    """A run that waits for its loader; `busy` of 100 worker samples stand in `__getitem__`."""
    steps = step_rows(count, data_wait_ms=wait_ms, forward_ms=compute_ms, backward_ms=0, optimizer_ms=0, other_ms=0)
    site = {
        "kind": "site",
        "what": "DataLoader",
        "arguments": {"batch_size": "64", "num_workers": str(workers)},
        "file": TRAIN,
        "line": 75,
        "function": "main",
    }
    made = {"kind": "loader", "id": 1, "epoch": 0, "num_workers": workers, "batch_size": 64, "time_ns": T0 - MS}
    made["iterable"] = iterable
    pillow = "rotate (/venv/lib/python3.11/site-packages/PIL/Image.py:2400)"
    if workers:
        fetch = f"_MapDatasetFetcher.fetch ({TORCH}/utils/data/_utils/fetch.py:52)"
        own: dict[str, Any] = {"role": "loader_worker", "pid": PID + 50, "phase": None}
        parked = [*WORKER_FRAMES, "poll (/usr/lib/python3.11/multiprocessing/connection.py:257)"]
        stacks = [
            stack([*WORKER_FRAMES, fetch, ITEM, AUGMENT, pillow], busy, **own),
            stack(parked, 100 - busy, waiting=True, **own),
            stack(
                [*LOADER_FRAMES[:3], "poll (/usr/lib/python3.11/selectors.py:1)"], 60, phase="data_wait", waiting=True
            ),
        ]
    else:
        stacks = [
            stack([*LOADER_FRAMES, ITEM, AUGMENT, pillow], 80, phase="data_wait"),
            stack([*LOADER_FRAMES, f"PngFolder.__getitem__ ({TRAIN}:31)"], 40, phase="data_wait"),
        ]
    stacks.append(
        stack([f"train ({TRAIN}:82)", f"Module._call_impl ({TORCH}/nn/modules/module.py:1)"], 80, phase="forward")
    )
    hardware = {"logical_cores": 64, "affinity": list(range(affinity)), "cgroup_cpu_limit": quota}
    return make_tables(steps=steps, stacks=stacks, journal=[site, made], manifests=[{"hardware": hardware}], **more)


def python_tables(*, share: float = 0.5, leaf: str | None = None, **more: Any) -> Tables:
    """A run whose function `clean` (no torch in it) takes `share` of the main thread's samples."""
    steps = steps_with_window()
    trace = Trace()
    for row in steps:
        if row["in_window"]:
            trace.add("train.py(10): train", row["start_ns"], 150 * MS, step=row["step"])
            trace.add("train.py(18): clean", row["start_ns"], 60 * MS, step=row["step"])
            trace.add("train.py(50): forward", row["start_ns"] + 60 * MS, 60 * MS, step=row["step"])
            trace.add("<built-in function linear>", row["start_ns"] + 61 * MS, 58 * MS, step=row["step"])
            trace.add("aten::linear", row["start_ns"] + 61 * MS, 57 * MS, step=row["step"], category="cpu_op")
    hot = round(200 * share)
    frames = [f"<module> ({TRAIN}:90)", f"train ({TRAIN}:11)", f"clean ({TRAIN}:20)"]
    stacks = [
        stack([*frames, leaf] if leaf else frames, hot),
        stack(
            [f"<module> ({TRAIN}:90)", f"train ({TRAIN}:12)", f"Net.forward ({TRAIN}:51)"], 200 - hot, phase="forward"
        ),
    ]
    return make_tables(steps=steps, events=trace.rows, stacks=stacks, **more)
