"""Knobs that need no finding: threads, a compiled model, 16-bit arithmetic, the optimizer's implementation.

They are proposed where the findings name nothing to try, or on request. The phases of the step bound what each can
gain: an optimizer that takes 2 % of the step cannot give more back. What makes the arithmetic coarser is never tried
unasked: a hundred losses within a band do not show that a model ends as good.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from stepscope.experiment.baseline import Baseline
from stepscope.model.experiment import Candidate
from stepscope.record.host.hardware import affinity, read_text, sibling_groups
from stepscope.schema import Knob

COMPILERS = ("g++", "c++", "clang++")
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # of x86 and ARM processors
MODEL = ("forward", "backward")
OPTIMIZER = ("optimizer",)
THREADS = "torch.num_threads"


def candidates(base: Baseline, root: Path = Path("/"), *, asked: bool) -> Iterator[tuple[Candidate, str | None]]:
    """(candidate, why it is not tried or None), in the order in which to try them. `asked`: the user wants them all."""
    found = [*_threads(base, root), _compiled(base), _half(base, root, asked=asked), *_optimizer(base)]
    yield from sorted(found, key=lambda pair: -(pair[0].ceiling if pair[0].ceiling is not None else 1.0))


def _one(knob: str, value: str, ceiling: float | None) -> Candidate:
    return Candidate(f"{knob}={value}", (Knob(knob, value),), ceiling)


def _share(base: Baseline, phases: tuple[str, ...]) -> float | None:
    """The part of the step that lies in these phases; None where the step was not cut into them."""
    if not any(phase in base.phases for phase in phases):
        return None
    return sum(base.phases.get(phase, 0.0) for phase in phases)


def _threads(base: Baseline, root: Path) -> Iterator[tuple[Candidate, str | None]]:
    """One thread, one for each core, one for each processor, as far as they differ from what is set."""
    processors = affinity()
    counts = sorted({1, len(sibling_groups(processors, root)), len(processors)})
    waits = [base.phases[name] for name in ("data_wait", "before_forward") if name in base.phases]
    computing = max(0.0, 1.0 - sum(waits)) if waits else None
    current = base.settings.get(THREADS, "")
    for count in counts:
        ceiling = computing
        if computing is not None and current.isdecimal() and count > int(current) > 0:
            ceiling = computing * (1.0 - int(current) / count)  # all of it, perfectly parallel
        yield _one(THREADS, str(count), ceiling), None


def _compiled(base: Baseline) -> tuple[Candidate, str | None]:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    missing = base.on_cpu and compiler is None
    reason = "needs a C++ compiler on a CPU, and there is none on the path" if missing else None
    return _one("compile", "true", _share(base, MODEL)), reason


def _half(base: Baseline, root: Path, *, asked: bool) -> tuple[Candidate, str | None]:
    reason = None if asked else "makes the arithmetic coarser, which no finding asks for; ask with --try amp.dtype=bf16"
    if base.on_cpu and has_bfloat16(root) is False:
        reason = "this processor has no instructions for bfloat16, so that it would be emulated"
    return _one("amp.dtype", "bf16", _share(base, MODEL)), reason


def _optimizer(base: Baseline) -> Iterator[tuple[Candidate, str | None]]:
    ceiling = _share(base, OPTIMIZER)
    yield _one("optimizer.fused", "true", ceiling), None
    if base.on_cpu:  # on a GPU it is the default
        yield _one("optimizer.foreach", "true", ceiling), None


def has_bfloat16(root: Path = Path("/")) -> bool | None:
    """Whether this machine's processors calculate in bfloat16; None where it does not tell."""
    text = read_text(root / "proc/cpuinfo") or ""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return any(flag in lines[0].split() for flag in BFLOAT16_FLAGS) if lines else None
