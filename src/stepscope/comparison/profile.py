"""What a comparison keeps of one run or trace: a few mappings, so that tables of many runs need not be held at once.

What differs from run to run by nature (process ids, job numbers, times, host-specific numbering) is left out of the
environment.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from stepscope.analyze.host.hotspots import HotspotOptions
from stepscope.analyze.host.stack_selection import StackSelection
from stepscope.analyze.views.select import Selection
from stepscope.analyze.views.trace_diff import DiffSide
from stepscope.comparison import measure
from stepscope.model import Analysis, DeviceLines, Diagnosis, RunFacts, SourceFiles, StackFacts
from stepscope.model.comparison import Measure
from stepscope.model.sampled import HotspotRow, Hotspots
from stepscope.tables.schema import Tables

NO_STACKS = "no sampled stacks"
OF_A_SPAN = "a span of a trace holds none; compare the whole"
STEP_TIME = "step time"
SEVERAL = "holds traces of several runs, which have no step time in common; name the folder of one"

LOAD = "load average at the start"
MADE = "script makes"
CORES_USED = "CPU cores used"
LONGEST = 400  # characters of a value
MAX_NAMES = 200  # of a side; a run folder of others may hold anything
SHOWN_STEPS = 12  # numbers of profiled steps that are named one by one

_HARDWARE = {
    "cpu_model": "CPU",
    "logical_cores": "logical cores",
    "physical_cores": "physical cores",
    "affinity": "processors allowed",
    "cgroup_cpu_limit": "CPU limit of the cgroup",
    "cgroup_memory_limit_bytes": "memory limit of the cgroup",
    "memory_bytes": "memory in bytes",
}
_NOISE = {"governor": "frequency governor", "turbo": "turbo", "smt": "SMT", "aslr": "address randomisation"}
_GIT = {"commit": "git commit", "branch": "git branch", "dirty": "uncommitted changes"}
_OF_A_RUN = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHINDUCTOR_CACHE_DIR")  # environment variables that say nothing
_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python\d+\.\d+t?)/")


class Thing(Struct, frozen=True):
    """What a row is about. `file` is as it is shown, relative to the run's own folder."""

    name: str
    file: str | None = None
    line: int | None = None


class Amount(Struct, frozen=True):
    """`value` in the rows' unit; `samples` is how many sampled stacks it stands on, None where it was measured."""

    value: float
    samples: float | None = None


Amounts = Mapping[Thing, Amount]


class Readable(Protocol):
    """What is asked of a `stepscope.api.Run`."""

    paths: tuple[Path, ...]
    recorded: bool

    @property
    def folder(self) -> Path: ...
    @property
    def tables(self) -> Tables: ...
    @property
    def analysis(self) -> Analysis: ...
    @property
    def diagnosis(self) -> Diagnosis: ...
    def hotspots(self, options: HotspotOptions | None = None) -> Hotspots: ...
    def diff_side(self, selection: Selection | None = None) -> DiffSide: ...


class Profile(Struct, frozen=True):
    """One run, trace or span.

    `measure` is of the steps that the journal holds, outside windows; `profiled` of the steps in windows or traces.
    `functions` and `lines` are ms per step of the main thread, or shares of samples where no step is known (`shares`).
    `absent` says of a kind of change why this side has none.
    """

    label: str
    side: str  # what all runs of the side are called together
    path: str
    recorded: bool
    started_ns: int | None
    measure: Measure | None
    profiled: Measure | None
    spread: Mapping[str, float]  # percentiles of the steps of `measure`
    profiled_spread: Mapping[str, float]  # of those of `profiled`
    diagnosis: Diagnosis | None  # None of a span
    functions: Amounts
    lines: Amounts
    device_lines: Amounts
    shares: bool
    traced: DiffSide
    utilisation: Mapping[str, float]
    environment: Mapping[str, str]
    windows: Mapping[str, str]
    roots: tuple[str, ...]
    source_files: SourceFiles
    absent: Mapping[str, str]


