"""What to write into the script for each knob, as text, at the user's line where one is known.

A knob is applied from outside; what wins has to be written down by someone. Knobs of one place make one sentence:
`train.py:77: DataLoader(..., num_workers=2, persistent_workers=True)`. Nothing here edits a file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.experiment.baseline import FALSE, TRUE
from stepscope.model.comparison import AppliedKnob, Knob
from stepscope.record.agent.knobs import ARGUMENT_PREFIX, ENVIRONMENT_PREFIX
from stepscope.record.host.command import first_argument
from stepscope.record.host.knobs import with_argument

MAX_PLACES = 3  # named of one knob

Place = tuple[str, "int | None"]


@dataclass(frozen=True)
class Edit:
    """What one knob comes to. `call` is written with `argument` where knobs share a call, else `text` says all."""

    text: Callable[[str], str]
    call: str | None = None
    argument: str | None = None


def literal(value: str) -> str:
    """`value` as Python writes it."""
    text = value.strip()
    if text.lower() in TRUE[:1]:
        return "True"
    if text.lower() in FALSE[:1]:
        return "False"
    try:
        return str(int(text))
    except ValueError:
        return repr(text)


def _of_call(call: str, argument: str) -> Edit:
    return Edit(lambda value: f"{call}(..., {argument}={literal(value)})", call, argument)


def _statement(template: str) -> Edit:
    return Edit(lambda value: template.format(literal(value)))


def _autocast(value: str) -> str:
    kind = {"bf16": "bfloat16", "fp16": "float16"}.get(value)
    if kind is None:
        return "no torch.autocast around the forward pass and the loss"
    text = f"with torch.autocast(DEVICE, dtype=torch.{kind}): around the forward pass and the loss, not around backward"
    return text + ("; scale the loss with torch.amp.GradScaler" if kind == "float16" else "")


def _compile(value: str) -> str:
    if value.lower() in FALSE:
        return "no torch.compile"
    mode = "" if value.lower() in TRUE or value == "default" else f", mode={value!r}"
    return f"model = torch.compile(model{mode}), once the model is on its device"


def _collector(value: str) -> str:
    if value == "freeze":
        return "gc.collect(); gc.freeze() after the first steps"
    if value == "off":
        return "gc.disable() before the loop, and gc.collect() at the end of each epoch"
    return f"gc.set_threshold({value})"


def _taskset(value: str) -> str:
    return f"start the command with: taskset -c {shlex.quote(value)} ..."


def _workers_affinity(value: str) -> str:
    return f"DataLoader(..., worker_init_fn=...) that calls os.sched_setaffinity(0, ...) with processors {value}"


def _allocator(value: str) -> str:
    return f"start the command with PYTORCH_CUDA_ALLOC_CONF={shlex.quote(value)} in its environment"


EDITS: Mapping[str, Edit] = {
    **{
        f"loader.{name}": _of_call("DataLoader", name)
        for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
    },
    **{f"optimizer.{name}": _of_call("torch.optim....", name) for name in ("fused", "foreach")},
    "zero_grad.set_to_none": _of_call("optimizer.zero_grad", "set_to_none"),
    "torch.num_threads": _statement("torch.set_num_threads({}), before the training loop"),
    "torch.num_interop_threads": _statement("torch.set_num_interop_threads({}), before any operator runs"),
    "cpu.affinity": Edit(_taskset),
    "cpu.worker_affinity": Edit(_workers_affinity),
    "amp.dtype": Edit(_autocast),
    "matmul_precision": _statement("torch.set_float32_matmul_precision({}), before the model is made"),
    "memory_format": Edit(
        lambda value: f"model = model.to(memory_format=torch.{value}), and the same for every batch of images"
    ),
    "compile": Edit(_compile),
    "compile.mode": _of_call("torch.compile", "mode"),
    "compile.dynamic": _of_call("torch.compile", "dynamic"),
    "cudnn.benchmark": _statement("torch.backends.cudnn.benchmark = {}"),
    "cudnn.allow_tf32": _statement("torch.backends.cudnn.allow_tf32 = {}"),
    "cuda.linalg_library": _statement("torch.backends.cuda.preferred_linalg_library({})"),
    "gc": Edit(_collector),
    "allocator.conf": Edit(_allocator),
}


def changes(
    knobs: Sequence[Knob],
    applied: Sequence[AppliedKnob] = (),
    *,
    command: Sequence[str] = (),
    cwd: str | None = None,
    places: Mapping[str, Place] | None = None,
    device: str | None = None,
) -> tuple[str, ...]:
    """One sentence for each change, those of one call in one place together, the command line last.

    Args:
        knobs: of the candidate.
        applied: what became of them in its runs; names the user's lines.
        command: of the training, for what is changed on its command line.
        cwd: files below it are shown relative to it.
        places: (file, line) by knob or its family ("loader."), for knobs whose runs did not tell.
        device: kind of device the run trained on, where it is known.
    """
    told: dict[tuple[str, str], list[str]] = {}
    alone: list[str] = []
    for knob in knobs:
        if knob.knob.startswith((ENVIRONMENT_PREFIX, ARGUMENT_PREFIX)):
            continue
        where = _where(knob, applied, places or {}, cwd)
        edit = EDITS.get(knob.knob)
        if edit is not None and edit.call is not None and edit.argument is not None:
            told.setdefault((where, edit.call), []).append(f"{edit.argument}={literal(knob.value)}")
            continue
        text = edit.text(knob.value) if edit is not None else f"set {knob.knob} to {knob.value}"
        alone.append(_at(where, text.replace("DEVICE", repr(device) if device is not None else "device_type")))
    merged = [_at(where, f"{call}(..., {', '.join(arguments)})") for (where, call), arguments in told.items()]
    line = command_line(knobs, command, cwd)
    return (*merged, *alone, *((f"start it with: {line}",) if line is not None else ()))


def command_line(knobs: Sequence[Knob], command: Sequence[str], cwd: str | None = None) -> str | None:
    """The training's command with what `env:` and `arg:` knobs change in it, as a shell takes it; None if nothing."""
    variables = [
        f"{knob.knob[len(ENVIRONMENT_PREFIX) :]}={shlex.quote(knob.value)}"
        for knob in knobs
        if knob.knob.startswith(ENVIRONMENT_PREFIX)
    ]
    arguments = [knob for knob in knobs if knob.knob.startswith(ARGUMENT_PREFIX)]
    if not variables and not arguments:
        return None
    words = tuple(command) or ("COMMAND",)
    start = first_argument(words, os.environ, Path(cwd or os.curdir))
    rest = words[start:]
    for knob in arguments:
        rest = with_argument(rest, knob.knob[len(ARGUMENT_PREFIX) :], knob.value)
    return " ".join([*variables, shlex.join((*words[:start], *rest))])


def _where(knob: Knob, applied: Sequence[AppliedKnob], places: Mapping[str, Place], cwd: str | None) -> str:
    """The user's lines that the knob stands for, "" where none is known."""
    lines = [
        (each.file, each.line) for each in applied if each.knob == knob.knob and each.applied and each.file is not None
    ]
    if not lines:
        known = places.get(knob.knob) or next(
            (place for name, place in places.items() if name.endswith(".") and knob.knob.startswith(name)), None
        )
        lines = [known] if known is not None else []
    shown = list(dict.fromkeys(_shown(file, line, cwd) for file, line in lines))
    return ", ".join(shown[:MAX_PLACES])


def _shown(file: str, line: int | None, cwd: str | None) -> str:
    inside = cwd is not None and file.startswith(cwd.rstrip(os.sep) + os.sep)
    name = os.path.relpath(file, cwd) if inside and cwd is not None else file
    return name if line is None else f"{name}:{line}"


def _at(where: str, text: str) -> str:
    return f"{where}: {text}" if where else text
