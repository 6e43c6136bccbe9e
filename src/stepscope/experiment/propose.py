"""Candidates out of a run's findings: what their `try` lists name, the most promising first.

A finding's gain ceiling bounds what a knob of it can gain, before anything is run: what cannot reach the effect that
matters, or that the experiment can tell, is skipped, as is what this device or the table of knobs does not have. Each
says why. Losses that no knob reaches are handed on, with the line to edit.

Where the findings name nothing to try there are general knobs, which need no finding: threads, a compiled model, the
optimizer's implementation. The phases of the step bound what each can gain: an optimizer that takes 2 % of the step
cannot give more back. What makes the arithmetic coarser is never tried unasked: a hundred losses within a band do not
show that a model ends as good.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.comparison.thresholds import THRESHOLD, WIDTH
from stepscope.diagnose.in_script import FALSE, TRUE
from stepscope.errors import UsageError
from stepscope.experiment.plan import candidate_of
from stepscope.model import Analysis, Diagnosis, Finding, Risk
from stepscope.model.experiment import ByHand, Candidate, Skipped
from stepscope.record.agent import knobs as table
from stepscope.record.host.hardware import affinity, read_text, sibling_groups
from stepscope.schema import Knob

WORKERS = "loader.num_workers"
FAMILY = "loader."  # knobs of one DataLoader, tried together as well
NEED_WORKERS = ("loader.persistent_workers", "loader.prefetch_factor")
# Of one DataLoader's process pool: twice and half of what the finding proposes, as far as there are cores.
NEIGHBOURS = (2.0, 0.5)
CUDA_KNOBS = ("cuda.", "cudnn.", "allocator.", "loader.pin_memory", "env:PYTORCH_CUDA_", "env:CUDA_", "env:NCCL_")
MAX_BY_HAND = 5
# argument of the DataLoader -> knob
LOADER_ARGUMENTS = {name: f"loader.{name}" for name in ("pin_memory", "persistent_workers", "prefetch_factor")}

COMPILERS = ("g++", "c++", "clang++")
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # of x86 and ARM processors
MODEL = ("forward", "backward")
OPTIMIZER = ("optimizer",)
THREADS = "torch.num_threads"


class Loss(Struct, frozen=True):
    """A finding, as far as an experiment is concerned. `ceiling` is a fraction of the mean step, None of a risk."""

    finding: str
    title: str
    fix: str
    ceiling: float | None
    tries: tuple[Knob, ...]
    file: str | None = None
    line: int | None = None
    explains: tuple[str, ...] = ()


class Baseline(Struct, frozen=True):
    """A run that changes are proposed for.

    `settings` are values in force, by knob; `phases` shares of the mean step, by category. A name that is not in
    them is not known. `devices` is empty where no rank told.
    """

    losses: tuple[Loss, ...]
    risks: tuple[Loss, ...] = ()
    devices: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    cores: float | None = None  # that one rank may use

    @property
    def on_cpu(self) -> bool:
        """Whether all ranks are known to have trained on the CPU."""
        return bool(self.devices) and all(device == "cpu" for device in self.devices)


class Proposals(Struct, frozen=True):
    """What to try, in the order in which to try it; what not, and why; and what no knob reaches."""

    candidates: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...] = ()
    by_hand: tuple[ByHand, ...] = ()
    notes: tuple[str, ...] = ()


class Options(Struct, frozen=True):
    """`threshold` and `width` are the protocol's; `general`: knobs that no finding names are proposed
    where the findings name none.

    `root` prefixes the paths of the machine that is asked what it supports.
    """

    threshold: float = THRESHOLD
    width: float = WIDTH
    general: bool = True
    root: Path = Path("/")


def proposals(base: Baseline, named: Sequence[Candidate], *, threshold: float, width: float) -> Proposals:
    """What to try on the run `base`: what the user `named` comes first, then what the findings of a run suggest."""
    found = of_baseline(base, Options(threshold=threshold, width=width, general=not named))
    known = {frozenset(candidate.knobs) for candidate in named}
    more = (candidate for candidate in found.candidates if frozenset(candidate.knobs) not in known)
    return replace(
        found,
        candidates=(*with_ceilings(named, base), *more),
        notes=() if named else found.notes,
    )


def of_baseline(base: Baseline, options: Options | None = None) -> Proposals:
    """Candidates of all findings, and where there are none of the general knobs."""
    options = options or Options()
    found = _Collected(base, options)
    for loss in sorted(base.losses, key=lambda loss: -(loss.ceiling or 0.0)):
        found.add(loss)
    for risk in base.risks:
        for knob in risk.tries:
            found.skip((knob,), f"of a risk without a measured cost: {_short(risk.title)}")
    notes = tuple(_notes(base, found, options))  # now: of the findings' candidates alone
    if options.general and not found.candidates:
        for candidate, reason in _general(base, options.root):
            found.offer(candidate, reason)
    return Proposals(tuple(found.candidates), tuple(found.skipped), found.by_hand(), notes)


def _notes(base: Baseline, found: _Collected, options: Options) -> Iterator[str]:
    if found.candidates:
        return
    tried = "; the general knobs are tried instead" if options.general else ""
    if not base.losses:
        yield f"The diagnosis names no loss worth fixing{tried}."
    elif any(loss.tries for loss in base.losses):
        yield f"No knob that the findings name can be tried here{tried}."
    else:
        yield f"No finding names a knob: what it costs has to be changed in the code{tried}."


class _Collected:
    """Candidates and what was skipped, so far."""

    def __init__(self, base: Baseline, options: Options) -> None:
        self.candidates: list[Candidate] = []
        self.skipped: list[Skipped] = []
        self._base, self._options = base, options
        self._reached: set[str] = set()

    def add(self, loss: Loss) -> None:
        """The candidates of one finding: the set of what belongs together, each knob alone, neighbours."""
        family = _family(loss.tries)
        if family and all(self._reason(knob, family) is None for knob in family):
            self.offer(_candidate(family, loss))
        for knob in loss.tries:
            self.offer(_candidate((knob,), loss), self._reason(knob, (knob,)))
        for knob in loss.tries:
            if knob.knob == WORKERS and self._reason(knob, (knob,)) is None:
                for neighbour in self._neighbours(knob):
                    others = tuple(each for each in family if each.knob != WORKERS)
                    self.offer(_candidate((neighbour, *others), loss))

    def offer(self, candidate: Candidate, reason: str | None = None) -> None:
        """Take a candidate, or note why not."""
        twin = next((each for each in self.candidates if set(each.knobs) == set(candidate.knobs)), None)
        if twin is not None:
            self._reached.add(candidate.finding or "")
            if twin.finding != candidate.finding:
                self.skip(candidate.knobs, f"the same as {twin.name} of {twin.finding or 'the general knobs'}")
            return
        reason = reason or next(filter(None, (self._unusable(knob) for knob in candidate.knobs)), None)
        reason = reason or self._cannot_pay(candidate)
        if reason is not None:
            self.skip(candidate.knobs, reason)
            return
        self._reached.add(candidate.finding or "")
        self.candidates.append(candidate)

    def skip(self, knobs: tuple[Knob, ...], reason: str) -> None:
        """Note why these are not tried, once."""
        skipped = Skipped(candidate_of(knobs).name, knobs, reason)
        if skipped not in self.skipped:
            self.skipped.append(skipped)

    def _reason(self, knob: Knob, together: Sequence[Knob]) -> str | None:
        """Why a knob cannot be tried with those beside it; None if it can."""
        unusable = self._unusable(knob)
        if unusable is not None:
            return unusable
        workers = next((each.value for each in together if each.knob == WORKERS), self._base.settings.get(WORKERS))
        if knob.knob in NEED_WORKERS and workers == "0":
            return "takes loader workers, and the script has none: tried only together with loader.num_workers"
        return None

    def _unusable(self, knob: Knob) -> str | None:
        try:
            table.check(knob)
        except UsageError as error:
            return str(error)
        if self._base.on_cpu and knob.knob.startswith(CUDA_KNOBS):
            return "needs a GPU, and the run trained on the CPU"
        current = self._base.settings.get(knob.knob)
        return f"is {current} already" if current is not None and _same(current, knob.value) else None

    def _cannot_pay(self, candidate: Candidate) -> str | None:
        ceiling, options = candidate.ceiling, self._options
        if ceiling is None or ceiling >= max(options.threshold, options.width):
            return None
        if ceiling < options.threshold:
            return f"{_gains(ceiling)}, less than the {_percent(options.threshold)} that matter"
        return f"{_gains(ceiling)}, less than an interval of {_percent(options.width)} on either side can tell"

    def _neighbours(self, knob: Knob) -> Iterator[Knob]:
        most = max(1, int(self._base.cores)) if self._base.cores is not None else None
        current = self._base.settings.get(WORKERS)
        for factor in NEIGHBOURS:
            count = int(int(knob.value) * factor)
            if count >= 1 and (most is None or count <= most) and str(count) != current:
                yield Knob(WORKERS, str(count))

    def by_hand(self) -> tuple[ByHand, ...]:
        """The findings that no candidate is of and that are worth something, in the order of the diagnosis."""
        below = {name for loss in self._base.losses for name in loss.explains}
        least = self._options.threshold
        found = [
            ByHand(loss.title, loss.fix, loss.file, loss.line, loss.ceiling, loss.finding)
            for loss in self._base.losses
            if loss.finding not in self._reached and loss.finding not in below and (loss.ceiling or 0.0) >= least
        ]
        return tuple(found[:MAX_BY_HAND])


def _family(knobs: Iterable[Knob]) -> tuple[Knob, ...]:
    """The loader's knobs of one finding, where there are several and the number of workers is among them."""
    family = tuple(knob for knob in knobs if knob.knob.startswith(FAMILY))
    return family if len(family) > 1 and any(knob.knob == WORKERS for knob in family) else ()


