"""Reduce a run: all of it, or what one host recorded of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import msgspec
import polars as pl
from msgspec import Struct

from stepscope.errors import EnvironmentRefusal
from stepscope.reduction.engines import Inline, Opened, Tell, Workers, given
from stepscope.reduction.plan import HostPlan, plans
from stepscope.reduction.tasks import HostTask, Made, TraceTask, host_task, trace_task
from stepscope.schema import REDUCED
from stepscope.tables.reduced import PART, Index, read_host

_TRACES = ".traces-"
_STALE_SECONDS = 24 * 3600  # what is hidden in `reduced` and older was left by a process that was killed
_KILLED = "the process that read it was killed each time, mostly for want of memory; reduce it where there is more"


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
    return reduce_plans(found, Path(out or folder), partial(given, executor or Inline()), force=force)


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
            target.mkdir(parents=True, exist_ok=True)
            _remove_stale(target)
            parts = tempfile.mkdtemp(prefix=_TRACES, suffix=PART, dir=target)
        except OSError as error:
            reason = error.strerror or error
            raise EnvironmentRefusal(f"cannot write {target} ({reason}); name a folder with --out") from None
        try:
            with Workers(opened) as workers:
                answers, lost = _reduced(todo, out, Path(parts), workers, tell)
        finally:
            shutil.rmtree(parts, ignore_errors=True)
    return [
        _told(plan.host, target, indices.get(plan.host), answers.get(plan.host), lost if plan in todo else 0)
        for plan in found
    ]


def _told(host: str, target: Path, kept: Index | None, made: Made | None, lost: int) -> HostReduced:
    folder, index, problem = target / f"host-{host}", kept, made.problem if made is not None else None
    if index is None and problem is None:
        try:
            index = read_host(folder)
        except (OSError, ValueError, pl.exceptions.PolarsError) as error:
            problem = f"{folder} was changed while it was read again ({error}); reduce it once more"
    if index is None:
        return HostReduced(host, folder, problem=problem, lost=lost)
    return HostReduced(
        host=host,
        folder=folder,
        ranks=len(index.ranks),
        bytes=sum(table.bytes for table in index.tables.values()),
        kept=kept is not None,
        left_out=index.left_out,
        lost=lost,
    )


def _unchanged(plan: HostPlan, target: Path) -> Index | None:
    """The index of what the host was reduced to, if that is whole and was made of the very same files."""
    try:
        index = read_host(target / f"host-{plan.host}")
    except (OSError, ValueError, pl.exceptions.PolarsError):
        return None
    return index if index.source == plan.source else None


def _remove_stale(target: Path) -> None:
    for path in target.glob(f".*{PART}"):
        with contextlib.suppress(OSError):  # another is at it
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _reduced(
    todo: Sequence[HostPlan], out: Path, parts: Path, workers: Workers, tell: Tell | None
) -> tuple[dict[str, Made], int]:
    """What became of each host, and how many tasks were done again."""
    killed = msgspec.json.encode(Made(problem=_KILLED)).decode()
    traces = {
        plan.host: [
            TraceTask(plan.run, plan.host, plan.recorded, trace, str(parts / f"{number}-{place}"))
            for place, trace in enumerate(plan.traces())
        ]
        for number, plan in enumerate(todo)
    }
    texts = [msgspec.json.encode(task).decode() for tasks in traces.values() for task in tasks]
    answers, lost = workers.run(trace_task, texts, killed, tell)
    made = iter(msgspec.json.decode(answer, type=Made) for answer in answers)
    hosts = [
        HostTask(plan, tuple(traces[plan.host]), tuple(next(made) for _ in traces[plan.host]), str(out))
        for plan in todo
    ]
    texts = [msgspec.json.encode(task).decode() for task in hosts]
    answers, more = workers.run(host_task, texts, killed)
    decoded = (msgspec.json.decode(answer, type=Made) for answer in answers)
    return {plan.host: answer for plan, answer in zip(todo, decoded, strict=True)}, lost + more
