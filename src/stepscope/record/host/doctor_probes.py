"""The experiments behind `stepscope doctor`: attach py-spy, ask the driver, import torch elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stepscope.record.host.gpu import Gpus
from stepscope.record.host.hardware import ROOT, read_text
from stepscope.record.host.pyspy import find_pyspy, look_into, pyspy_version
from stepscope.record.host.tracing import allow_tracing

_CAP_SYS_PTRACE = 19
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


@dataclass(frozen=True)
class Attach:
    """`version` None: no py-spy. `refusal` None: it attached. `yama` None: the kernel has no such restriction."""

    version: str | None
    refusal: str | None
    yama: int | None
    capability: bool | None


@dataclass(frozen=True)
class GpuAccess:
    """`reason` says why there are none; `counters_restricted` None: not told."""

    names: tuple[str, ...]
    driver: str | None
    reason: str | None
    counters_restricted: bool | None


@dataclass(frozen=True)
class TorchBuild:
    """What `python` imports as torch; `version` None with a `problem` when it imports none."""

    python: str | None
    python_version: str | None = None
    version: str | None = None
    threads: int | None = None
    activities: tuple[str, ...] = ()
    problem: str | None = None


def attach(root: Path = ROOT) -> Attach:
    """Start a short Python child the way a recording does, and let py-spy look into it."""
    program = find_pyspy()
    yama = read_text(root / "proc/sys/kernel/yama/ptrace_scope")
    capability = has_ptrace_capability(read_text(root / "proc/self/status") or "")
    scope = int(yama) if yama is not None and yama.isdecimal() else None
    if program is None:
        return Attach(None, None, scope, capability)
    version = pyspy_version(program) or "of an unknown version"
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
        look = look_into(program, child.pid)
    finally:
        child.kill()
        child.communicate()
    return Attach(version, None if look.works else look.message, scope, capability)


def has_ptrace_capability(status: str) -> bool | None:
    """Whether the effective set in a /proc/PID/status holds CAP_SYS_PTRACE."""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.MULTILINE)
    return bool(int(match[1], 16) >> _CAP_SYS_PTRACE & 1) if match else None


def gpus(root: Path = ROOT) -> GpuAccess:
    """Devices NVML shows, and whether the driver keeps counters from ordinary users."""
    with Gpus() as found:
        names = tuple(device["name"] or "GPU" for device in found.describe())
        driver, reason = found.driver_version(), found.reason
    match = re.search(r"RmProfilingAdminOnly:\s*(\d)", read_text(root / "proc/driver/nvidia/params") or "")
    return GpuAccess(names, driver, reason, match[1] == "1" if match else None)


def torch_build(python: str | None) -> TorchBuild:
    """Import torch in `python` (default: the one on PATH) and ask what it is."""
    program = shutil.which(python or "python") or (None if python else shutil.which("python3"))
    if program is None:
        return TorchBuild(python, problem="no such interpreter on PATH")
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
        return TorchBuild(program, problem=f"importing torch took more than {_TORCH_TIMEOUT_SECONDS:g} s")
    except OSError as error:
        return TorchBuild(program, problem=f"cannot be started: {error.strerror}")
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith("STEPSCOPE "):
            facts = json.loads(line.partition(" ")[2])
            facts["activities"] = tuple(facts.get("activities", ()))
            return TorchBuild(program, **facts)
    return TorchBuild(program, problem=f"ended with status {done.returncode} while importing torch")
