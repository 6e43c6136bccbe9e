"""What the runs of the sides were made with: command, knobs, versions, hardware, settings. Texts, nothing judged.

What differs from run to run by nature (process ids, job numbers, times, host-specific numbering) is left out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepscope.analyze.views.diff import DiffSide
from stepscope.comparison import thresholds
from stepscope.comparison.changes.rows import CHANGED, GONE, NEW
from stepscope.model import Analysis, RunFacts
from stepscope.model.comparison import Change

LOAD = "load average at the start"
MADE = "script makes"
LONGEST = 400  # characters of a value
MAX_NAMES = 200  # of a side; a run folder of others may hold anything
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
_PRESENCE = (MADE, "knob ", "$")  # of these, being there is what differs
_OF_A_RUN = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHINDUCTOR_CACHE_DIR")  # environment variables that say nothing


def of_run(analysis: Analysis, manifests: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By name; only what is known."""
    found: dict[str, Any] = {"command": shlex.join(analysis.run.command) or None}
    trial = analysis.trial
    if trial is not None:
        found |= {f"knob {item.knob}": item.value for item in trial.knobs if item.applied}
        found["seed"] = trial.seed
    found |= _loader(analysis)
    found |= {f"{name} version": version for name, version in analysis.run.versions.items()}
    found |= _machine(analysis.run)
    found["kind of device"] = ", ".join(analysis.devices) or None
    cpu = analysis.machine.cpu if analysis.machine is not None else None
    found["threads of torch"] = cpu.threads if cpu is not None else None
    for manifest in list(manifests)[:1]:
        found |= _variables(manifest.get("environment"))
    found |= _sites(analysis)
    return {name: text for name, value in list(found.items())[:MAX_NAMES] if (text := _text(value)) is not None}


def of_devices(side: DiffSide) -> dict[str, str]:
    """What the traces say of their devices."""
    return {"basis of the traces": ", ".join(bases)} if (bases := sorted({one.basis for one in side.overviews})) else {}


def changes(baseline: Sequence[Mapping[str, str]], candidate: Sequence[Mapping[str, str]]) -> list[Change]:
    """What differs between the sides, in the order of the report. A value that varies within a side names them all."""
    found = []
    for name in dict.fromkeys(name for side in (*baseline, *candidate) for name in side):
        before, after = (_together(side, name) for side in (baseline, candidate))
        if before == after or (name == LOAD and _is_near(before, after)):
            continue
        if (before is None or after is None) and not name.startswith(_PRESENCE):
            continue  # not known is no difference
        status = NEW if before is None else GONE if after is None else CHANGED
        found.append(Change("environment", name, before, after, None, "", status))
    return found


def _loader(analysis: Analysis) -> dict[str, Any]:
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


def _together(side: Sequence[Mapping[str, str]], name: str) -> str | None:
    known = sorted({run[name] for run in side if name in run})
    return ", ".join(known)[:LONGEST] if known else None


def _is_near(before: str | None, after: str | None) -> bool:
    sides = [_numbers(text) for text in (before, after)]
    if not all(sides):
        return False
    means = [sum(side) / len(side) for side in sides]
    return abs(means[0] - means[1]) < thresholds.LOAD_FLOOR


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        return []
