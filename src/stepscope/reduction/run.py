"""Reduce a run: all of it, or what one host recorded of it.

What engines run are functions of a text that holds paths and names, to a text that holds sizes and checksums. Tables
never go over the wire. A task that is run twice, on whatever machine, leaves the same bytes; each file is written
beside its place and moved there whole. Engines pickle the functions' names and these texts, nothing else; no file of a
recording is ever unpickled.

Who runs the tasks: this process, processes beside it, or the workers of Dask; any `concurrent.futures.Executor`.

A worker that dies costs the file it was at: that one is done again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from msgspec import Struct

from stepscope.errors import EnvironmentRefusal, UnreadableInputError
from stepscope.files import read_small
from stepscope.read.raw import RawRank, TraceRef
from stepscope.read.run_folder import read_rank_steps
from stepscope.reduction.host import reduce_host
from stepscope.reduction.plan import HostPlan, TracePlan, plans
from stepscope.reduction.trace import TraceRows, reduce_trace
from stepscope.schema import REDUCED, REDUCED_INDEX
from stepscope.tables.reduced import MAX_INDEX_BYTES, PART, Index, read_host, write_host
from stepscope.workers import main_is_guarded

ENGINES = ("inline", "pool", "dask")
LOCAL, SLURM = "local", "slurm"
_MORE_ROUNDS = 1  # with a new executor, for what a worker that died has left
_CONNECT_SECONDS = 30
_KILLED = "the process that read it was killed each time, mostly for want of memory; reduce it where there is more"
_DASK_MISSING = "--engine dask needs Dask; install it with: pip install 'stepscope[cluster]'"
_WORKER = {"cores": 1, "processes": 1, "memory": "2GB"}  # of a job of SLURM, where the site's settings say nothing

Task = Callable[[str], str]
Opened = Callable[[], contextlib.AbstractContextManager[Executor]]
Tell = Callable[[int, int], None]  # tasks done, and all


class Inline(Executor):
    """Runs each task where it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it, as from any executor
            future.set_exception(error)
        return future


def pool(jobs: int) -> ProcessPoolExecutor:
    # Threads of the caller (Polars has some) do not survive a fork; and each worker has a core, not all of them.
    one_thread = ("POLARS_MAX_THREADS", os.environ.get("POLARS_MAX_THREADS", "1"))  # before anything imports Polars
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=os.putenv, initargs=one_thread)


@contextlib.contextmanager
def dask(scheduler: str, jobs: int) -> Iterator[Executor]:
    """Dask's workers as an executor; raises `EnvironmentRefusal` where Dask or its scheduler is not there.

    Args:
        scheduler: "local" for a cluster of processes here, "slurm" for jobs of SLURM, as the site's settings of
            dask-jobqueue describe them, else the address of a scheduler that runs.
        jobs: workers to start.
    """
    try:
        import dask as settings
        from distributed import Client, LocalCluster

        if scheduler == SLURM:
            from dask_jobqueue import SLURMCluster
    except ImportError:
        raise EnvironmentRefusal(_DASK_MISSING) from None
    with contextlib.ExitStack() as stack:
        where: Any = scheduler
        try:
            if scheduler == LOCAL:
                cluster = LocalCluster(
                    n_workers=jobs, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
                )
                where = stack.enter_context(cluster)
            elif scheduler == SLURM:
                unsaid = {
                    name: value
                    for name, value in _WORKER.items()
                    if settings.config.get(f"jobqueue.slurm.{name}", None) is None
                }
                where = stack.enter_context(SLURMCluster(**unsaid))
                where.scale(jobs=jobs)
            client = stack.enter_context(Client(where, timeout=_CONNECT_SECONDS))
        except (OSError, ValueError, RuntimeError) as error:
            reason = f"{error}".strip().partition("\n")[0] or type(error).__name__
            raise EnvironmentRefusal(
                f"--scheduler {scheduler}: {reason}; give the address of a scheduler that runs, such as "
                "tcp://10.0.0.1:8786, or local or slurm"
            ) from None
        yield client.get_executor(pure=False)


