"""The run folder: its name, who may write into it, and proof that it can be written before anything starts.

Each launcher owns exactly one `host-H` inside it, taken with one atomic `mkdir`. Launchers of one job share a run
folder: the first of them leaves `job.json` there, whole from the start, and whoever belongs to another job stays out,
also when all of them start in the same moment.

RUN/host-H/manifest.json: what ran where. Written before the command starts, completed after it has ended.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stepscope.errors import EnvironmentRefusal, UsageError
from stepscope.record.agent.masking import mask_argv, mask_text
from stepscope.record.host.command import Script, user_roots
from stepscope.record.host.hardware import gpu_facts, hardware_facts, noise_facts
from stepscope.record.host.jsonlines import JsonLinesTail, read_json, write_json
from stepscope.record.host.meters import Rapl
from stepscope.record.host.options import RecordOptions
from stepscope.record.host.pyspy import output_of, pyspy_version
from stepscope.record.host.scheduler import Scheduler, job_in_manifest, nodes_of, scheduler_of
from stepscope.schema import RUN_SCHEMA

DEFAULT_PARENT = "stepscope-runs"
JOB_FILE = "job.json"
JOB_SCHEMA = "stepscope.job/1"
_MOST_SUFFIXES = 1000
_TRIES = 5  # another member that gives up removes the folder under us


@dataclass(frozen=True)
class RunFolder:
    """`run` is shared by all hosts, `host` is this launcher's own. Both are absolute."""

    run: Path
    host: Path

    def discard(self) -> None:
        """Remove what was claimed for a command that never started; other hosts' folders stay."""
        shutil.rmtree(self.host, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty: someone else's
            if {path.name for path in self.run.iterdir()} == {JOB_FILE}:
                (self.run / JOB_FILE).unlink()
            self.run.rmdir()
            if self.run.parent.name == DEFAULT_PARENT:
                self.run.parent.rmdir()


def claim_folder(
    out: Path | None, script: str, scheduler: Scheduler | None, *, now: datetime, host: str | None = None
) -> RunFolder:
    """Create and claim the folder of a run.

    `out` is taken as it is, except that a job which is started again records beside its earlier attempt; without it
    the name is made of the scheduler's label or the time, and of `script`. Raises `UsageError` when `out` holds another
    recording, `EnvironmentRefusal` when nothing can be written there.
    """
    host_name = "host-" + safe_name(
        host or (scheduler.host if scheduler is not None else None) or socket.gethostname() or "localhost"
    )
    if scheduler is not None and scheduler.local_index:
        host_name += f".{scheduler.local_index + 1}"
    if out is not None:
        return _claim_named(out.absolute(), host_name, scheduler)
    label = scheduler.label if scheduler is not None else f"{now:%Y%m%d-%H%M%S}"
    base = Path.cwd() / DEFAULT_PARENT / f"{safe_name(label)}-{safe_name(script)}"
    for attempt in range(1, _MOST_SUFFIXES):
        run = base if attempt == 1 else base.with_name(f"{base.name}-{attempt}")
        claimed = _claim(run, host_name, scheduler, new=scheduler is None or scheduler.identity is None)
        if claimed is not None:
            return claimed
    raise EnvironmentRefusal(f"{base} and its numbered successors are all taken; name a folder with --out")


def _claim_named(out: Path, host_name: str, scheduler: Scheduler | None) -> RunFolder:
    if min(str(out)) < " ":  # it stands in lines of files and of the terminal
        raise UsageError(f"--out {str(out)!r}: holds a line break or another control character; name it without")
    run = out
    own, restarts = job_in_manifest({} if scheduler is None else scheduler.for_manifest())
    for path in out.glob("host-*") if own is not None and restarts else ():
        # a job that was started again (requeued, restarted workers): refusing would end its training
        job, attempt = job_in_manifest(scheduler_of(read_json(path / "manifest.json")))
        if job == own and attempt < restarts:
            run = out.with_name(f"{out.name}-restart{restarts}")
    if run.exists() and not run.is_dir():
        raise UsageError(f"--out {run} is a file; name a folder that does not exist yet")
    try:
        used = run.is_dir() and any(run.iterdir())
    except OSError as error:
        raise _unwritable(run, error) from None
    if used and not _same_job(run, scheduler):
        raise UsageError(f"--out {run} is not empty; {_advice(scheduler)}")
    claimed = _claim(run, host_name, scheduler, new=False)
    if claimed is None:
        raise UsageError(f"--out {run} already holds a recording of this host; {_advice(scheduler)}")
    return claimed


def _advice(scheduler: Scheduler | None) -> str:
    if scheduler is not None and "array_task_id" in scheduler.facts:
        return "give every task of the array a folder of its own, such as --out NAME-$SLURM_ARRAY_TASK_ID"
    if scheduler is not None and scheduler.kind == "slurm":
        return "name a new one, such as --out NAME-$SLURM_JOB_ID, or leave --out away for a folder named after the job"
    return "name a new folder, or remove it first"


def _same_job(run: Path, scheduler: Scheduler | None) -> bool:
    """Whether all there is in `run` comes from other members of this very job step."""
    if scheduler is None or scheduler.identity is None:
        return False
    agreed = read_json(run / JOB_FILE)
    if agreed is not None:
        return _identity(agreed) == scheduler.identity
    hosts = [path for path in run.iterdir() if path.name.startswith("host-")]
    manifests = [read_json(path / "manifest.json") for path in hosts]
    # One that is not there yet belongs to a member that has just claimed its folder; `_agree` has the last word.
    return bool(hosts) and all(
        manifest is None or _identity(scheduler_of(manifest)) == scheduler.identity for manifest in manifests
    )


def _identity(owner: dict[str, Any]) -> tuple[str, ...]:
    found = owner.get("identity")
    return tuple(str(part) for part in found) if isinstance(found, list) else ()


def _claim(run: Path, host_name: str, scheduler: Scheduler | None, *, new: bool) -> RunFolder | None:
    """`RUN/host-H` when it could be made by us, None when it or the run is someone else's.

    With `new` the run folder itself must be ours too.
    """
    for left in reversed(range(_TRIES)):
        try:
            return _make_host_folder(RunFolder(run=run, host=run / host_name), scheduler, new=new)
        except OSError as error:
            if not left or not isinstance(error, FileNotFoundError):
                raise _unwritable(run, error) from None
    return None


def _make_host_folder(folder: RunFolder, scheduler: Scheduler | None, *, new: bool) -> RunFolder | None:
    ours = False
    try:
        folder.run.mkdir(parents=True, exist_ok=not new)
        folder.host.mkdir()
    except FileExistsError:
        return None
    except OSError:
        folder.discard()
        raise
    try:
        probe = folder.host / ".writable"
        probe.write_bytes(b"x")
        probe.unlink()
        ours = _agree(folder, scheduler)
    finally:
        if not ours:
            folder.discard()
    return folder if ours else None


def _agree(folder: RunFolder, scheduler: Scheduler | None) -> bool:
    """Whether the run folder belongs to our job, by `job.json`, which is made here if it is not there.

    Who has no job shares a run folder with nobody.
    """
    if scheduler is None or scheduler.identity is None:
        return all(path == folder.host for path in folder.run.glob("host-*"))
    shared, own = folder.run / JOB_FILE, folder.host / JOB_FILE
    text = json.dumps({"schema": JOB_SCHEMA, "identity": list(scheduler.identity)}) + "\n"
    own.write_text(text, encoding="utf-8")
    try:
        shared.hardlink_to(own)  # appears with its content, or not at all
    except FileExistsError:
        pass
    except OSError:
        # A file system without links. Who reads the file between its making and its writing finds nothing in it.
        with contextlib.suppress(FileExistsError), shared.open("x", encoding="utf-8") as file:
            file.write(text)
    own.unlink()
    agreed = read_json(shared)
    return not agreed or _identity(agreed) == scheduler.identity


def _unwritable(run: Path, error: OSError) -> EnvironmentRefusal:
    reason = error.strerror or errno.errorcode.get(error.errno or 0, "error")
    return EnvironmentRefusal(f"cannot write the run folder {run} ({reason}); name a writable one with --out")


def safe_name(text: str) -> str:
    """`text` reduced to what is a plain file name everywhere."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._")[:80] or "run"


_CHUNK = 1 << 20
_LEVEL = 1  # traces compress tenfold at the fastest level already


def own_rank_folders(run: Path, host_dir: Path) -> list[Path]:
    """The rank folders that processes of this host have claimed; other hosts look after theirs."""
    tail = JsonLinesTail(host_dir / "agents.jsonl")
    told = (row.get("folder") for rows in iter(tail.read, []) for row in rows)
    names = dict.fromkeys(name for name in told if isinstance(name, str) and name == Path(name).name)
    return [run / name for name in names if (run / name).is_dir()]


def compress_traces(folders: list[Path]) -> None:
    """Replace every `trace-*.json` by its `.json.gz`; one that fails stays as it is."""
    from isal import igzip

    for path in (path for folder in folders for path in sorted(folder.glob("trace-*.json"))):
        part = path.with_name(path.name + ".gz.part")
        try:
            with path.open("rb") as source, igzip.open(part, "wb", compresslevel=_LEVEL) as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
            os.replace(part, path.with_name(path.name + ".gz"))
            path.unlink()
        except OSError:
            part.unlink(missing_ok=True)


# launchers: one of them reads the recordings of so many in some seconds. Of more each reduces its machine's, and the
# last one reads the reduced tables.
LARGEST_READ_JOB = 16
DONE = ".done"  # in a launcher's folder, when it has done its part but for the report


class Part(enum.Enum):
    """What a launcher does at its end: make the report, say one line, or be silent."""

    REPORT = "report"
    WORD = "word"
    SILENT = "silent"


def reduces(run: Path, host_dir: Path) -> bool:
    """Whether the launcher that owns `host_dir` reduces what its machine recorded, after its manifest was completed.

    That is so in a job of many launchers, for the one of a machine that ends last; true once. Never raises OSError.
    """
    members = scheduler_of(read_json(host_dir / "manifest.json")).get("members")
    folders = _folders(run)
    if max(members if isinstance(members, int) else 0, len(folders)) <= LARGEST_READ_JOB:
        return False
    base = _machine(host_dir.name, folders)
    mine = [folder for folder in folders if _machine(folder.name, folders) == base]
    if not all(_has_ended(read_json(folder / "manifest.json") or {}) for folder in mine):
        return False
    with contextlib.suppress(OSError):  # another of the machine has it, who ended in the same moment
        (run / f".{base}-reduced-by-{len(mine)}").open("x").close()
        return True
    return False


def say_done(host_dir: Path) -> None:
    """Say that nothing but the report is left to do; never raises OSError."""
    with contextlib.suppress(OSError):
        (host_dir / DONE).touch()


def part_in_report(run: Path, host_dir: Path) -> Part:
    """The part of the launcher that owns `host_dir`, after `say_done`; never raises OSError."""
    scheduler = scheduler_of(read_json(host_dir / "manifest.json"))
    if not scheduler.get("identity"):
        return Part.REPORT
    folders = _folders(run)
    members = scheduler.get("members")
    if len(folders) <= 1 and (members or 1) <= 1:
        return Part.REPORT
    ended = ((read_json(folder / "manifest.json") or {}).get("ended_ns") for folder in folders)
    large = len(folders) > LARGEST_READ_JOB
    if all(time is not None for time in ended) and (
        not large or (all((folder / DONE).exists() for folder in folders) and len(folders) >= (members or 0))
    ):
        # Taken once per number of ended launchers, so that two that end together make one report. Where the claim fails
        # another has it, or nothing can be written, the report neither.
        with contextlib.suppress(OSError):
            (run / f".reported-by-{len(folders)}").open("x").close()
            return Part.REPORT
    return Part.SILENT if scheduler.get("index") else Part.WORD


def _folders(run: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in run.glob("host-*") if path.is_dir()]
    return []


def _machine(name: str, folders: list[Path]) -> str:
    """host-NODE of host-NODE.2, where there is such a folder."""
    base, _, number = name.rpartition(".")
    return base if number.isdecimal() and any(folder.name == base for folder in folders) else name


def _has_ended(manifest: dict[str, Any]) -> bool:
    """Whether a launcher of this machine has ended, or is gone without a word."""
    if manifest.get("ended_ns") is not None:
        return True
    pid = manifest.get("launcher_pid")
    if not isinstance(pid, int) or pid <= 0 or manifest.get("host") != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        pass
    return False


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
