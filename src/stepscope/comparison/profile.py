"""What a comparison keeps of one run or trace: a few mappings, so that tables of many runs need not be held at once.

What differs from run to run by nature (process ids, job numbers, times, host-specific numbering) is left out of the
environment.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, field

from stepscope.analyze.host.hotspots import HotspotOptions, StackSelection
from stepscope.analyze.views.select import Selection
from stepscope.analyze.views.trace_diff import DiffSide
from stepscope.comparison.measure import measure, of_overviews, percentiles
from stepscope.comparison.measured_steps import select
from stepscope.engine.user_code import INSTALLED
from stepscope.model import Analysis, Diagnosis, SourceFiles
from stepscope.model.comparison import Measure
from stepscope.model.sampled import HotspotRow, Hotspots

if TYPE_CHECKING:
    from stepscope.api import Run

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


class Steps(Struct, frozen=True):
    measure: Measure
    spread: Mapping[str, float]


class Profile(Struct, frozen=True, kw_only=True):
    """One run, trace or span.

    `measured` are the steps that the journal holds, outside windows; `profiled` those in windows or traces.
    `functions` and `lines` are ms per step of the main thread, or shares of samples where no step is known (`shares`).
    `absent` says of a kind of change why this side has none.
    """

    label: str
    side: str  # what all runs of the side are called together
    path: str
    recorded: bool
    traced: DiffSide
    started_ns: int | None = None
    measured: Steps | None = None
    profiled: Steps | None = None
    diagnosis: Diagnosis | None = None  # None of a span
    functions: Amounts = field(default_factory=dict)
    lines: Amounts = field(default_factory=dict)
    device_lines: Amounts = field(default_factory=dict)
    shares: bool = False
    utilisation: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[str, str] = field(default_factory=dict)
    roots: tuple[str, ...] = ()
    source_files: SourceFiles = field(default_factory=SourceFiles)
    absent: Mapping[str, str] = field(default_factory=dict)


def profile(run: Run, label: str, selection: Selection | None = None, *, side: str | None = None) -> Profile:
    """Reads what is compared of `run`, or of the one span of it that `selection` names; `side` is its side's label.

    Raises `UnreadableInputError` where nothing can be read, `UsageError` for a span that there is not.
    """
    side = label if side is None else side
    # the structure of steps costs most and has no row of its own among changes
    traced = msgspec.structs.replace(run.diff_side(selection), label=side, tree=None, modules=None)
    path, facts = str(run.paths[0]), run.tables.run
    marked = [one for one in traced.overviews if one.has_steps]
    several = {STEP_TIME: SEVERAL} if len({one.span.run for one in marked}) > 1 else {}
    profiled: Steps | None = None
    if marked and not several:
        walls = [step.wall_ns for one in marked for step in one.steps]
        profiled = Steps(of_overviews(marked, label=label, path=path), percentiles(walls))
    found = Profile(
        label=label,
        side=side,
        path=path,
        recorded=run.recorded,
        traced=traced,
        started_ns=facts.started_ns,
        profiled=profiled,
        environment=_bases("basis of the traces", traced),
        windows=_profiled_steps(traced),
        roots=tuple(root for root in (facts.cwd, *facts.user_roots) if root),
        absent={**dict.fromkeys(("function", "line", "finding"), OF_A_SPAN), **several},
    )
    if selection is not None and (selection.worker is not None or selection.span is not None):
        return found
    return _with_run(found, run, several)


def _with_run(found: Profile, run: Run, absent: dict[str, str]) -> Profile:
    """With what only a whole run or all its traces tell."""
    analysis, tables = run.analysis, run.tables
    name = relative_to(found.roots)
    sampled: Hotspots | None = None
    if tables.stacks.is_empty():
        absent["function"] = NO_STACKS
    else:
        sampled = run.hotspots(HotspotOptions(selection=StackSelection(process="main")))
    steady = analysis.stacks.steady_samples if analysis.stacks is not None else 0
    weighted = list(_weighted(sampled, steady)) if sampled is not None else []
    # by the innermost line of the user's own code, with all that it calls in libraries
    lines = merged(
        (Thing(row.library_function_name, name(row.library_function_path), row.library_function_line), amount)
        for row, amount in weighted
        if row.library_function_name is not None and row.library_function_path is not None
    )
    view = analysis.device_lines
    device_lines = merged(
        (Thing(line.place.function or "", name(line.place.file), line.place.line), Amount(line.ms_per_step))
        for line in (view.lines if view is not None and view.basis == "device" else ())
        if line.ms_per_step is not None
    )
    if not lines and not device_lines:
        absent["line"] = f"{NO_STACKS}, and no device time by line" if sampled is None else "no line of your own code"
    steps: Steps | None = None  # traces of others have none but those under the profiler
    selected = select(tables) if run.recorded else None
    own = measure(tables, analysis, label=found.label, path=found.path) if selected is not None else None
    if selected is not None and own is not None:
        steps = Steps(own, percentiles(selected.together()["wall_ns"].to_list()))
    return msgspec.structs.replace(
        found,
        started_ns=analysis.run.started_ns,
        measured=steps,
        diagnosis=run.diagnosis,
        functions=merged(
            (Thing(row.name, name(row.path or "") or None), amount) for row, amount in weighted if row.name is not None
        ),
        lines=lines,
        device_lines=device_lines,
        shares=sampled is not None and sampled.mean_step_ms is None,
        utilisation=_utilisation(analysis),
        environment={**_environment(analysis, tables.manifests), **found.environment},
        windows={**_measured_steps(analysis, own), **found.windows},
        source_files=analysis.source_files,
        absent=absent,
    )


def relative_to(roots: Sequence[str]) -> Callable[[str], str]:
    """Makes the name of a file below one of `roots`, or of an installed library, the same on any machine."""
    known = sorted({root.rstrip("/") + "/" for root in roots if root.strip("/")}, key=len, reverse=True)

    def name(file: str) -> str:
        installed = INSTALLED.sub("", file)
        if installed != file:
            return installed
        return next((file[len(root) :] for root in known if file.startswith(root)), file)

    return name


def merged(items: Iterable[tuple[Thing, Amount]]) -> dict[Thing, Amount]:
    found: dict[Thing, Amount] = {}
    for thing, amount in items:
        before = found.get(thing)
        if before is not None:
            samples = None if amount.samples is None else amount.samples + (before.samples or 0)
            amount = Amount(before.value + amount.value, samples)
        found[thing] = amount
    return found


def _weighted(sampled: Hotspots, steady: int) -> Iterator[tuple[HotspotRow, Amount]]:
    """Each row with its time, or its percent of the samples where no step is known, and the samples it stands on."""
    for row in sampled.rows:
        if sampled.mean_step_ms is None:
            yield row, Amount(row.proportion * 100, row.samples)
        elif row.ms_per_step:
            # a sample of a steady step is worth the mean step over all of them
            count = row.ms_per_step * steady / sampled.mean_step_ms if steady else row.samples
            yield row, Amount(row.ms_per_step, max(1.0, count))


def _utilisation(analysis: Analysis) -> dict[str, float]:
    """How much of the machine was in use, by name; only what was measured. Means over the devices of the run."""
    gpus = [gpu for span in (analysis.views.spans if analysis.views is not None else ()) for gpu in span.gpus]
    known: dict[str, Sequence[float | None]] = {
        "GPU utilisation": [gpu.utilization_pct for gpu in gpus],
        "SM efficiency": [gpu.sm_efficiency_pct for gpu in gpus],
        CORES_USED: [analysis.machine.cpu.own_cores] if analysis.machine and analysis.machine.cpu else [],
    }
    found = {name: [value for value in values if value is not None] for name, values in known.items()}
    return {name: fmean(values) for name, values in found.items() if values}


def _environment(analysis: Analysis, manifests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the run was made with: command, knobs, versions, hardware, settings; only what is known."""
    run, trial, loader, cpu = analysis.run, analysis.trial, analysis.loader, analysis.machine.cpu
    gpus = run.hardware.get("gpus") if isinstance(run.hardware.get("gpus"), list) else None
    names = [gpu.get("name") or "unknown" if isinstance(gpu, Mapping) else gpu for gpu in gpus or ()]
    variables = manifests[0].get("environment") if manifests else None
    given = {name: value for name, value in loader.arguments.items() if name != "dataset"} if loader is not None else {}
    if loader is not None:
        given |= {"num_workers": loader.num_workers, "batch_size": loader.batch_size}
    found: dict[str, Any] = {
        "command": shlex.join(run.command) or None,
        **{f"knob {item.knob}": item.value for item in (trial.knobs if trial is not None else ()) if item.applied},
        "seed": trial.seed if trial is not None else None,
        **{f"DataLoader {name}": value for name, value in given.items()},
        **{f"{name} version": version for name, version in run.versions.items()},
        "host": ", ".join(run.hosts) or None,
        "world size": run.world_size,
        **{label: run.hardware.get(key) for key, label in _HARDWARE.items()},
        "GPUs": ", ".join(map(str, names)) or None,
        **{label: run.noise.get(key) for key, label in _NOISE.items()},
        LOAD: run.noise.get("load_1m"),
        **{label: (run.git or {}).get(key) for key, label in _GIT.items()},
        "kind of device": ", ".join(analysis.devices) or None,
        "threads of torch": cpu.threads if cpu is not None else None,
    }
    if isinstance(variables, Mapping):
        found |= {f"${name}": value for name, value in variables.items() if str(name) not in _OF_A_RUN}
    # what the script constructed, with its arguments: the optimizer, DDP, the gradient scaler; not the loader
    made: dict[str, Any] = {}
    for site in analysis.sites:
        if "loader" not in site.what.lower():
            made[f"{MADE} {site.what}"] = "yes"
            for name, value in sorted(site.arguments.items()):
                made.setdefault(f"{site.what} {name}", value)
    found |= made
    return {name: text for name, value in list(found.items())[:MAX_NAMES] if (text := _text(value)) is not None}


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


