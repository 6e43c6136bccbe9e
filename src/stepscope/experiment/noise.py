"""What makes equal runs differ on this machine: what an experiment may change without rights, and what it cannot.

`plan` is `--quiet-machine`: cores for training alone, thread counts, seeds, the collector. Nothing outside the runs is
touched; governor, turbo and other people's load are told, never set. `of_outcome` is `--self`: the smallest effect that
the machine shows, from runs that are equal. Unknown is said as unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from stepscope.comparison import estimates
from stepscope.comparison.outcomes import MEAN
from stepscope.model.comparison import Outcome
from stepscope.model.experiment import Noise
from stepscope.record.host.hardware import (
    affinity,
    find_cgroups,
    format_cpu_list,
    governor,
    gpu_facts,
    read_text,
    sibling_groups,
    smt_active,
    turbo,
)
from stepscope.schema import Knob

# With fewer cores, one left to the recorder would take more from the training than the recorder does.
LEAST_CORES_TO_LEAVE_ONE = 4
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
STEADY_GOVERNOR = "performance"
BUSY = 0.25  # load beside the experiment, in processes for each core, from which others disturb it
UNKNOWN = "unknown"

Said = tuple[str, str]  # (setting, what is known of it)


class QuietPlan(Struct, frozen=True):
    """`knobs` are for every run, baseline included."""

    knobs: tuple[Knob, ...]
    settings: tuple[Said, ...]
    unchanged: tuple[Said, ...]


def plan(
    *,
    seed: int | None,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    allowed: Sequence[int] | None = None,
) -> QuietPlan:
    """What `--quiet-machine` sets on this machine.

    Args:
        seed: of the runs, which the recorder sets.
        environment: of the runs; a variable that is set in it already stays.
        root: prefixes every path read.
        allowed: logical processors the runs may use; those of this process by default.
    """
    given = os.environ if environment is None else environment
    cores = sibling_groups(affinity() if allowed is None else allowed, root)
    knobs: list[Knob] = []
    settings: list[Said] = []
    unchanged: list[Said] = []
    used = cores
    if len(cores) >= LEAST_CORES_TO_LEAVE_ONE:
        # the first core takes most interrupts: leave that one
        used = cores[1:]
        cpus = format_cpu_list(sorted(cpu for core in used for cpu in core))
        knobs.append(Knob("cpu.affinity", cpus))
        left = format_cpu_list(cores[0])
        settings.append(
            (
                "cores",
                f"training on {len(used)} of {len(cores)} cores (processors {cpus}), {left} left",
            )
        )
    else:
        few = "1 core" if len(cores) == 1 else f"{len(cores)} cores"
        unchanged.append(("cores", f"{few}: too few to leave one to the recorder, so nothing is pinned"))
    for name in THREAD_VARIABLES:
        if name in given:
            unchanged.append((name, f"is {given[name]} in the environment, which stays"))
        else:
            knobs.append(Knob(f"env:{name}", str(len(used))))
            settings.append(
                (name, f"{len(used)}, one thread a core; the script's own torch.set_num_threads still wins")
            )
    if seed is not None:
        hashes = given.get("PYTHONHASHSEED", str(seed))
        settings.append(("seeds", f"random, numpy and torch seeded with {seed}, PYTHONHASHSEED={hashes}"))
    else:
        unchanged.append(("seeds", "none was given, so the runs draw different numbers"))
    knobs.append(Knob("gc", "freeze"))
    settings.append(("garbage collector", "what exists after warm-up is frozen, so that collections are short"))
    told = (*unchanged, *_load(root, len(cores)), *machine(root))
    return QuietPlan(tuple(knobs), tuple(settings), told)


def machine(root: Path = Path("/"), gpus: Sequence[Mapping[str, Any]] | None = None) -> tuple[Said, ...]:
    """What makes runs differ here and takes rights to change; what is as it should be is left out.

    `gpus` are asked of the driver by default.
    """
    return (*_processors(root), *_gpus(gpu_facts() if gpus is None else gpus))


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> Iterator[Said]:
    for gpu in gpus[:1]:
        text = "follow temperature and power; `nvidia-smi --lock-gpu-clocks` needs rights, and runs whose clock was "
        yield "GPU clocks", f"{text}held down are flagged ({len(gpus)} x {gpu.get('name') or UNKNOWN})"


def _processors(root: Path) -> Iterator[Said]:
    found = governor(root)
    if found is None:
        yield "governor", f"{UNKNOWN}: this machine hides it"
    elif found != STEADY_GOVERNOR:
        yield "governor", f"{found}: the clock follows the load; `cpupower frequency-set -g performance` needs root"
    boost = turbo(root)
    if boost is None:
        yield "turbo", f"{UNKNOWN}: this machine hides it"
    elif boost:
        yield "turbo", "on: the clock depends on temperature and on how many cores work"
    threads = smt_active(root)
    if threads is None:
        yield "hyper-threads", f"{UNKNOWN}: this machine hides it"
    elif threads:
        yield "hyper-threads", "on: what runs on a core's other thread slows it"
    limit = find_cgroups(root).cpu_limit_cores()
    if limit is not None:
        yield "CPU quota", f"{limit:g} cores for all processes of the cgroup: beyond it they are paused"
    stolen = _stolen(root)
    if stolen:
        yield "hypervisor", f"has taken {stolen:.1%} of the processors' time since boot for other machines"
    if read_text(root / "proc/sys/kernel/randomize_va_space") not in (None, "0"):
        yield "address layout", "random in each run, which moves times a little; pairs average it out"


def _load(root: Path, cores: int) -> Iterator[Said]:
    """What ran before the experiment did: later on its own runs are most of the load."""
    words = (read_text(root / "proc/loadavg") or "").split()
    try:
        load = float(words[0])
    except (IndexError, ValueError):
        yield "other load", f"{UNKNOWN}: there is no /proc/loadavg"
        return
    if load >= BUSY * max(1, cores):
        yield "other load", f"{load:g} processes ran or waited in the last minute, on {cores} cores"


def _stolen(root: Path) -> float | None:
    """The share of all processor time since boot that a hypervisor gave to others."""
    line = (read_text(root / "proc/stat") or "").partition("\n")[0].split()
    if len(line) < 9 or line[0] != "cpu" or not all(word.isdigit() for word in line[1:9]):
        return None
    ticks = [int(word) for word in line[1:9]]
    share = ticks[7] / sum(ticks) if sum(ticks) else 0.0
    return share if share >= 0.001 else None


def of_outcome(outcome: Outcome | None, quiet: QuietPlan | None = None, *, root: Path = Path("/")) -> Noise:
    """The smallest effect that pairs of equal runs leave room for; None with too few pairs for an interval."""
    effect = outcome.effects.get(MEAN) if outcome is not None else None
    return Noise(
        smallest_effect=estimates.half_width(effect) if effect is not None else None,
        pairs=effect.pairs if effect is not None else 0,
        settings=quiet.settings if quiet is not None else (),
        unchanged=quiet.unchanged if quiet is not None else machine(root),
    )
