"""`stepscope reduce`: a run reduced near its data, host by host, for a verdict over many ranks."""

from __future__ import annotations

import os
import socket
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli import say
from stepscope.cli.options import Quiet, argument, option
from stepscope.errors import UnreadableInputError, refuse
from stepscope.workers import usable_cores

if TYPE_CHECKING:
    from stepscope.reduction.engines import Opened
    from stepscope.reduction.plan import HostPlan
    from stepscope.reduction.run import HostReduced

MOST_JOBS = 8  # by default: each worker may need half a gigabyte
WORTH_BYTES = 8 * 10**6  # of traces; less is quicker without processes beside this one


def reduce(
    run: Annotated[Path, argument("RUN", "A run folder, or a folder with the traces of several ranks.")],
    host: Annotated[list[str] | None, option("--host H", "Only what this host recorded; repeatable.")] = None,
    engine: Annotated[
        str | None,
        option("--engine NAME", "Who reads the traces: inline, pool (processes here) or dask; by default what pays."),
    ] = None,
    scheduler: Annotated[
        str | None,
        option("--scheduler ADDRESS", "With --engine dask: that of a scheduler that runs, or local, or slurm."),
    ] = None,
    jobs: Annotated[int | None, option("--jobs N", "Processes or workers to start; one per core, 8 at most.")] = None,
    out: Annotated[
        Path | None, option("--out DIR", "Make DIR/reduced instead of RUN/reduced; of traces NAME-reduced by default.")
    ] = None,
    force: Annotated[bool, option("--force", "Reduce also what has not changed since it was reduced.")] = False,
    quiet: Quiet = False,
) -> None:
    """Reduce a run to a few small files for each host, from which a thousand ranks can be judged.

    RUN/reduced/host-H holds the steps of its ranks, collectives and device time of profiled steps, the lines that
    sampled stacks stood at, telemetry, metrics and events: about 25 bytes a step and rank. Raw traces stay where they
    are and are not needed any more: RUN/reduced, copied elsewhere, is enough for `stepscope analyze`. What has not
    changed since it was reduced is left as it is.

    In a job step with several tasks (`srun --ntasks-per-node=1 stepscope reduce RUN`) each task reduces what its own
    node recorded. Elsewhere all hosts are reduced that lie in RUN.

    With `--engine dask` Dask's workers read the traces: of a cluster of processes here (`--scheduler local`), of jobs
    of SLURM as the site's settings of dask-jobqueue describe them (`slurm`), or of a scheduler that runs. They must see
    RUN under the same path. All engines make the same bytes. Needs `pip install 'stepscope[cluster]'`.
    """
    from stepscope.reduction.plan import plans
    from stepscope.reduction.run import reduce_plans
    from stepscope.report import outputs

    _check(engine, scheduler, jobs)
    hosts = _own_host(run, quiet=quiet) if host is None else host
    if hosts == []:
        return
    folder = run.absolute()
    found = plans(folder, hosts or ())
    target = out or (folder if found[0].recorded else Path(f"{folder.name}-reduced"))
    with outputs.reading("reducing") as shown:

        def tell(done: int, of: int) -> None:
            if shown is not None:
                shown(f"{run.name}: traces", done, of)

        made = reduce_plans(found, target, _opened(engine, scheduler, jobs, found), force=force, tell=tell)
    for one in made if not quiet else ():
        _tell(one)
    for one in made:
        if one.problem is not None:
            say(f"host-{one.host}: {one.problem}")
    if all(one.problem is not None for one in made):
        raise typer.Exit(UnreadableInputError.exit_code)


def _check(engine: str | None, scheduler: str | None, jobs: int | None) -> None:
    from stepscope.reduction.engines import ENGINES

    refuse(
        {
            f"--engine {engine}: no such engine; there are {', '.join(ENGINES)}": engine not in (None, *ENGINES),
            "--scheduler says where Dask's workers are; add --engine dask": scheduler is not None and engine != "dask",
            "--scheduler: needs an address, local or slurm": scheduler == "",
            "--jobs takes a number from 1 on": jobs is not None and jobs < 1,
            "--jobs is about processes; not with --engine inline": jobs is not None and engine == "inline",
        }
    )


def _own_host(run: Path, *, quiet: bool) -> list[str] | None:
    """The host that this task of a job step reduces: one name, or none to do; None outside of such steps."""
    from stepscope.record.host.folder import safe_name
    from stepscope.record.host.scheduler import detect_scheduler
    from stepscope.reduction.plan import hosts_of

    task = detect_scheduler(os.environ, now=datetime.now())
    there = hosts_of(run)
    if task is None or task.identity is None or (task.members or 1) < 2 or not there:
        return None
    if task.local_index:  # the first task of a node does the node's part
        return []
    name = safe_name(task.host or socket.gethostname())
    if name in there:
        return [name]
    if not quiet:
        say(f"{name} recorded nothing of {run}; --host names one of {', '.join(there[:8])}")
    return []


def _opened(engine: str | None, scheduler: str | None, jobs: int | None, found: list[HostPlan]) -> Opened:
    from stepscope.reduction import engines

    cores = usable_cores()
    count = jobs or min(cores, MOST_JOBS)
    if engine == "dask":
        return lambda: engines.dask(scheduler or engines.LOCAL, count)
    if engine is None:
        sizes = [size for plan in found for size in plan.sizes()]
        engine = "pool" if len(sizes) > 1 and count > 1 and sum(sizes) >= WORTH_BYTES else "inline"
    return engines.Inline if engine == "inline" else lambda: engines.pool(count)


def _tell(one: HostReduced) -> None:
    from stepscope.report.escape import plain
    from stepscope.report.words import size, things

    if one.problem is not None:
        return
    how = "unchanged" if one.kept else "reduced"
    lost = f"; done again after a worker was lost: {one.lost}" if one.lost else ""
    print(
        f"host-{one.host}: {how}, {things(one.ranks, 'rank')}, {size(one.bytes)} in {plain(str(one.folder))}{lost}",
        file=sys.stderr,
    )
    for text in one.left_out:
        say(f"host-{one.host}: left out: {text}")