def _bases(name: str, side: DiffSide) -> dict[str, str]:
    """What the traces say of their devices, under `name`."""
    return {name: ", ".join(sorted({one.basis for one in side.overviews}))} if side.overviews else {}


def _measured_steps(analysis: Analysis, measure: Measure | None) -> dict[str, str]:
    """Of the journal: steps measured and left out, windows, sampled stacks."""
    found: dict[str, object] = {}
    if measure is not None:
        found = {"measured steps": measure.steps, "warm-up steps left out": measure.dropped}
        found |= {"steps cut by": measure.signal} if measure.signal else {}
        if analysis.steps:
            found["steps in windows, left out"] = analysis.steps[0].excluded.get("window", 0)
    if analysis.stacks is not None:
        found["sampled stacks"] = f"{analysis.stacks.source}, {analysis.stacks.rate_hz:g} Hz"
    return {name: str(value) for name, value in found.items()}


def _profiled_steps(side: DiffSide) -> dict[str, str]:
    """Of the traces: which steps were profiled, and whether they hold work of a device."""
    steps = [step.step for one in side.overviews if one.has_steps for step in one.steps]
    spans = len({one.span for one in side.overviews})
    named = ", ".join(steps[:SHOWN_STEPS]) + (" …" if len(steps) > SHOWN_STEPS else "")
    dropped = sum(one.dropped_steps for one in side.overviews)
    found = {
        "traces": str(spans) if spans > 1 else None,
        "profiled steps": f"{len(steps)} ({named})" if steps else "none marked",
        "profiled steps left out, cut at the end": str(dropped) if dropped else None,
    }
    known = {name: text for name, text in found.items() if text is not None}
    return _bases("traces hold", side) | known if side.overviews else {}
