"""`batches.jsonl` of a process: the samples that a step was trained on, as the recorder logged them."""

from __future__ import annotations

import binascii
import sys
from array import array
from base64 import b64decode
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.read import jsonl
from stepscope.read.raw import Losses, Row
from stepscope.read.text import integer, string, within

FILE = "batches.jsonl"
CODES = ("H", "I", "q")  # of `array`: two, four and eight bytes
MAX_BATCHES = 10_000  # of a step, or in a line
MAX_USES = 1_000_000  # the recorder's limit on the file leaves no room for more
MAX_STEPS = 2**40


class Uses(NamedTuple):
    """`steps` steps from `step` on used `batches` of an iterator each, one after the other from batch `first` on."""

    step: int
    iterator: int
    first: int
    batches: int
    steps: int


def batches_of(folder: Path, step: int, before: int) -> list[Row]:
    """The batches of `step` and the `before` ones before them, in order of use; empty where they were not logged.

    Each has `step`, `suspect` (it is of `step`) and `batch`, and where its samples were logged `loader`, `epoch`,
    `samples`, `indices` and a `reason` for none. `folder` is that of the process, and as untrusted as all of a run.
    """
    uses = [*islice((use for row in _rows(folder) for use in _uses(row.get("uses"))), MAX_USES)]
    used = _back_from(uses, step)
    own = [*takewhile(lambda entry: entry[0] == step, islice(used, MAX_BATCHES))]
    if not own:
        return []
    wanted = dict.fromkeys(own)
    for entry in islice(_back_from(uses, step), MAX_USES):
        if entry[0] != step and entry[1:] not in {known[1:] for known in wanted}:  # two steps may use one batch
            if len(wanted) >= len(own) + before:
                break
            wanted[entry] = None
    lists: dict[tuple[int, int], Row] = {}
    for row in _rows(folder):
        lists.update(_lists(row.get("lists"), {entry[1:] for entry in wanted}))
    return [
        {"step": at, "suspect": at == step, "batch": number, **lists.get((iterator, number), {})}
        for at, iterator, number in reversed(wanted)
    ]


def _rows(folder: Path) -> Iterator[Row]:
    return (row for row in jsonl.read_values(folder / FILE, Losses(), FILE) if isinstance(row, dict))


def _uses(entries: Any) -> Iterator[Uses]:
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, list) and len(entry) == 5 and all(within(value, MAX_STEPS) is not None for value in entry):
            use = Uses(*entry)
            if 0 < use.batches <= MAX_BATCHES and use.steps > 0:
                yield use


def _back_from(uses: Iterable[Uses], step: int) -> Iterator[tuple[int, int, int]]:
    """(step, iterator, batch) of all steps up to `step`, the last first."""
    for use in sorted(uses, key=lambda use: -use.step):
        for at in range(min(step, use.step + use.steps - 1), use.step - 1, -1):
            last = use.first + (at - use.step + 1) * use.batches - 1
            for number in range(last, last - use.batches, -1):
                yield at, use.iterator, number


def _lists(entries: Any, wanted: set[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Row]]:
    """What a line knows of the wanted (iterator, batch)."""
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        iterator, first, sizes = entry.get("iterator"), integer(entry.get("first")), entry.get("sizes")
        about = {"loader": entry.get("loader"), "epoch": entry.get("epoch")}
        for key in wanted:
            if key[0] != iterator or first is None or key[1] < first:
                continue
            reason = string(entry.get("reason"))
            if reason is not None:
                yield key, {**about, "reason": reason}
                continue
            indices = _unpacked(entry, sizes, key[1] - first)
            if indices is not None:
                yield key, {**about, "indices": indices, "samples": len(indices)}


def _unpacked(entry: Row, sizes: Any, at: int) -> list[int] | None:
    """The indices of the batch at a position of a line; None where it is beyond them, or the line is damaged."""
    known = sizes if isinstance(sizes, list) else [sizes] * min(at + 1, MAX_BATCHES)
    if at >= len(known) or not all(within(size, jsonl.MAX_LINE_BYTES) for size in known[: at + 1]):
        return None
    if entry.get("code") not in CODES:
        return None
    packed: array[int] = array(entry["code"])
    try:
        packed.frombytes(b64decode(string(entry.get("indices")) or "", validate=True))
    except (ValueError, binascii.Error):
        return None
    if sys.byteorder == "big":
        packed.byteswap()
    start = sum(known[:at])
    return packed[start : start + known[at]].tolist() if start + known[at] <= len(packed) else None