def _candidate(knobs: tuple[Knob, ...], loss: Loss) -> Candidate:
    return replace(candidate_of(knobs), ceiling=loss.ceiling, finding=loss.finding)


def _general(base: Baseline, root: Path) -> Iterator[tuple[Candidate, str | None]]:
    """(candidate, why it is not tried or None) of knobs that need no finding, in the order in which to try them."""
    found = [*_threads(base, root), _compiled(base), _bfloat16(base, root), *_optimizer(base)]
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


def _bfloat16(base: Baseline, root: Path) -> tuple[Candidate, str | None]:
    reason = "makes the arithmetic coarser, which no finding asks for; ask with --try amp.dtype=bf16"
    if base.on_cpu and _has_bfloat16(root) is False:
        reason = "this processor has no instructions for bfloat16, so that it would be emulated"
    return _one("amp.dtype", "bf16", _share(base, MODEL)), reason


def _optimizer(base: Baseline) -> Iterator[tuple[Candidate, str | None]]:
    ceiling = _share(base, OPTIMIZER)
    yield _one("optimizer.fused", "true", ceiling), None
    if base.on_cpu:  # on a GPU it is the default
        yield _one("optimizer.foreach", "true", ceiling), None


def _has_bfloat16(root: Path) -> bool | None:
    """Whether this machine's processors calculate in bfloat16; None where it does not tell."""
    text = read_text(root / "proc/cpuinfo") or ""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return any(flag in lines[0].split() for flag in BFLOAT16_FLAGS) if lines else None