def profile(run: Readable, label: str, selection: Selection | None = None, *, side: str | None = None) -> Profile:
    """Reads what is compared of `run`, or of the one span of it that `selection` names; `side` is its side's label.

    Raises `UnreadableInputError` where nothing can be read, `UsageError` for a span that there is not.
    """
    traced = run.diff_side(selection)
    # the structure of steps costs most and has no row of its own among changes
    side = label if side is None else side
    traced = msgspec.structs.replace(traced, label=side, tree=None, modules=None)
    path = str(run.paths[0])
    whole = selection is None or (selection.worker is None and selection.span is None)
    facts = run.tables.run
    roots = (facts.cwd, *facts.user_roots)
    empty = Profile(
        label=label,
        side=side,
        path=path,
        recorded=run.recorded,
        started_ns=facts.started_ns,
        measure=None,
        profiled=_profiled(traced, label, path),
        spread={},
        profiled_spread=measure.percentiles_of_traces(traced.overviews),
        diagnosis=None,
        functions={},
        lines={},
        device_lines={},
        shares=False,
        traced=traced,
        utilisation={},
        environment=_device_basis(traced),
        windows=_profiled_steps(traced),
        roots=tuple(root for root in roots if root),
        source_files=SourceFiles(),
        absent={**dict.fromkeys(("function", "line", "finding"), OF_A_SPAN), **_several(traced)},
    )
    return empty if not whole else _with_run(empty, run)


def _with_run(found: Profile, run: Readable) -> Profile:
    """With what only a whole run or all its traces tell."""
    analysis, tables = run.analysis, run.tables
    name = relative_to(found.roots)
    absent = _several(found.traced)
    sampled: Hotspots | None = None
    if tables.stacks.is_empty():
        absent["function"] = NO_STACKS
    else:
        sampled = run.hotspots(HotspotOptions(selection=StackSelection(process="main")))
    steps = None  # traces of others have none but those under the profiler
    if run.recorded:
        steps = measure.measure(tables, analysis, label=found.label, path=found.path)
    own, shares = _functions(sampled, analysis.stacks, name)
    hot = _user_lines(sampled, analysis.stacks, name)
    device = _device_lines(analysis.device_lines, name)
    if not hot and not device:
        absent["line"] = f"{NO_STACKS}, and no device time by line" if sampled is None else "no line of your own code"
    return msgspec.structs.replace(
        found,
        started_ns=analysis.run.started_ns,
        measure=steps,
        spread=measure.percentiles(tables) if steps is not None else {},
        diagnosis=run.diagnosis,
        functions=own,
        lines=hot,
        device_lines=device,
        shares=shares,
        utilisation=_utilisation(analysis),
        environment={**_environment(analysis, tables.manifests), **found.environment},
        windows={**_measured_steps(analysis, steps), **found.windows},
        source_files=analysis.source_files,
        absent=absent,
    )


def _profiled(traced: DiffSide, label: str, path: str) -> Measure | None:
    """The steps of traces; None where they mark none, or are of several runs, which have no step time in common."""
    marked = [one for one in traced.overviews if one.has_steps]
    return measure.of_overviews(marked, label=label, path=path) if marked and not _several(traced) else None


def _several(traced: DiffSide) -> dict[str, str]:
    """Why there is no step time, where the traces are of several runs."""
    runs = {one.span.run for one in traced.overviews if one.has_steps}
    return {STEP_TIME: SEVERAL} if len(runs) > 1 else {}


def absent_of(profiles: Sequence[Profile], kind: str) -> str | None:
    """Why the runs of a side have no `kind`, where that is so of all of them."""
    reasons = [one.absent.get(kind) for one in profiles]
    known = [reason for reason in reasons if reason is not None]
    return known[0] if known and len(known) == len(reasons) else None


def relative_to(roots: Sequence[str]) -> Callable[[str], str]:
    """Makes the name of a file below one of `roots`, or of an installed library, the same on any machine."""
    known = sorted({root.rstrip("/") + "/" for root in roots if root.strip("/")}, key=len, reverse=True)

    def name(file: str) -> str:
        installed = _INSTALLED.sub("", file)
        if installed != file:
            return installed
        return next((file[len(root) :] for root in known if file.startswith(root)), file)

    return name


