"""One operator alone: its calls as a trace recorded them, run by `worker.py` in a Python with torch, and its figures.

A trace is read past the tables, which keep shapes and types alone: strides and values are wanted for one operator. The
interpreter is never one that only the run folder names: a folder may come from anybody.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import comb, prod
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.errors import EnvironmentRefusal, UsageError
from stepscope.export.entry import DECODING_ERRORS
from stepscope.model.replay import OperatorReplay, ReplayedCall, ReplayedStep, ReplayTimes, Variant
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
    mine = sorted((row for row in rows if row.name == name), key=lambda row: row.host_total_ns, reverse=True)
    notes = []
    if len(mine) > SHAPES:
        times = [row.host_total_ns for row in mine]
        rest = sum(times[SHAPES:]) / max(1, sum(times))
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
        if stride is None or (size and stride == []):  # contiguous
            lengths = [max(1, each) if type(each) is int else 1 for each in size]
            stride = [prod(lengths[at + 1 :]) for at in range(len(lengths))]
        numbers = (*size, *stride) if isinstance(stride, list) else (-1,)
        if not all(type(each) is int and 0 <= each <= MAX_SIZE for each in numbers) or len(size) != len(stride):
            return "the shapes in the trace are no shapes of a tensor"
        if len(size) > MAX_DIMENSIONS:
            return f"one of its tensors has more than {MAX_DIMENSIONS} dimensions"
        text = value if isinstance(value, str) else ""
        made.append(Argument(kind[:80], tuple(size), tuple(stride), text[:2000]))
    return tuple(made)


WORKER = Path(__file__).with_name("worker.py")
MAX_BYTES = 4 * 2**30  # of the inputs and the outputs of a call
START_S = 120.0  # torch's import, a cold CUDA context, and making inputs; beside the seconds that are asked for
MAX_ANSWER_BYTES = 16 * 2**20
OUTSIDE = 0.05  # of the median's interval: the part of all intervals that may miss it


class Task(Struct, frozen=True):
    """What is measured."""

    operator: str
    variants: tuple[Variant, ...]
    seconds: float
    trained_with: str | None = None  # version of torch


def interpreter(asked: str | None, recorded: str | None, environ: Mapping[str, str]) -> str:
    """The Python to replay with: the one `asked` for, else this one or the shell's, whichever has torch.

    The one the run was `recorded` with comes first where it is one of these. Raises `EnvironmentRefusal`.
    """
    if asked is not None:
        found = shutil.which(asked, path=environ.get("PATH"))
        if found is None:
            raise EnvironmentRefusal(f"--python {asked}: no such program; name the Python that has torch")
        return found
    here = [sys.executable] if importlib.util.find_spec("torch") is not None else []
    known = here + [path for name in ("python", "python3") if (path := shutil.which(name, path=environ.get("PATH")))]
    if recorded is not None:
        # one program of one environment: a link of an environment is not the program it leads to
        known.sort(key=lambda path: os.path.abspath(path) != os.path.abspath(recorded))
    for path in known:
        if path in here or _has_torch(path):
            return path
    which = f", e.g. --python {recorded}, with which it was recorded" if recorded else ""
    raise EnvironmentRefusal(f"no Python here has torch; name the training's with --python{which}")


def _has_torch(python: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def replay(task: Task, recorded: Sequence[Recorded], python: str, notes: Sequence[str] = ()) -> OperatorReplay:
    """Measure the calls `recorded`; what could not be says why. Raises `EnvironmentRefusal` without torch."""
    asked = [call for call in recorded if call.reason is None]
    answers = _answers(task, asked, python) if asked else []
    said: dict[str, Any] = {}
    reasons: dict[tuple[int, int | None], str] = {}
    rounds: dict[tuple[int, int | None], list[float]] = defaultdict(list)
    for answer in answers:
        key = (answer.get("call", -1), answer.get("variant"))
        if "problem" in answer:
            raise EnvironmentRefusal(f"{python}: {answer['problem']}; name another with --python")
        if "reason" in answer:
            reasons[key] = answer["reason"]
        elif "seconds" in answer:
            rounds[key].append(answer["seconds"] * 1e9)
        elif "torch" in answer:
            said = answer
    numbers = {id(call): number for number, call in enumerate(asked)}
    made = []
    for call in recorded:
        number, row = numbers.get(id(call), -1), call.row
        reason = call.reason or reasons.get((number, None))
        times = [] if reason else [
            _times(variant, call, rounds.get((number, index), []), reasons.get((number, index)))
            for index, variant in enumerate(task.variants)
        ]  # fmt: skip
        first = next((each.per_call_ns for each in times if each.per_call_ns), None)
        ratios = [each.per_call_ns / first if each.per_call_ns is not None and first else None for each in times]
        times = [msgspec.structs.replace(each, ratio=ratio) for each, ratio in zip(times, ratios, strict=True)]
        tensors = (each.type for each in call.arguments if each.sizes or each.type not in ("", "Scalar", "ScalarList"))
        mean = row.host_total_ns / row.calls if row.calls else None
        made.append(
            ReplayedCall(
                row.shapes or "", ", ".join(tensors), row.calls_per_step, mean, call.layouts, tuple(times), reason
            )
        )
    steps = []  # of each variant in which every call of a step was timed
    for index, variant in enumerate(task.variants):
        of_calls = [call.times[index].per_step_ns if call.times else None for call in made]
        if of_calls and None not in of_calls:
            steps.append(ReplayedStep(variant, sum(time for time in of_calls if time is not None)))
    version, trained = said.get("torch"), task.trained_with
    if version is not None and trained not in (None, version):
        notes = [
            *notes, f"replayed with torch {version}, trained with torch {trained}; --python names another Python"
        ]  # fmt: skip
    place = max(recorded, key=lambda call: call.row.host_total_ns).row.place if recorded else None
    gpus = tuple(said.get("gpus", ()))
    return OperatorReplay(task.operator, place, tuple(made), tuple(steps), version, gpus, tuple(notes))


def _times(variant: Variant, call: Recorded, rounds: list[float], reason: str | None) -> ReplayTimes:
    if not rounds:
        return ReplayTimes(variant, reason=reason or "the process ended before it was timed")
    median = statistics.median(rounds)
    low, high = interval(rounds)
    per_step = median * call.row.calls_per_step if call.row.calls_per_step is not None else None
    return ReplayTimes(variant, median, low, high, per_step, len(rounds), reason=reason)


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The median's 95 % interval by order statistics (exact for any distribution); (None, None) below six values."""
    ordered, count = sorted(values), len(values)
    below, rank = 0.0, -1
    for position in range(count // 2):
        below += comb(count, position) / 2**count
        if 2 * below > OUTSIDE:
            break
        rank = position
    return (ordered[rank], ordered[count - 1 - rank]) if rank >= 0 else (None, None)


def _answers(task: Task, asked: Sequence[Recorded], python: str) -> list[dict[str, Any]]:
    """The lines that the worker wrote, with what ended it where it was not done."""
    wanted = {
        "operator": task.operator.removeprefix(PREFIX),
        "variants": [msgspec.to_builtins(variant) for variant in task.variants],
        "calls": [{"arguments": msgspec.to_builtins(call.arguments)} for call in asked],
        "seconds": task.seconds,
        "max_bytes": MAX_BYTES,
    }
    # without the working directory, whose files would shadow the standard library's, and without the user's start-up
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONSTARTUP", "STEPSCOPE_RECORD")}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                [python, str(WORKER)],
                input=msgspec.json.encode(wanted), stdout=output, stderr=errors, env=environ,
                timeout=task.seconds + START_S, check=False,
            )  # fmt: skip
            why = None if done.returncode == 0 else _ended(done.returncode, errors)
        except subprocess.TimeoutExpired:
            why = f"it took longer than {task.seconds + START_S:.0f} s"
        except OSError as error:
            raise EnvironmentRefusal(
                f"{python} could not be started ({error.strerror}); name one with --python"
            ) from None
        output.seek(0)
        lines = output.read(MAX_ANSWER_BYTES).splitlines()
    answers = []
    for line in lines:
        try:
            answers.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.MsgspecError:
            continue
    if why is not None:
        if not answers:
            raise EnvironmentRefusal(f"{python} could not replay anything ({why})")
        known = {(answer.get("call"), answer.get("variant")) for answer in answers}
        refused = {answer["call"] for answer in answers if "reason" in answer and "variant" not in answer}
        answers += [  # of each variant of which nothing is known
            {"call": call, "variant": variant, "reason": f"the process ended: {why}"}
            for call in range(len(asked))
            for variant in range(len(task.variants))
            if call not in refused and (call, variant) not in known
        ]
    return answers


def _ended(status: int, errors: Any) -> str:
    errors.seek(0)
    last = errors.read(MAX_ANSWER_BYTES).decode("utf-8", "replace").strip().splitlines()
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return f"{how}; {last[-1][:200]}" if last else how
