"""RUN/host-H/manifest.json: what ran where. Written before the command starts, completed after it has ended."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.record.agent.masking import mask_argv, mask_text
from stepscope.record.host.command import Script, user_roots
from stepscope.record.host.hardware import gpu_facts, hardware_facts, noise_facts
from stepscope.record.host.jsonlines import write_json
from stepscope.record.host.meters import Rapl
from stepscope.record.host.options import RecordOptions
from stepscope.record.host.pyspy import output_of, pyspy_version
from stepscope.record.host.scheduler import Scheduler, nodes_of
from stepscope.schema import RUN_SCHEMA

# Names that change how fast the same program runs, or say which part of a job this is. Nothing else is kept: an
# environment is full of tokens.
ENVIRONMENT = (
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "KMP_AFFINITY", "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY", "LD_PRELOAD", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE",
    "MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
    "HIP_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_CUDNN_BENCHMARK", "NVIDIA_TF32_OVERRIDE",
    "TORCH_LOGS", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_CACHE_DIR", "TORCH_COMPILE_DISABLE", "PT_XLA_DEBUG",
    "XLA_FLAGS",
    "NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS",
    "SLURM_CPUS_PER_TASK",
    "PYTHONOPTIMIZE", "PYTHONMALLOC", "PYTHONUNBUFFERED", "PYTHONDEVMODE", "PYTHONHASHSEED",
)  # fmt: skip


class Manifest:
    """The manifest of one host; every `save` replaces the file in one step.

    A save that fails is remembered in `problem`; the run goes on without.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self.values = values
        self.problem: str | None = None
        self._lock = threading.Lock()  # git is asked on a thread of its own

    def save(self) -> None:
        try:
            with self._lock:
                write_json(self._path, self.values)
        except OSError as error:
            self.problem = f"cannot write {self._path}: {error.strerror}"

    def describe(self, pyspy: str | None) -> None:
        """Ask py-spy, the GPUs' driver, git and SLURM's list of nodes: they may take seconds, so it happens beside the
        running command."""
        if pyspy is not None:
            self.values["sampler"]["version"] = pyspy_version(pyspy)
        self.values["hardware"].update(gpus=gpu_facts(), cpu_energy=Rapl().describe())
        self.values["git"] = git_state(git_root(Path(self.values["cwd"])))
        scheduler = self.values["scheduler"] or {}
        if listed := scheduler.get("job_nodelist"):
            scheduler["nodes"] = list(nodes_of(listed))
        self.save()

    def started(self, now_ns: int, pid: int) -> None:
        self.values.update(started_ns=now_ns, pid=pid)
        self.save()

    def ended(self, now_ns: int, returncode: int) -> None:
        """`returncode` as `subprocess` gives it: negative for a signal."""
        ended = {
            "status": returncode if returncode >= 0 else None,
            "signal": -returncode if returncode < 0 else None,
            "shell_status": shell_status(returncode),
        }
        self.values.update(ended_ns=now_ns, exit=ended)
        self.save()


def shell_status(returncode: int) -> int:
    """The exit status a shell shows for a `subprocess` return code."""
    return returncode if returncode >= 0 else 128 - returncode


def first_manifest(
    path: Path,
    options: RecordOptions,
    script: Script,
    scheduler: Scheduler | None,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    epoch_offset_ns: int,
    pyspy: str | None,
) -> Manifest:
    """Everything that is known before the command starts; git and the ending are null until they are known."""
    from importlib import metadata

    try:
        version = metadata.version("stepscope")
    except metadata.PackageNotFoundError:
        version = None
    values: dict[str, Any] = {
        "schema": RUN_SCHEMA,
        "recorder_version": version,
        "recorder_python": ".".join(str(part) for part in sys.version_info[:3]),
        "name": options.name or script.label,
        "tags": list(options.tags),
        "command": mask_argv(list(options.command)),
        "cwd": str(cwd),
        "host": socket.gethostname(),
        "pid": None,
        "launcher_pid": os.getpid(),
        "script": {"kind": script.kind, "path": None if script.path is None else str(script.path)},
        "user_roots": user_roots(script, cwd, git_root(cwd)),
        "started_ns": None,
        "ended_ns": None,
        "exit": {"status": None, "signal": None, "shell_status": None},
        "problems": [],
        "clock": {"epoch_offset_ns": epoch_offset_ns},
        "options": options.for_manifest(),
        "git": None,
        "environment": {name: mask_text(environ[name]) for name in ENVIRONMENT if name in environ},
        "scheduler": None if scheduler is None else scheduler.for_manifest(),
        "python": script.python,
        "hardware": hardware_facts(),
        "noise": noise_facts(),
        "page_faults": None,
        "sampler": {"source": "py-spy" if pyspy else "agent", "reason": None, "version": None},
    }
    return Manifest(path, values)


_TIMEOUT_SECONDS = 2.0  # a huge or remote repository must not hold up the manifest


def git_root(folder: Path) -> Path | None:
    """The nearest parent that holds `.git` (a folder, or a file in a worktree); asks the file system, not git."""
    return next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)


def git_state(root: Path | None) -> dict[str, Any] | None:
    """`{"root", "commit", "branch", "dirty"}`; a part is None when git cannot tell within two seconds."""
    if root is None:
        return None
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    return {
        "root": str(root),
        "commit": _git(root, "rev-parse", "--verify", "HEAD"),
        "branch": None if branch == "HEAD" else branch,
        "dirty": None if status is None else bool(status),
    }


def _git(root: Path, *arguments: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    return output_of(["git", "-C", str(root), *arguments], _TIMEOUT_SECONDS, environment)