def merged(items: Iterable[tuple[Thing, Amount]]) -> dict[Thing, Amount]:
    """Amounts of equal things added up."""
    found: dict[Thing, Amount] = {}
    for thing, amount in items:
        before = found.get(thing)
        if before is not None:
            samples = None if amount.samples is None else amount.samples + (before.samples or 0)
            amount = Amount(before.value + amount.value, samples)
        found[thing] = amount
    return found


def _functions(sampled: Hotspots | None, stacks: StackFacts | None, name: Callable[[str], str]) -> tuple[Amounts, bool]:
    """By the innermost function. The second value says that they are percent of the samples, as no step is known."""
    if sampled is None:
        return {}, False
    shares = sampled.mean_step_ms is None
    found = merged(
        (Thing(row.name, name(row.path or "") or None), amount)
        for row, amount in _weighted(sampled, stacks)
        if row.name is not None
    )
    return found, shares


def _user_lines(sampled: Hotspots | None, stacks: StackFacts | None, name: Callable[[str], str]) -> Amounts:
    """By the innermost line of the user's own code, with all that it calls in libraries."""
    if sampled is None:
        return {}
    return merged(
        (Thing(row.library_function_name, name(row.library_function_path), row.library_function_line), amount)
        for row, amount in _weighted(sampled, stacks)
        if row.library_function_name is not None and row.library_function_path is not None
    )


def _weighted(sampled: Hotspots, stacks: StackFacts | None) -> Iterator[tuple[HotspotRow, Amount]]:
    """Each row with its time, and the samples in steady steps that this stands on."""
    if sampled.mean_step_ms is None:
        for row in sampled.rows:
            yield row, Amount(row.proportion * 100, row.samples)
        return
    steady = stacks.steady_samples if stacks is not None else 0
    for row in sampled.rows:
        if row.ms_per_step:
            # a sample of a steady step is worth the mean step over all of them
            count = row.ms_per_step * steady / sampled.mean_step_ms if steady else row.samples
            yield row, Amount(row.ms_per_step, max(1.0, count))


def _device_lines(view: DeviceLines | None, name: Callable[[str], str]) -> Amounts:
    """Device time a step by the line that caused it; of a trace without a device there is none."""
    if view is None or view.basis != "device":
        return {}
    return merged(
        (Thing(line.place.function or "", name(line.place.file), line.place.line), Amount(line.ms_per_step))
        for line in view.lines
        if line.ms_per_step is not None
    )


def _utilisation(analysis: Analysis) -> dict[str, float]:
    """How much of the machine was in use, by name; only what was measured. Means over the devices of the run."""
    found: dict[str, float] = {}
    gpus = [gpu for span in (analysis.views.spans if analysis.views is not None else ()) for gpu in span.gpus]
    for name, field in (("GPU utilisation", "utilization_pct"), ("SM efficiency", "sm_efficiency_pct")):
        values = [value for gpu in gpus if (value := getattr(gpu, field)) is not None]
        if values:
            found[name] = math.fsum(values) / len(values)
    cpu = analysis.machine.cpu if analysis.machine is not None else None
    if cpu is not None:
        found[CORES_USED] = cpu.own_cores
    return found


