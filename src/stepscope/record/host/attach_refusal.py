"""Why a running process cannot be sampled, as the one line a user sees: what is missing, and how to get it."""

from __future__ import annotations

import os
import pwd
import re
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import EnvironmentRefusal, StepscopeError, UnreadableInputError
from stepscope.record.host.doctor_probes import has_ptrace_capability
from stepscope.record.host.hardware import ROOT, read_text
from stepscope.record.host.processes import read_executable
from stepscope.record.host.pyspy import Look

_FREE_THREADED = re.compile(r"(?:lib)?python3\.\d+t")
_FROM_INSIDE = "start the training with `stepscope run`, which can sample from inside"
_YAMA_NOBODY = 3  # values of kernel.yama.ptrace_scope
_YAMA_ADMINISTRATORS = 2
_YAMA_PARENTS = 1


@dataclass(frozen=True)
class Rights:
    """Who asks for what. `owner` is the user id of the process, None where it cannot be seen."""

    owner: int | None
    user: int
    capability: bool | None  # CAP_SYS_PTRACE
    yama: int | None  # None: the kernel has no such restriction


def rights(pid: int, root: Path = ROOT) -> Rights:
    yama = read_text(root / "proc/sys/kernel/yama/ptrace_scope")
    owner = re.search(r"^Uid:\s*(\d+)", read_text(root / f"proc/{pid}/status") or "", re.MULTILINE)
    return Rights(
        owner=int(owner[1]) if owner else None,
        user=os.geteuid(),
        capability=has_ptrace_capability(read_text(root / "proc/self/status") or ""),
        yama=int(yama) if yama is not None and yama.isdecimal() else None,
    )


def refusal(pid: int, look: Look, asked: Rights) -> StepscopeError:
    """The error for a process that py-spy could not read."""
    if not os.path.exists(f"/proc/{pid}"):
        return UnreadableInputError(f"process {pid} ended before it could be sampled; attach to a running one")
    if not look.refused:
        return _unsupported(pid, look.message)
    return EnvironmentRefusal(f"process {pid} cannot be sampled: {_missing(look.message, asked)}")


def _missing(message: str, asked: Rights) -> str:
    if asked.yama == _YAMA_NOBODY:
        return f"ptrace_scope is 3, so nobody may attach until the machine is restarted; {_FROM_INSIDE}"
    if not asked.capability:
        if asked.owner is not None and asked.owner != asked.user and asked.user != 0:
            return f"it belongs to {_user_name(asked.owner)}; run this as that user, or with sudo"
        if asked.yama == _YAMA_ADMINISTRATORS:
            return f"ptrace_scope is 2, so only administrators may attach; run this with sudo, or {_FROM_INSIDE}"
        if asked.yama == _YAMA_PARENTS:
            how = "run this with sudo, or set it to 0 (sudo sysctl kernel.yama.ptrace_scope=0)"
            return f"ptrace_scope is 1, so only its parents may attach; {how}, or {_FROM_INSIDE}"
    container = "in a container add --cap-add SYS_PTRACE (Kubernetes: securityContext.capabilities.add: [SYS_PTRACE])"
    return f"{message.rstrip('.')}; {container}, elsewhere run this with sudo"


def _unsupported(pid: int, message: str) -> EnvironmentRefusal:
    """py-spy was let in and did not find what it knows."""
    program = os.path.basename(read_executable(pid) or "")
    if _FREE_THREADED.fullmatch(program) or _maps_free_threaded(pid):
        what = "it is a free-threaded Python, which py-spy cannot read; run the training with a build that has the GIL"
    elif program.startswith("pypy"):
        what = "it is PyPy, which py-spy cannot read; run the training with CPython"
    else:
        what = f"py-spy says {message.rstrip('.')!r}; upgrade py-spy, or {_FROM_INSIDE}"
    return EnvironmentRefusal(f"process {pid} cannot be sampled: {what}")


def _maps_free_threaded(pid: int) -> bool:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
    except OSError:
        return False
    return re.search(r"/libpython3\.\d+t\.so", maps) is not None


def _user_name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
