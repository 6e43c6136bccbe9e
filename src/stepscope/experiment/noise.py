"""What makes equal runs differ on this machine: what an experiment may change without rights, and what it cannot.

`plan` is `--quiet-machine`: cores for training alone, thread counts, seeds, the collector. Nothing outside the runs is
touched; governor, turbo and other people's load are told, never set. `of_equal_runs` is `--self`: the smallest effect
that the machine shows, from runs that are equal. Unknown is said as unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from stepscope.comparison.outcomes import MEAN
from stepscope.comparison.verdicts import half_width
from stepscope.model.comparison import Noise, Outcome
from stepscope.record.agent.knobs import cpu_text
from stepscope.record.host import hardware
from stepscope.schema import Knob

# With fewer cores, one left to the recorder would take more from the training than the recorder does.
LEAST_CORES_TO_LEAVE_ONE = 4
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
STEADY_GOVERNOR = "performance"
BUSY = 0.25  # load beside the experiment, in processes for each core, from which others disturb it
UNKNOWN = "unknown"

Said = tuple[str, str]  # (setting, what is known of it)


def plan(
    *,
    seed: int,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    allowed: Sequence[int] | None = None,
) -> tuple[tuple[Knob, ...], Noise]:
    """What `--quiet-machine` sets on this machine: knobs for every run, baseline included, and what is said of it.

    Args:
        seed: of the runs, which the recorder sets.
        environment: of the runs; a variable that is set in it already stays.
        root: prefixes every path read.
        allowed: logical processors the runs may use; those of this process by default.
    """
    given = os.environ if environment is None else environment
    cores = hardware.sibling_groups(hardware.affinity() if allowed is None else allowed, root)
    knobs: list[Knob] = []
    settings: list[Said] = []
    unchanged: list[Said] = []
    used = cores
    if len(cores) >= LEAST_CORES_TO_LEAVE_ONE:
        # the first core takes most interrupts: leave that one
        used = cores[1:]
        cpus = cpu_text(cpu for core in used for cpu in core)
        knobs.append(Knob("cpu.affinity", cpus))
        left = cpu_text(cores[0])
        settings.append(("cores", f"training on {len(used)} of {len(cores)} cores (processors {cpus}), {left} left"))
    else:
        few = "1 core" if len(cores) == 1 else f"{len(cores)} cores"
        unchanged.append(("cores", f"{few}: too few to leave one to the recorder, so nothing is pinned"))
    for name in THREAD_VARIABLES:
        if name in given:
            unchanged.append((name, f"is {given[name]} in the environment, which stays"))
            continue
        knobs.append(Knob(f"env:{name}", str(len(used))))
        settings.append((name, f"{len(used)}, one thread a core; the script's own torch.set_num_threads still wins"))
    hashes = given.get("PYTHONHASHSEED", str(seed))
    settings.append(("seeds", f"random, numpy and torch seeded with {seed}, PYTHONHASHSEED={hashes}"))
    knobs.append(Knob("gc", "freeze"))
    settings.append(("garbage collector", "what exists after warm-up is frozen, so that collections are short"))
    told = (*unchanged, *_load(root, len(cores)), *machine(root))
    return tuple(knobs), Noise(None, 0, tuple(settings), told)


def of_equal_runs(outcome: Outcome | None, known: Noise | None, root: Path = Path("/")) -> Noise:
    """The smallest effect that pairs of equal runs leave room for; None with too few pairs for an interval."""
    known = Noise(None, 0, unchanged=machine(root)) if known is None else known
    effect = outcome.effects.get(MEAN) if outcome is not None else None
    return known if effect is None else replace(known, smallest_effect=half_width(effect), pairs=effect.pairs)


def machine(root: Path = Path("/"), gpus: Sequence[Mapping[str, Any]] | None = None) -> tuple[Said, ...]:
    """What makes runs differ here and takes rights to change; what is as it should be is left out.

    `gpus` are asked of the driver by default.
    """
    if gpus is None:
        with hardware.Gpus() as driver:
            gpus = driver.describe()
    if not gpus:
        return tuple(_processors(root))
    text = "follow temperature and power; `nvidia-smi --lock-gpu-clocks` needs rights, and runs whose clock was "
    text += f"held down are flagged ({len(gpus)} x {gpus[0].get('name') or UNKNOWN})"
    return (*_processors(root), ("GPU clocks", text))


def _processors(root: Path) -> Iterator[Said]:
    found = hardware.governor(root)
    follows = None if found is None else found != STEADY_GOVERNOR
    follow = f"{found}: the clock follows the load; `cpupower frequency-set -g performance` needs root"
    switches = (
        ("governor", follows, follow),
        ("turbo", hardware.turbo(root), "on: the clock depends on temperature and on how many cores work"),
        ("hyper-threads", hardware.smt_active(root), "on: what runs on a core's other thread slows it"),
    )
    for name, on, text in switches:
        if on is None:
            yield name, f"{UNKNOWN}: this machine hides it"
        elif on:
            yield name, text
    limit = hardware.find_cgroups(root).cpu_limit_cores()
    if limit is not None:
        yield "CPU quota", f"{limit:g} cores for all processes of the cgroup: beyond it they are paused"
    words = (hardware.read_text(root / "proc/stat") or "").partition("\n")[0].split()
    ticks = [int(word) for word in words[1:9] if word.isdigit()]
    if words[:1] == ["cpu"] and len(ticks) == 8:
        stolen = ticks[7] / max(1, sum(ticks))
        if stolen >= 0.001:
            yield "hypervisor", f"has taken {stolen:.1%} of the processors' time since boot for other machines"
    if hardware.read_text(root / "proc/sys/kernel/randomize_va_space") not in (None, "0"):
        yield "address layout", "random in each run, which moves times a little; pairs average it out"


def _load(root: Path, cores: int) -> Iterator[Said]:
    """What ran before the experiment did: later on its own runs are most of the load."""
    try:
        load = float((hardware.read_text(root / "proc/loadavg") or "").split()[0])
    except (IndexError, ValueError):
        yield "other load", f"{UNKNOWN}: there is no /proc/loadavg"
        return
    if load >= BUSY * max(1, cores):
        yield "other load", f"{load:g} processes ran or waited in the last minute, on {cores} cores"