def with_ceilings(candidates: Iterable[Candidate], base: Baseline) -> tuple[Candidate, ...]:
    """Candidates named by the user, with the ceiling of the finding that names the same knobs, where one does."""
    found = []
    for candidate in candidates:
        names = {knob.knob for knob in candidate.knobs}
        losses = [loss for loss in base.losses if names & {each.knob for each in loss.tries}]
        best = max(losses, key=lambda loss: loss.ceiling or 0.0, default=None)
        if candidate.ceiling is None and best is not None:
            candidate = replace(candidate, ceiling=best.ceiling, finding=best.finding)
        found.append(candidate)
    return tuple(found)


def _gains(ceiling: float) -> str:
    return f"can gain {_percent(ceiling)} of the step at most"


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %"


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"


def baseline_of(analysis: Analysis, diagnosis: Diagnosis) -> Baseline:
    """What proposals need to know of a recorded run, from its facts and findings."""
    loader, settings = analysis.loader, {}
    if loader is not None:
        settings = _settings(loader.num_workers, loader.in_main_process, loader.arguments, loader.threads)
    trial = getattr(analysis, "trial", None)
    for knob in trial.knobs if trial is not None else ():
        if knob.applied:
            settings[knob.knob] = knob.value
    train = next((facts for facts in analysis.steps if facts.kind == "train"), None)
    return Baseline(
        losses=tuple(_loss(finding, finding.gain_ceiling) for finding in diagnosis.findings),
        risks=tuple(_loss(risk, None) for risk in diagnosis.risks),
        devices=analysis.devices,
        settings=settings,
        phases={part.category: part.share for part in train.partition} if train is not None else {},
        cores=loader.cpu_limit / max(1, loader.ranks_on_host) if loader is not None else None,
    )


def _loss(finding: Finding | Risk, ceiling: float | None) -> Loss:
    place = finding.where[0] if finding.where else None
    return Loss(
        finding=finding.id,
        title=finding.title,
        fix=finding.fix,
        ceiling=ceiling,
        tries=tuple(Knob(each.knob, each.value) for each in finding.try_),
        file=place.file if place is not None else None,
        line=place.line if place is not None else None,
        explains=finding.explains,
    )


def _settings(
    workers: int | None, in_main_process: bool, arguments: Mapping[str, Any], threads: int | None
) -> dict[str, str]:
    settings: dict[str, str] = {}
    if workers is not None or in_main_process:
        settings["loader.num_workers"] = str(workers or 0)
    for argument, knob in LOADER_ARGUMENTS.items():
        if argument in arguments:
            settings[knob] = str(arguments[argument])
    if threads is not None:
        settings["torch.num_threads"] = str(threads)
    return settings


def _same(value: str, other: str) -> bool:
    """Whether two values of a knob mean the same."""
    return _plain(value) == _plain(other)


def _plain(value: str) -> str:
    text = value.strip().lower()
    if text in TRUE:
        return "true"
    return "false" if text in FALSE else text
