"""The calls of an operator as a trace recorded them: shapes, strides, types and the values that are no tensors.

A trace is read past the tables, which keep shapes and types alone: strides and values are wanted for one operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.errors import UsageError
from stepscope.export.entry import DECODING_ERRORS
from stepscope.model.views import OperatorRow
from stepscope.read.kineto import RawEvents

PREFIX = "aten::"
SHAPES = 4  # lists of input shapes that are replayed, those that take the most time
LOOKED_AT = 20_000  # calls of the operator; a longer trace repeats itself
NAMED = 5  # operators named to somebody who asked for one that there is not
MAX_ARGUMENTS, MAX_DIMENSIONS, MAX_SIZE = 64, 16, 2**40
_ENTRY = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)
_ARGUMENTS = msgspec.json.Decoder(dict[str, Any])


class Argument(Struct, frozen=True):
    """One recorded argument: `type` as the trace has it, sizes and strides of a tensor, or the text of a value."""

    type: str
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    value: str = ""


class Recorded(Struct, frozen=True):
    """The calls with one list of input shapes; `arguments` of the first of them, or why there are none."""

    row: OperatorRow
    arguments: tuple[Argument, ...] = ()
    layouts: int = 0
    reason: str | None = None


def named(rows: Sequence[OperatorRow], asked: str) -> str:
    """The operator's name in full; raises `UsageError` for one that is not there or none of PyTorch's own."""
    name = asked if "::" in asked else PREFIX + asked
    known = {row.name for row in rows}
    if name not in known and asked not in known:
        ordered = sorted((row for row in rows if row.name.startswith(PREFIX)), key=lambda row: -row.host_self_ns)
        heaviest = list(dict.fromkeys(row.name for row in ordered))[:NAMED]
        there = f"; those that take the most: {', '.join(heaviest)}" if heaviest else ""
        raise UsageError(f"--op {asked}: no such operator in the run's trace{there}")
    if not name.startswith(PREFIX) or name not in known:
        raise UsageError(
            f"--op {asked}: only PyTorch's own operators (aten::…) can be replayed; those of the backward pass, of "
            "libraries and of compiled graphs have no call of their own"
        )
    return name


def calls(rows: Sequence[OperatorRow], traces: Iterable[Path], name: str) -> tuple[list[Recorded], list[str]]:
    """(the calls of `name` by shapes, the longest first; what was left out). `rows` are grouped by shapes.

    Raises `UnreadableInputError` for a trace that cannot be read.
    """
    mine = sorted((row for row in rows if row.name == name), key=_time, reverse=True)
    notes = []
    if len(mine) > SHAPES:
        rest = sum(map(_time, mine[SHAPES:])) / max(1, sum(map(_time, mine)))
        notes.append(f"{len(mine) - SHAPES} more lists of input shapes are left out, {rest:.0%} of its time")
    wanted = {row.shapes for row in mine[:SHAPES] if row.shapes is not None}
    found: dict[str, dict[tuple[Argument, ...] | str, None]] = {shapes: {} for shapes in wanted}
    looked = 0
    for path in traces if wanted else ():
        for shapes, layout in _layouts(path, name):
            looked += 1
            if shapes in found:
                found[shapes].setdefault(layout)
            if looked >= LOOKED_AT:
                break
        if looked >= LOOKED_AT or all(found.values()):  # other ranks call it alike
            break
    made = []
    for row in mine[:SHAPES]:
        layouts = list(found.get(row.shapes or "", ()))
        first = layouts[0] if layouts else "the trace holds no shapes of it; record with record_shapes=True"
        if isinstance(first, str):
            made.append(Recorded(row, reason=first))
        else:
            made.append(Recorded(row, first, len(layouts)))
    return made, notes


def _time(row: OperatorRow) -> int:
    return row.host_total_ns


def _layouts(path: Path, name: str) -> Iterator[tuple[str, tuple[Argument, ...] | str]]:
    """(shapes as the tables spell them, arguments or why there are none) of each call of the operator in a trace."""
    spelled = msgspec.json.encode(name)
    for raw in RawEvents(path):
        if spelled not in raw:
            continue
        try:
            entry = _ENTRY.decode(raw)
            if _TEXT.decode(entry["name"]) != name:
                continue
            given = _ARGUMENTS.decode(entry["args"])
            shapes = msgspec.json.encode(given["Input Dims"]).decode()
        except (*DECODING_ERRORS, KeyError):
            continue
        yield shapes, _arguments(given)


def _arguments(given: dict[str, Any]) -> tuple[Argument, ...] | str:
    sizes, types = given["Input Dims"], given.get("Input type")
    strides, values = given.get("Input Strides"), given.get("Concrete Inputs")
    if not (isinstance(sizes, list) and isinstance(types, list) and len(sizes) == len(types) <= MAX_ARGUMENTS):
        return "the trace does not hold the types of its inputs"
    strides = strides if isinstance(strides, list) and len(strides) == len(sizes) else [None] * len(sizes)
    values = values if isinstance(values, list) and len(values) == len(sizes) else [""] * len(sizes)
    made = []
    for size, kind, stride, value in zip(sizes, types, strides, values, strict=True):
        if not isinstance(kind, str) or not isinstance(size, list):
            return "the trace does not hold the types of its inputs"
        if any(isinstance(each, list) for each in size):
            return "it takes a list of tensors, which is not replayed"
        stride = _contiguous(size) if stride is None or (size and stride == []) else stride
        numbers = (*size, *stride) if isinstance(stride, list) else (-1,)
        if not all(type(each) is int and 0 <= each <= MAX_SIZE for each in numbers) or len(size) != len(stride):
            return "the shapes in the trace are no shapes of a tensor"
        if len(size) > MAX_DIMENSIONS:
            return f"one of its tensors has more than {MAX_DIMENSIONS} dimensions"
        text = value if isinstance(value, str) else ""
        made.append(Argument(kind[:80], tuple(size), tuple(stride), text[:2000]))
    return tuple(made)


def _contiguous(sizes: list[Any]) -> list[int]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size) if type(size) is int else 1
    return strides[::-1]
