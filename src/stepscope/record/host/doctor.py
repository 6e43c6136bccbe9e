"""What this machine allows, what each limit costs the report, and how to lift it: the facts behind `stepscope doctor`.

A check never raises; what cannot be found out has state "unknown".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.record.host import doctor_probes as probes
from stepscope.record.host.cgroups import Cgroups, find_cgroups
from stepscope.record.host.hardware import (
    ROOT,
    affinity,
    format_cpu_list,
    governor,
    online_cpus,
    sibling_groups,
    smt_active,
    turbo,
)

DOCTOR_SCHEMA = "stepscope.doctor/1"
_SPARE_CORES_FROM = 4  # from here on one core is left to the system, the sampler and interrupts


@dataclass(frozen=True)
class Check:
    """One thing a recording can use; `state` is ok, limited, missing or unknown. No loss, no cost and no remedy."""

    name: str
    state: str
    finding: str
    cost: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Doctor:
    """All checks, and a ready line that pins a run to whole cores (None where the processors cannot be seen)."""

    checks: tuple[Check, ...]
    pinned_command: str | None
    pinned_cpus: tuple[int, ...]

    def for_json(self) -> dict[str, Any]:
        return {"schema": DOCTOR_SCHEMA, **asdict(self)}


def examine(python: str | None = None, root: Path = ROOT) -> Doctor:
    """Look at everything; takes a few seconds because py-spy is really attached and torch really imported."""
    cgroups = find_cgroups(root)
    cpus = affinity()
    pinned = pinned_cpus(
        cpus, sibling_groups(cpus, root), cgroups.cpu_limit_cores(), sibling_groups(online_cpus(root), root)
    )
    checks = (
        stacks_check(probes.attach()),
        *gpu_checks(probes.gpus()),
        torch_check(probes.torch_build(python)),
        processors_check(cpus, online_cpus(root), cgroups),
        memory_check(cgroups),
        frequency_check(governor(root), turbo(root)),
        threads_check(smt_active(root), root),
        pressure_check(root),
    )
    line = f"stepscope run -- taskset -c {format_cpu_list(pinned)} python train.py" if pinned else None
    return Doctor(checks=checks, pinned_command=line, pinned_cpus=tuple(pinned))


def pinned_cpus(
    allowed: Sequence[int], cores: Sequence[Sequence[int]], limit: float | None, all_cores: Sequence[Sequence[int]]
) -> list[int]:
    """Whole physical cores within `allowed`, all sibling threads of each, no more of them than the quota `limit` feeds.

    `cores` and `all_cores` group processors by physical core, the allowed ones and all. Cores of which a sibling
    belongs to somebody else are left out, unless there are no others.
    """
    whole = {tuple(sorted(core)) for core in all_cores}
    usable = [sorted(core) for core in cores if tuple(sorted(core)) in whole] or [sorted(core) for core in cores]
    usable.sort()
    count = len(usable)
    if count >= _SPARE_CORES_FROM:
        usable = usable[1:]
        count -= 1
    if limit is not None:
        count = max(1, min(count, int(limit)))
    chosen = sorted(cpu for core in usable[:count] for cpu in core)
    return [cpu for cpu in chosen if cpu in set(allowed)]


def stacks_check(attach: probes.Attach) -> Check:
    """Whether py-spy can look into a training process of this user."""
    rights = f"ptrace_scope {attach.yama}" if attach.yama is not None else "no Yama"
    rights += ", CAP_SYS_PTRACE" if attach.capability else ""
    cost = "stacks come from a thread inside the process: slower (50 Hz at most), blind to waiting, missing in C code"
    if attach.version is None:
        return Check(
            "stacks (py-spy)", "missing", "py-spy is not installed", cost, "pip install py-spy beside stepscope"
        )
    if attach.refusal is None:
        return Check("stacks (py-spy)", "ok", f"py-spy {attach.version} attaches ({rights})")
    remedy = "in a container add --cap-add SYS_PTRACE (Kubernetes: securityContext.capabilities.add: [SYS_PTRACE])"
    if attach.yama is not None and attach.yama >= 2:
        remedy = "sudo sysctl kernel.yama.ptrace_scope=1, or run as a user with CAP_SYS_PTRACE"
    return Check("stacks (py-spy)", "limited", f"attaching is refused ({rights}): {attach.refusal}", cost, remedy)


def gpu_checks(gpus: probes.GpuAccess) -> tuple[Check, ...]:
    """NVML for telemetry, CUPTI for kernels in windows."""
    if not gpus.names:
        why = gpus.reason or "no device"
        return (
            Check(
                "GPU telemetry (NVML)",
                "missing",
                why,
                "with a GPU in it: its load, memory, power and clocks, and whether it was throttled",
                "install the driver; start a container with --gpus all (nothing is lost without a GPU)",
            ),
        )
    names = f"{len(gpus.names)} × {gpus.names[0]}, driver {gpus.driver}"
    nvml = Check("GPU telemetry (NVML)", "ok", names)
    if gpus.counters_restricted:
        cupti = Check(
            "GPU kernels (CUPTI)",
            "limited",
            "hardware counters are for administrators only (RmProfilingAdminOnly: 1)",
            "kernel times are recorded, occupancy and throughput counters are not",
            "set NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module, or run as root",
        )
    else:
        state = "unknown" if gpus.counters_restricted is None else "ok"
        cupti = Check("GPU kernels (CUPTI)", state, "not restricted" if state == "ok" else "the driver does not tell")
    return nvml, cupti


def torch_check(build: probes.TorchBuild) -> Check:
    """The training environment's PyTorch, imported in a process of its own."""
    name = "PyTorch"
    if build.version is None:
        return Check(
            name, "missing", f"{build.python or 'python'}: {build.problem}",
            "nothing of steps, phases and operators would be recorded with this interpreter",
            "activate the training environment, or name it with --python",
        )  # fmt: skip
    text = f"{build.version} on Python {build.python_version}, {build.threads} threads, "
    text += f"profiler: {', '.join(build.activities) or 'none'}"
    if build.python_version is not None and tuple(build.python_version.split(".")[:2]) in (("3", "6"), ("3", "7")):
        return Check(name, "missing", text, "the agent needs Python 3.8", "upgrade the interpreter")
    if not build.activities:
        return Check(name, "limited", text, "no windows: no operators, no kernels", "use a build with Kineto")
    return Check(name, "ok", text)