def _environment(analysis: Analysis, manifests: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What the run was made with: command, knobs, versions, hardware, settings; only what is known."""
    found: dict[str, Any] = {"command": shlex.join(analysis.run.command) or None}
    trial = analysis.trial
    if trial is not None:
        found |= {f"knob {item.knob}": item.value for item in trial.knobs if item.applied}
        found["seed"] = trial.seed
    found |= _loader_arguments(analysis)
    found |= {f"{name} version": version for name, version in analysis.run.versions.items()}
    found |= _machine(analysis.run)
    found["kind of device"] = ", ".join(analysis.devices) or None
    cpu = analysis.machine.cpu if analysis.machine is not None else None
    found["threads of torch"] = cpu.threads if cpu is not None else None
    for manifest in list(manifests)[:1]:
        found |= _variables(manifest.get("environment"))
    found |= _sites(analysis)
    return {name: text for name, value in list(found.items())[:MAX_NAMES] if (text := _text(value)) is not None}


def _device_basis(side: DiffSide) -> dict[str, str]:
    """What the traces say of their devices."""
    return {"basis of the traces": ", ".join(bases)} if (bases := sorted({one.basis for one in side.overviews})) else {}


def _loader_arguments(analysis: Analysis) -> dict[str, Any]:
    loader = analysis.loader
    if loader is None:
        return {}
    named = {f"DataLoader {name}": value for name, value in loader.arguments.items() if name != "dataset"}
    return {**named, "DataLoader num_workers": loader.num_workers, "DataLoader batch_size": loader.batch_size}


def _machine(run: RunFacts) -> dict[str, Any]:
    found: dict[str, Any] = {"host": ", ".join(run.hosts) or None, "world size": run.world_size}
    found |= {label: run.hardware.get(key) for key, label in _HARDWARE.items()}
    gpus = run.hardware.get("gpus")
    found["GPUs"] = ", ".join(_gpu(gpu) for gpu in gpus) if isinstance(gpus, list) and gpus else None
    found |= {label: run.noise.get(key) for key, label in _NOISE.items()}
    found[LOAD] = run.noise.get("load_1m")
    found |= {label: (run.git or {}).get(key) for key, label in _GIT.items()}
    return found


def _gpu(gpu: object) -> str:
    return str(gpu.get("name") or "unknown") if isinstance(gpu, Mapping) else str(gpu)


def _variables(values: object) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        return {}
    return {f"${name}": value for name, value in values.items() if str(name) not in _OF_A_RUN}


def _sites(analysis: Analysis) -> dict[str, Any]:
    """What the script constructed, with its arguments: the optimizer, DDP, the gradient scaler; not the loader."""
    found: dict[str, Any] = {}
    for site in analysis.sites:
        if "loader" not in site.what.lower():
            found[f"{MADE} {site.what}"] = "yes"
            for name, value in sorted(site.arguments.items()):
                found.setdefault(f"{site.what} {name}", value)
    return found


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (list, tuple, Mapping)):
        return str(value)[:LONGEST]
    try:
        return json.dumps(value, sort_keys=True, default=str)[:LONGEST]
    except (RecursionError, TypeError, ValueError):
        return None  # no recorder of ours nests that deep


def _measured_steps(analysis: Analysis, measure: Measure | None) -> dict[str, str]:
    """Of the journal: steps measured and left out, windows, sampled stacks."""
    found: dict[str, str] = {}
    if measure is not None:
        found["measured steps"] = str(measure.steps)
        found["warm-up steps left out"] = str(measure.dropped)
        if measure.signal:
            found["steps cut by"] = measure.signal
    steps = analysis.steps[0] if analysis.steps else None
    if steps is not None and measure is not None:
        found["steps in windows, left out"] = str(steps.excluded.get("window", 0))
    if analysis.stacks is not None:
        found["sampled stacks"] = f"{analysis.stacks.source}, {analysis.stacks.rate_hz:g} Hz"
    return found


def _profiled_steps(side: DiffSide) -> dict[str, str]:
    """Of the traces: which steps were profiled, and whether they hold work of a device."""
    steps = [step.step for one in side.overviews if one.has_steps for step in one.steps]
    if not side.overviews:
        return {}
    found = {"traces hold": ", ".join(sorted({one.basis for one in side.overviews}))}
    if len({one.span for one in side.overviews}) > 1:
        found["traces"] = str(len({one.span for one in side.overviews}))
    named = ", ".join(steps[:SHOWN_STEPS]) + (" …" if len(steps) > SHOWN_STEPS else "")
    found["profiled steps"] = f"{len(steps)} ({named})" if steps else "none marked"
    dropped = sum(one.dropped_steps for one in side.overviews)
    if dropped:
        found["profiled steps left out, cut at the end"] = str(dropped)
    return found