class Workers:
    """An executor that is opened when it is first needed, and once more where a worker's death has broken it."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._stack = contextlib.ExitStack()
        self._executor: Executor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *ending: object) -> None:
        self._stack.close()

    def run(
        self, task: Task, texts: Sequence[str], failed: Callable[[str], str], tell: Tell | None = None
    ) -> tuple[list[str], int]:
        """The answer to each text, and how many of them had to be asked for again because a worker was lost.

        What no worker answers runs once more in a process of its own; where it fails there, too, the answer is what
        `failed` makes of the reason.
        """
        answers: dict[int, str] = {}
        lost = 0
        for more in range(1 + _MORE_ROUNDS):
            missing = [number for number in range(len(texts)) if number not in answers]
            if not missing:
                break
            if more or self._executor is None:
                self._stack.close()
                self._executor = self._stack.enter_context(self._opened())
            executor, futures = self._executor, dict[int, Future[str]]()
            with contextlib.suppress(Exception):  # one that broke takes no more tasks
                for number in missing:
                    futures[number] = executor.submit(task, texts[number])
            for number, future in futures.items():
                # whatever an engine raises for a worker that was lost: what a task meets is its answer
                with contextlib.suppress(Exception):
                    answers[number] = future.result()
                    if tell is not None:
                        tell(len(answers), len(texts))
            lost += sum(number not in answers for number in missing)
        for number in range(len(texts)):
            if number not in answers:
                answers[number] = _alone(task, texts[number], failed)
        return [answers[number] for number in range(len(texts))], lost


def _alone(task: Task, text: str, failed: Callable[[str], str]) -> str:
    if not main_is_guarded():
        return task(text)
    with pool(1) as executor:
        future = executor.submit(task, text)
        error = future.exception()
    if error is None:
        return future.result()
    return failed(_KILLED if isinstance(error, BrokenProcessPool) else f"{type(error).__name__}: {error}")


_TRACES = ".traces-"
_STALE_SECONDS = 24 * 3600  # what is hidden in `reduced` and older was left by a process that was killed


class HostReduced(Struct, frozen=True):
    """What became of a host. `bytes` are those of its tables; `problem` says why there are none.

    `kept`: they were there already, of the same files. `lost`: how often a worker was lost, in the whole run, and what
    it was at was done again.
    """

    host: str
    folder: Path
    ranks: int = 0
    bytes: int = 0
    kept: bool = False
    problem: str | None = None
    left_out: tuple[str, ...] = ()
    lost: int = 0


def reduce_run(
    run: str | os.PathLike[str],
    hosts: Iterable[str] = (),
    *,
    out: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    force: bool = False,
) -> list[HostReduced]:
    """Reduce a run, or what some hosts recorded of it, to tables in `reduced/host-H` of its folder.

    Args:
        run: a run folder, or a folder with the traces of several ranks.
        hosts: names of hosts; all of them by default.
        out: the folder to make `reduced` in; `run` itself by default.
        executor: who reads traces side by side; this process, one by one, by default. It is handed functions of
            stepscope by name, with texts that hold paths: its workers must see the same files, and have stepscope.
        force: reduce also what has not changed since it was reduced.

    Raises `UnreadableInputError` for what is neither, `UsageError` for a host that there is not, and
    `EnvironmentRefusal` where nothing can be written.
    """
    folder = Path(run).absolute()
    found = plans(folder, hosts)
    return reduce_plans(found, Path(out or folder), lambda: contextlib.nullcontext(executor or Inline()), force=force)


def reduce_plans(
    found: Sequence[HostPlan], out: Path, opened: Opened, *, force: bool = False, tell: Tell | None = None
) -> list[HostReduced]:
    """Reduce hosts with the executors that `opened` gives; raises `EnvironmentRefusal`."""
    out = out.absolute()
    target = out / REDUCED
    indices = {} if force else {plan.host: index for plan in found if (index := _unchanged(plan, target)) is not None}
    todo = [plan for plan in found if plan.host not in indices]
    answers: dict[str, Made] = {}
    lost = 0
    if todo:
        try:
            if target.is_symlink():  # of a run that came from elsewhere it could lead anywhere
                raise NotADirectoryError(errno.ENOTDIR, "a symbolic link")
            target.mkdir(parents=True, exist_ok=True)
            for path in target.glob(f".*{PART}"):
                with contextlib.suppress(OSError):  # another is at it
                    if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                        shutil.rmtree(path, ignore_errors=True)
            parts = tempfile.mkdtemp(prefix=_TRACES, suffix=PART, dir=target)
        except OSError as error:
            reason = error.strerror or error
            raise EnvironmentRefusal(f"cannot write {target} ({reason}); name a folder with --out") from None
        try:
            with Workers(opened) as workers:
                answers, lost = _reduced(todo, out, Path(parts), workers, tell)
        finally:
            shutil.rmtree(parts, ignore_errors=True)
    made = []
    for plan in found:
        index, problem = indices.get(plan.host), answers[plan.host].problem if plan.host in answers else None
        folder = target / f"host-{plan.host}"
        if index is None and problem is None:
            try:
                index = read_host(folder)
            except (OSError, ValueError, pl.exceptions.PolarsError) as error:
                problem = f"{folder} was changed while it was read again ({error}); reduce it once more"
        made.append(
            HostReduced(
                host=plan.host,
                folder=folder,
                ranks=0 if index is None else len(index.ranks),
                bytes=0 if index is None else sum(table.bytes for table in index.tables.values()),
                kept=plan.host in indices,
                problem=problem,
                left_out=() if index is None else index.left_out,
                lost=lost if plan in todo else 0,
            )
        )
    return made


def _unchanged(plan: HostPlan, target: Path) -> Index | None:
    """The index of what the host was reduced to, if that is whole and was made of the very same files."""
    try:
        index = read_host(target / f"host-{plan.host}")
    except (OSError, ValueError, pl.exceptions.PolarsError):
        return None
    return index if index.source == plan.source else None


def _reduced(
    todo: Sequence[HostPlan], out: Path, parts: Path, workers: Workers, tell: Tell | None
) -> tuple[dict[str, Made], int]:
    traces = {
        plan.host: [
            TraceTask(plan.run, plan.host, plan.recorded, trace, str(parts / f"{number}-{place}"))
            for place, trace in enumerate(plan.traces())
        ]
        for number, plan in enumerate(todo)
    }
    texts = [msgspec.json.encode(task).decode() for tasks in traces.values() for task in tasks]
    answers, lost = workers.run(trace_task, texts, _failed, tell)
    made = iter(msgspec.json.decode(answer, type=Made) for answer in answers)
    hosts = [
        HostTask(plan, tuple(traces[plan.host]), tuple(next(made) for _ in traces[plan.host]), str(out))
        for plan in todo
    ]
    texts = [msgspec.json.encode(task).decode() for task in hosts]
    answers, more = workers.run(host_task, texts, _failed)
    decoded = (msgspec.json.decode(answer, type=Made) for answer in answers)
    return {plan.host: answer for plan, answer in zip(todo, decoded, strict=True)}, lost + more


def _failed(why: str) -> str:
    return msgspec.json.encode(Made(problem=why)).decode()


MAX_PART_BYTES = 2**30
_DAMAGED = (OSError, UnreadableInputError, pl.exceptions.PolarsError)


class TraceTask(Struct, frozen=True):
    run: str
    host: str
    recorded: bool
    trace: TracePlan
    target: str  # the file to write


class Made(Struct, frozen=True):
    """A file, or why there is none."""

    path: str = ""
    bytes: int = 0
    sha256: str = ""
    problem: str | None = None


class HostTask(Struct, frozen=True):
    plan: HostPlan
    traces: tuple[TraceTask, ...]
    made: tuple[Made, ...]  # of the traces
    target: str  # the folder in which `reduced` lies


def trace_task(text: str) -> str:
    """Reduce the trace of a `TraceTask` to a file; a `Made`, both as JSON."""
    task = msgspec.json.decode(text, type=TraceTask)
    try:
        data = msgspec.msgpack.encode(_rows_of(task))
        descriptor, part = tempfile.mkstemp(suffix=PART, dir=Path(task.target).parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, task.target)
        made = Made(task.target, len(data), hashlib.sha256(data).hexdigest())
    except _DAMAGED as error:
        made = Made(problem=str(error))
    return msgspec.json.encode(made).decode()


def _rows_of(task: TraceTask) -> TraceRows:
    trace = task.trace
    rank = RawRank(trace.process, trace.rank)
    if task.recorded:
        rank = read_rank_steps(Path(task.run) / trace.process)
    ref = TraceRef(Path(trace.path), trace.name, trace.owner)
    return reduce_trace(ref, rank, task.host, recorded=task.recorded)


def host_task(text: str) -> str:
    """Reduce the machine of a `HostTask` and write its tables; a `Made` of their index, both as JSON."""
    task = msgspec.json.decode(text, type=HostTask)
    try:
        traces, problems = [], list(task.plan.left_out)
        for trace, made in zip(task.traces, task.made, strict=True):
            rows = _again(trace, made)
            if isinstance(rows, str):
                problems.append(f"{trace.trace.process}/{trace.trace.name}: {rows}")
            else:
                traces.append((trace.trace.process, rows))
        plan = msgspec.structs.replace(task.plan, left_out=tuple(problems))
        index, frames = reduce_host(plan, traces)
        folder = write_host(Path(task.target), index, frames)
        data = read_small(folder / REDUCED_INDEX, MAX_INDEX_BYTES)
        answer = Made(str(folder), len(data), hashlib.sha256(data).hexdigest())
    except _DAMAGED as error:
        answer = Made(problem=str(error))
    return msgspec.json.encode(answer).decode()


def _again(task: TraceTask, made: Made) -> TraceRows | str:
    """What a trace was reduced to, made once more where its file is not the one told; or why there is nothing."""
    if made.problem is not None:
        return made.problem
    try:
        data = read_small(made.path, MAX_PART_BYTES)
        if len(data) == made.bytes and hashlib.sha256(data).hexdigest() == made.sha256:
            return msgspec.msgpack.decode(data, type=TraceRows)
    except (OSError, msgspec.MsgspecError):
        pass
    try:
        return _rows_of(task)
    except _DAMAGED as error:
        return str(error)