def processors_check(cpus: Sequence[int], online: Sequence[int], cgroups: Cgroups) -> Check:
    """How many processors a run may use, as opposed to how many there are."""
    limit = cgroups.cpu_limit_cores()
    text = f"{len(cpus)} of {len(online) or '?'} processors ({format_cpu_list(cpus)})"
    if limit is None:
        return Check("processors", "ok", f"{text}, no quota")
    if limit >= len(cpus):
        return Check("processors", "ok", f"{text}, quota {limit:g}")
    return Check(
        "processors", "limited", f"{text}, but a quota of {limit:g} (cgroup version {cgroups.version})",
        "more threads and workers than the quota are throttled in bursts, which shows as random slow steps",
        f"size threads and loader workers for {limit:g} cores, or raise the container's CPU limit",
    )  # fmt: skip


def memory_check(cgroups: Cgroups) -> Check:
    limit = cgroups.memory_limit_bytes()
    if limit is None:
        return Check("memory limit", "ok", "none beyond the machine's own")
    return Check("memory limit", "ok", f"{limit / 2**30:.1f} GiB; kills by it are recorded")


def frequency_check(found: str | None, boost: bool | None) -> Check:
    """Whether the clock holds still."""
    name = "processor frequency"
    if found is None:
        return Check(
            name, "unknown", "this machine does not tell its governor (usual in virtual machines)",
            "frequency changes cannot be told from changes of the program",
        )  # fmt: skip
    text = f"governor {found}" + ("" if boost is None else f", boost {'on' if boost else 'off'}")
    if found == "performance":
        return Check(name, "ok", text)
    return Check(name, "limited", text, "short runs are timed while the clock still rises",
                 "sudo cpupower frequency-set -g performance")  # fmt: skip


def threads_check(active: bool | None, root: Path) -> Check:
    """Sibling threads share a core's arithmetic units."""
    pairs = [core for core in sibling_groups(online_cpus(root), root) if len(core) > 1]
    if not pairs:
        return Check(
            "sibling threads", "ok", "none: every processor is a core of its own" if active is not None else "none seen"
        )
    shown = "; ".join(",".join(map(str, core)) for core in pairs[:4]) + ("; …" if len(pairs) > 4 else "")
    return Check(
        "sibling threads", "limited", f"{len(pairs)} cores have them ({shown})",
        "a neighbour on the sibling takes up to half of a core's speed",
        "pin to whole cores, with the line below",
    )  # fmt: skip


def pressure_check(root: Path) -> Check:
    if (root / "proc/pressure/cpu").is_file():
        return Check("pressure (PSI)", "ok", "readable")
    return Check(
        "pressure (PSI)", "missing", "/proc/pressure is not there",
        "waiting for processors, memory or disks is seen per process only",
        "boot with psi=1",
    )  # fmt: skip
