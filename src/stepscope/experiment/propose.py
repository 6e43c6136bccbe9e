"""Candidates out of a run's findings: what their `try` lists name, the most promising first.

A finding's gain ceiling bounds what a knob of it can gain, before anything is run: what cannot reach the effect that
matters, or that the experiment can tell, is skipped with the reason. Where the findings name nothing to try there are
general knobs; the phases of the step bound what each can gain. What makes the arithmetic coarser is never tried
unasked: a hundred losses within a band do not show that a model ends as good.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.comparison.thresholds import Limits
from stepscope.diagnose.in_script import FALSE, TRUE
from stepscope.errors import UsageError
from stepscope.experiment.plan import candidate_of
from stepscope.model import Analysis, Diagnosis, Finding, Risk
from stepscope.model.comparison import ByHand, Candidate, Skipped
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
THREADS = "torch.num_threads"


class Baseline(Struct, frozen=True):
    """A run that changes are proposed for.

    `settings` are values in force, by knob; `phases` shares of the mean step, by category. A name that is not in
    them is not known. `devices` is empty where no rank told.
    """

    losses: tuple[Finding, ...]
    risks: tuple[Risk, ...] = ()
    devices: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    cores: float | None = None  # that one rank may use

    @property
    def on_cpu(self) -> bool:
        return bool(self.devices) and all(device == "cpu" for device in self.devices)


class Proposals(Struct, frozen=True):
    """What to try, in the order in which to try it; what not, and why; and what no knob reaches."""

    candidates: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...] = ()
    by_hand: tuple[ByHand, ...] = ()
    notes: tuple[str, ...] = ()


def proposals(
    base: Baseline, named: Sequence[Candidate] = (), limits: Limits | None = None, *, root: Path = Path("/")
) -> Proposals:
    """What to try on the run `base`: what the user `named`, then candidates of all findings; where there are neither,
    the general knobs.

    What is named gets the ceiling of the finding that names the same knobs, where one does. `root` prefixes the paths
    of the machine that is asked what it supports.
    """
    found = _Collected(base, limits or Limits())
    for loss in sorted(base.losses, key=lambda loss: -loss.gain_ceiling):
        found.add(loss)
    for risk in base.risks:
        title = risk.title if len(risk.title) <= 80 else risk.title[:79] + "…"
        for knob in _tries(risk):
            found.skip((knob,), f"of a risk without a measured cost: {title}")
    notes: tuple[str, ...] = ()
    if not found.candidates and not named:
        why = "No finding names a knob: what it costs has to be changed in the code"
        if any(loss.try_ for loss in base.losses):
            why = "No knob that the findings name can be tried here"
        why = why if base.losses else "The diagnosis names no loss worth fixing"
        notes = (f"{why}; the general knobs are tried instead.",)
        by_ceiling = sorted(_general(base, root), key=lambda one: -(1.0 if one[0].ceiling is None else one[0].ceiling))
        for candidate, reason in by_ceiling:
            found.offer(candidate, reason)
    ours = []
    for candidate in named:
        names = {knob.knob for knob in candidate.knobs}
        losses = [loss for loss in base.losses if names & {each.knob for each in loss.try_}]
        best = max(losses, key=lambda loss: loss.gain_ceiling, default=None)
        ours.append(candidate if best is None else replace(candidate, ceiling=best.gain_ceiling, finding=best.id))
    known = {frozenset(candidate.knobs) for candidate in named}
    more = (candidate for candidate in found.candidates if frozenset(candidate.knobs) not in known)
    return Proposals((*ours, *more), tuple(found.skipped), found.by_hand(), notes)


def _tries(of: Finding | Risk) -> tuple[Knob, ...]:
    return tuple(Knob(each.knob, each.value) for each in of.try_)


class _Collected:
    def __init__(self, base: Baseline, limits: Limits) -> None:
        self.candidates: list[Candidate] = []
        self.skipped: list[Skipped] = []
        self._base, self._limits = base, limits
        self._reached: set[str] = set()

    def add(self, loss: Finding) -> None:
        """The candidates of one finding: the set of what belongs together, each knob alone, neighbours."""
        tries = _tries(loss)
        # the loader's knobs, where there are several and the number of workers is among them
        family = tuple(knob for knob in tries if knob.knob.startswith(FAMILY))
        if len(family) < 2 or WORKERS not in {knob.knob for knob in family}:
            family = ()

        def candidate(*knobs: Knob) -> Candidate:
            return replace(candidate_of(knobs), ceiling=loss.gain_ceiling, finding=loss.id)

        if family and not any(self._unusable(knob, family) for knob in family):
            self.offer(candidate(*family))
        for knob in tries:
            self.offer(candidate(knob))
        most = math.inf if self._base.cores is None else max(1, int(self._base.cores))
        for knob in tries:
            if knob.knob != WORKERS or self._unusable(knob, (knob,)):
                continue
            for count in (int(int(knob.value) * factor) for factor in NEIGHBOURS):
                if 1 <= count <= most and str(count) != self._base.settings.get(WORKERS):
                    rest = (each for each in family if each.knob != WORKERS)
                    self.offer(candidate(Knob(WORKERS, str(count)), *rest))

    def offer(self, candidate: Candidate, reason: str | None = None) -> None:
        twin = next((each for each in self.candidates if set(each.knobs) == set(candidate.knobs)), None)
        if twin is not None:
            self._reached.add(candidate.finding or "")
            if twin.finding != candidate.finding:
                self.skip(candidate.knobs, f"the same as {twin.name} of {twin.finding or 'the general knobs'}")
            return
        unusable = filter(None, (self._unusable(knob, candidate.knobs) for knob in candidate.knobs))
        reason = reason or next(unusable, None) or self._cannot_pay(candidate)
        if reason is not None:
            self.skip(candidate.knobs, reason)
            return
        self._reached.add(candidate.finding or "")
        self.candidates.append(candidate)

    def skip(self, knobs: tuple[Knob, ...], reason: str) -> None:
        skipped = Skipped(candidate_of(knobs).name, knobs, reason)
        if skipped not in self.skipped:
            self.skipped.append(skipped)

    def _unusable(self, knob: Knob, together: Sequence[Knob]) -> str | None:
        """Why a knob cannot be tried with those beside it; None if it can."""
        try:
            table.check(knob)
        except UsageError as error:
            return str(error)
        if self._base.on_cpu and knob.knob.startswith(CUDA_KNOBS):
            return "needs a GPU, and the run trained on the CPU"
        current = self._base.settings.get(knob.knob)
        if current is not None and _plain(current) == _plain(knob.value):
            return f"is {current} already"
        workers = next((each.value for each in together if each.knob == WORKERS), self._base.settings.get(WORKERS))
        if knob.knob in NEED_WORKERS and workers == "0":
            return "takes loader workers, and the script has none: tried only together with loader.num_workers"
        return None

    def _cannot_pay(self, candidate: Candidate) -> str | None:
        ceiling, threshold, width = candidate.ceiling, self._limits.threshold, self._limits.width
        if ceiling is None or ceiling >= max(threshold, width):
            return None
        why = f"an interval of {_percent(width)} on either side can tell"
        if ceiling < threshold:
            why = f"the {_percent(threshold)} that matter"
        return f"can gain {_percent(ceiling)} of the step at most, less than {why}"

    def by_hand(self) -> tuple[ByHand, ...]:
        """The findings that no candidate is of and that are worth something, in the order of the diagnosis."""
        below = {name for loss in self._base.losses for name in loss.explains}
        found = []
        for loss in self._base.losses:
            if loss.id not in self._reached | below and loss.gain_ceiling >= self._limits.threshold:
                file, line = (loss.where[0].file, loss.where[0].line) if loss.where else (None, None)
                found.append(ByHand(loss.title, loss.fix, file, line, loss.gain_ceiling, loss.id))
        return tuple(found[:MAX_BY_HAND])


def _general(base: Baseline, root: Path) -> Iterator[tuple[Candidate, str | None]]:
    """(candidate, why it is not tried or None) of knobs that need no finding.

    What each can gain is the part of the step that lies in its phases, None where the step was not cut into them.
    """

    def one(knob: str, value: str, *phases: str, ceiling: float | None = None) -> Candidate:
        known = [base.phases[phase] for phase in phases if phase in base.phases]
        return Candidate(f"{knob}={value}", (Knob(knob, value),), sum(known) if known else ceiling)

    # one thread, one for each core, one for each processor, as far as they differ from what is set
    processors = affinity()
    waits = [base.phases[name] for name in ("data_wait", "before_forward") if name in base.phases]
    computing = max(0.0, 1.0 - sum(waits)) if waits else None
    current = base.settings.get(THREADS, "")
    for count in sorted({1, len(sibling_groups(processors, root)), len(processors)}):
        ceiling = computing
        if computing is not None and current.isdecimal() and count > int(current) > 0:
            ceiling = computing * (1.0 - int(current) / count)  # all of it, perfectly parallel
        yield one(THREADS, str(count), ceiling=ceiling), None
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    missing = base.on_cpu and compiler is None
    reason = "needs a C++ compiler on a CPU, and there is none on the path" if missing else None
    yield one("compile", "true", "forward", "backward"), reason
    reason = "makes the arithmetic coarser, which no finding asks for; ask with --try amp.dtype=bf16"
    flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", read_text(root / "proc/cpuinfo") or "", re.MULTILINE)
    if base.on_cpu and flags and not set(BFLOAT16_FLAGS) & set(flags[0].split()):
        reason = "this processor has no instructions for bfloat16, so that it would be emulated"
    yield one("amp.dtype", "bf16", "forward", "backward"), reason
    yield one("optimizer.fused", "true", "optimizer"), None
    if base.on_cpu:  # on a GPU it is the default
        yield one("optimizer.foreach", "true", "optimizer"), None


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %"


def _plain(value: str) -> str:
    """Equal for values of a knob that mean the same."""
    text = value.strip().lower()
    return "true" if text in TRUE else "false" if text in FALSE else text


def baseline_of(analysis: Analysis, diagnosis: Diagnosis) -> Baseline:
    """What proposals need to know of a recorded run, from its facts and findings."""
    loader, trial, settings = analysis.loader, analysis.trial, dict[str, str]()
    if loader is not None:
        if loader.num_workers is not None or loader.in_main_process:
            settings[WORKERS] = str(loader.num_workers or 0)
        for argument, knob in LOADER_ARGUMENTS.items():
            if argument in loader.arguments:
                settings[knob] = str(loader.arguments[argument])
        if loader.threads is not None:
            settings[THREADS] = str(loader.threads)
    settings |= {knob.knob: knob.value for knob in (trial.knobs if trial is not None else ()) if knob.applied}
    train = next((facts for facts in analysis.steps if facts.kind == "train"), None)
    return Baseline(
        losses=diagnosis.findings,
        risks=diagnosis.risks,
        devices=analysis.devices,
        settings=settings,
        phases={part.category: part.share for part in train.partition} if train is not None else {},
        cores=loader.cpu_limit / max(1, loader.ranks_on_host) if loader is not None else None,
    )
