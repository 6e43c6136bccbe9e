"""What this machine allows, what each limit costs the report, and how to lift it: the facts behind `stepscope doctor`.

A check never raises; what cannot be found out has state "unknown".
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stepscope.model.counted import things
from stepscope.record.agent.knobs import cpu_text
from stepscope.record.host.hardware import (
    ROOT,
    Cgroups,
    Gpus,
    affinity,
    find_cgroups,
    governor,
    online_cpus,
    read_text,
    sibling_groups,
    smt_active,
    turbo,
)
from stepscope.record.host.meters import Rapl
from stepscope.record.host.pyspy import (
    IN_CONTAINER,
    Rights,
    allow_tracing,
    find_pyspy,
    first_line,
    look_into,
    pyspy_version,
    rights,
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


def examine(python: str | None = None) -> Doctor:
    """Look at everything; takes a few seconds because py-spy is really attached and torch really imported."""
    cgroups = find_cgroups()
    cpus = affinity()
    pinned = pinned_cpus(cpus, sibling_groups(cpus), cgroups.cpu_limit_cores(), sibling_groups(online_cpus()))
    memory = cgroups.memory_limit_bytes()
    limited = f"{(memory or 0) / 2**30:.1f} GiB; kills by it are recorded"
    no_pressure = Check(
        "pressure (PSI)", "missing", "/proc/pressure is not there",
        "waiting for processors, memory or disks is seen per process only",
        "boot with psi=1",
    )  # fmt: skip
    checks = (
        stacks_check(*try_sampling(), rights(os.getpid())),
        *gpu_checks(),
        cpu_energy_check(Rapl()),
        torch_check(torch_build(python)),
        processors_check(cpus, online_cpus(), cgroups),
        Check("memory limit", "ok", "none beyond the machine's own" if memory is None else limited),
        frequency_check(governor(), turbo()),
        threads_check(smt_active()),
        Check("pressure (PSI)", "ok", "readable") if (ROOT / "proc/pressure/cpu").is_file() else no_pressure,
    )
    line = f"stepscope run -- taskset -c {cpu_text(pinned)} python train.py" if pinned else None
    return Doctor(checks=checks, pinned_command=line, pinned_cpus=tuple(pinned))


def pinned_cpus(
    allowed: Sequence[int], cores: Sequence[Sequence[int]], limit: float | None, all_cores: Sequence[Sequence[int]]
) -> list[int]:
    """Whole physical cores within `allowed`, all sibling threads of each, no more of them than the quota `limit` feeds.

    `cores` and `all_cores` group processors by physical core, the allowed ones and all. Cores of which a sibling
    belongs to somebody else are left out, unless there are no others.
    """
    whole = {tuple(sorted(core)) for core in all_cores}
    usable = sorted(sorted(core) for core in cores if tuple(sorted(core)) in whole) or sorted(map(sorted, cores))
    if len(usable) >= _SPARE_CORES_FROM:
        usable = usable[1:]
    count = len(usable) if limit is None else max(1, min(len(usable), int(limit)))
    return sorted(cpu for core in usable[:count] for cpu in core if cpu in set(allowed))


def stacks_check(version: str | None, refusal: str | None, own: Rights) -> Check:
    """Whether py-spy, None where there is none, can look into a training process of this user."""
    name, known = "stacks (py-spy)", f"ptrace_scope {own.yama}" if own.yama is not None else "no Yama"
    known += ", CAP_SYS_PTRACE" if own.capability else ""
    cost = "stacks come from a thread inside the process: slower (50 Hz at most), blind to waiting, missing in C code"
    if version is None:
        return Check(name, "missing", "py-spy is not installed", cost, "pip install py-spy beside stepscope")
    if refusal is None:
        return Check(name, "ok", f"py-spy {version} attaches ({known})")
    remedy = IN_CONTAINER
    if own.yama is not None and own.yama >= 2:
        remedy = "sudo sysctl kernel.yama.ptrace_scope=1, or run as a user with CAP_SYS_PTRACE"
    return Check(name, "limited", f"attaching is refused ({known}): {refusal}", cost, remedy)


def gpu_checks() -> tuple[Check, ...]:
    """NVML for telemetry, CUPTI for kernels in windows, whose counters the driver may keep from ordinary users."""
    with Gpus() as gpus:
        devices = gpus.describe()
        driver, reason = gpus.driver_version(), gpus.reason
    names = [device["name"] or "GPU" for device in devices]
    if not names:
        cost = "on a machine with a GPU: its load, memory, power and clocks, and whether it was throttled"
        remedy = "install the driver; start a container with --gpus all (nothing is lost without a GPU)"
        return (Check("GPU telemetry (NVML)", "missing", reason or "no device", cost, remedy),)
    nvml = Check("GPU telemetry (NVML)", "ok", f"{len(names)} × {names[0]}, driver {driver}")
    checks = (nvml, gpu_energy_check(devices))
    told = re.search(r"RmProfilingAdminOnly:\s*(\d)", read_text(ROOT / "proc/driver/nvidia/params") or "")
    if told is None:
        return *checks, Check("GPU kernels (CUPTI)", "unknown", "the driver does not tell")
    if told[1] != "1":
        return *checks, Check("GPU kernels (CUPTI)", "ok", "not restricted")
    return *checks, Check(
        "GPU kernels (CUPTI)",
        "limited",
        "hardware counters are for administrators only (RmProfilingAdminOnly: 1)",
        "kernel times are recorded, occupancy and throughput counters are not",
        "set NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module, or run as root",
    )


def gpu_energy_check(devices: Sequence[Mapping[str, Any]]) -> Check:
    """Whether the boards count their energy, and each for one user."""
    name, without = "GPU energy", [device["index"] for device in devices if not device["energy_counter"]]
    if without:
        return Check(
            name, "limited", f"no energy counter on GPU {', '.join(map(str, without))}",
            "energy is summed from power sampled once a second, and said so",
            "Volta or newer, and no vGPU",
        )  # fmt: skip
    divided = [device["index"] for device in devices if device["mig"] or "vg" in (device["virtualization"] or "")]
    if divided:
        return Check(
            name, "limited", f"GPU {', '.join(map(str, divided))} is divided (MIG, vGPU): the counter is the board's",
            "no energy of a run: the board's own is shown",
            "a whole board for the run",
        )  # fmt: skip
    return Check(name, "ok", "counted by every board")


def cpu_energy_check(rapl: Rapl) -> Check:
    """Whether the kernel lets this user read what processors draw."""
    name = "CPU energy (RAPL)"
    if rapl.reason is None:
        return Check(name, "ok", f"readable: {', '.join(rapl.devices)}")
    cost = "energy of processors and their memory is not measured"
    state = "limited" if rapl.remedy else "missing"
    return Check(name, state, rapl.reason, cost, rapl.remedy or "a machine of its own, not a virtual one")


def torch_check(build: Mapping[str, Any]) -> Check:
    """The training environment's PyTorch, as `torch_build` gives it."""
    name = "PyTorch"
    if "problem" in build:
        return Check(
            name, "missing", f"{build['python'] or 'python'}: {build['problem']}",
            "nothing of steps, phases and operators would be recorded with this interpreter",
            "activate the training environment, or name it with --python",
        )  # fmt: skip
    text = f"{build['version']} on Python {build['python_version']}, {things(build['threads'], 'thread')}, "
    text += f"profiler: {', '.join(build['activities']) or 'none'}"
    if build["python_version"].startswith(("3.6.", "3.7.")):
        return Check(name, "missing", text, "the agent needs Python 3.8", "upgrade the interpreter")
    if not build["activities"]:
        return Check(name, "limited", text, "no windows: no operators, no kernels", "use a build with Kineto")
    return Check(name, "ok", text)


