"""Which samples each step was trained on, as long as there is room: `batches.jsonl` in the folder of the process.

What samplers gave is remembered anyway (`Batches`). Twice a second, and before it would be forgotten, the new lists are
written together as packed numbers, and runs of steps with the numbers of the batches that they used. A line holds
`uses`: [first step, iterator, its first batch, batches of each step, steps], and `lists`, by iterator: `first` (batch),
`sizes` (of each, or of all), `code` (of `array`) and `indices` (little-endian, base64), or a `reason` for none.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from base64 import b64encode
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any

from stepscope.record.agent.batches import Kept
from stepscope.record.agent.journal import LineFile

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.segments import StepRow

NAME = "batches"
FILE = "batches.jsonl"
BYTE_LIMIT = 8 << 20  # of a process: 24,000 to 48,000 steps of 64 samples; alarms have their own indices
EVERY_NS = 500_000_000
STEPS_AT_ONCE = 128  # of short steps 256 may end at once, and the batches of 512 are remembered
CODES = "HIq"  # two, four and eight bytes


class BatchLog:
    """Writes what `agent.batches` and `agent.steps` remember."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._file: LineFile | None = None
        self._due_ns = 0
        self._step = 0  # the batches of steps before it are written
        self._next: dict[int, int] = {}  # by iterator: lists before this batch are written
        self._code = CODES[0]
        agent.add_boundary_hook(self._at_boundary, NAME)
        self.finish = agent.guard.wrap(NAME, self._write, inject=False)

    def _at_boundary(self, row: StepRow | None, now_ns: int) -> None:
        if now_ns >= self._due_ns or (row is not None and row.step - self._step >= STEPS_AT_ONCE):
            self._due_ns = now_ns + EVERY_NS
            self._write()

    def _write(self) -> None:
        folder = self._agent.journal.folder
        if folder is None or (self._file is not None and self._file.full):
            return
        if self._file is None:
            self._file = LineFile(os.path.join(folder, FILE), BYTE_LIMIT)
        runs: list[list[int]] = []
        kept = self._agent.batches.kept
        for step, iterator, number, batches, steps in self._agent.steps.uses_since(self._step):
            self._step = step + steps
            if iterator not in kept:
                continue
            first = number + kept[iterator].seen_from
            if runs and runs[-1][1] == iterator and runs[-1][3] == batches:
                start, _, start_first, _, before = runs[-1]
                if step == start + before and first == start_first + before * batches:
                    runs[-1][4] += steps
                    continue
            runs.append([step, iterator, first, batches, steps])
        if not runs:
            return
        lists = [found for number in {run[1] for run in runs} for found in self._new(number, kept[number])]
        self._next = {number: at for number, at in self._next.items() if number in kept}
        self._file.write(json.dumps({"uses": runs, "lists": lists}, separators=(",", ":")))
        if self._file.full:
            self._agent.journal.write("budget", step=None, file=FILE, bytes=BYTE_LIMIT)

    def _new(self, number: int, kept: Kept) -> list[dict[str, Any]]:
        """What the sampler gave since the last time."""
        count = min(kept.next - self._next.get(number, 0), len(kept.lists))
        if count <= 0 and (kept.reason is None or number in self._next):
            return []
        self._next[number] = kept.next
        about = {"iterator": number, "loader": kept.loader, "epoch": kept.epoch, "first": kept.next - count}
        lists = [given for _, given in list(kept.lists)[-count:]]
        if kept.reason is None and lists[0].__class__ not in (list, tuple):
            lists = [(given,) for given in lists]
        if kept.reason is None and lists[0] and isinstance(lists[0][0], Integral):  # a sampler's are alike
            packed = self._packed(lists)
            if packed is not None:
                sizes = [*map(len, lists)]
                same = sizes[0] if min(sizes) == max(sizes) else sizes
                return [{**about, "sizes": same, "code": packed.typecode, "indices": b64encode(packed).decode()}]
        return [{**about, "reason": kept.reason or kept.told(kept.next - 1)[2]}]

    def _packed(self, lists: list[Any]) -> array[int] | None:
        for code in CODES[CODES.index(self._code) :]:
            try:
                packed = array(code, chain.from_iterable(lists))
            except OverflowError:
                continue
            except TypeError:
                break
            self._code = code
            if sys.byteorder == "big":
                packed.byteswap()
            return packed
        return None