def processors_check(cpus: Sequence[int], online: Sequence[int], cgroups: Cgroups) -> Check:
    limit = cgroups.cpu_limit_cores()
    text = f"{len(cpus)} of {len(online) or '?'} processors ({cpu_text(cpus)})"
    if limit is None:
        return Check("processors", "ok", f"{text}, no quota")
    if limit >= len(cpus):
        return Check("processors", "ok", f"{text}, quota {limit:g}")
    return Check(
        "processors", "limited", f"{text}, but a quota of {limit:g} (cgroup version {cgroups.version})",
        "more threads and workers than the quota are throttled in bursts, which shows as random slow steps",
        f"size threads and loader workers for {limit:g} cores, or raise the container's CPU limit",
    )  # fmt: skip


def frequency_check(found: str | None, boost: bool | None) -> Check:
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


def threads_check(active: bool | None) -> Check:
    pairs = [core for core in sibling_groups(online_cpus()) if len(core) > 1]
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


_TORCH_TIMEOUT_SECONDS = 90.0  # a cold import from a network file system
_TORCH_PROGRAM = """
import json, platform, sys
facts = {"python_version": platform.python_version()}
try:
    import torch
    facts["version"] = str(torch.__version__)
    facts["threads"] = torch.get_num_threads()
    facts["activities"] = sorted(a.name for a in torch.profiler.supported_activities())
except Exception as error:
    facts["problem"] = "%s: %s" % (type(error).__name__, error)
print("\\nSTEPSCOPE " + json.dumps(facts))
"""


def try_sampling() -> tuple[str | None, str | None]:
    """Let py-spy look into a short Python child, started the way a recording does: its version, why it was refused."""
    program = find_pyspy()
    if program is None:
        return None, None
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(30)"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=allow_tracing(),
    )
    try:
        if child.stdout is not None:
            child.stdout.readline()
        said = look_into(program, child.pid)
    finally:
        child.kill()
        child.communicate()
    return pyspy_version(program) or "of an unknown version", None if said is None else first_line(said)


def torch_build(python: str | None) -> dict[str, Any]:
    """What `python` (default: the one on PATH) imports as torch, in a process of its own; or the `problem`."""
    program = shutil.which(python or "python") or (None if python else shutil.which("python3"))
    if program is None:
        return {"python": python, "problem": "no such interpreter on PATH"}
    try:
        done = subprocess.run(
            [program, "-c", _TORCH_PROGRAM],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TORCH_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"python": program, "problem": f"importing torch took more than {_TORCH_TIMEOUT_SECONDS:g} s"}
    except OSError as error:
        return {"python": program, "problem": f"cannot be started: {error.strerror}"}
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith("STEPSCOPE "):
            return {"python": program, **json.loads(line.partition(" ")[2])}
    return {"python": program, "problem": f"ended with status {done.returncode} while importing torch"}
