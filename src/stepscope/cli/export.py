"""`stepscope export`: traces, cut and merged, as one Chrome trace for a viewer; with `--to`, a run for another tool."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli import say
from stepscope.cli.options import (
    Force,
    NoSource,
    OptionGroup,
    Quiet,
    Steps,
    argument,
    ignored_rules,
    option,
    parse_steps,
)
from stepscope.errors import UnreadableInputError, UsageError, refuse
from stepscope.workers import usable_cores

if TYPE_CHECKING:
    from stepscope.reduction.plan import HostPlan
    from stepscope.reduction.run import HostReduced, Opened


MOST_HOSTS = 16  # whose clocks are told on the terminal; the file tells all


class SinkOptions(OptionGroup, frozen=True):
    to: Annotated[
        str | None,
        option("--to TOOL", "Give the run to csv, parquet, tensorboard, wandb, mlflow or trackio."),
    ] = None
    project: Annotated[
        str | None, option("--project NAME", "With --to wandb, mlflow or trackio: the project or experiment.")
    ] = None
    follow: Annotated[
        bool, option("--follow", "With --to tensorboard: go on while the run does, until it ends or Ctrl-C.")
    ] = False
    resume: Annotated[
        str | None, option("--resume ID", "With --to wandb: add to this run of yours, which must be over.")
    ] = None

    def check(self) -> None:
        """Raises `UsageError` for options that mean nothing."""
        refuse(
            {
                "--follow writes event files; add --to tensorboard": self.follow and self.to != "tensorboard",
                "--resume names a run of W&B; add --to wandb": self.resume is not None and self.to != "wandb",
                "--resume: needs the id of a run": self.resume == "",
                "--project belongs to --to wandb, mlflow or trackio": (
                    self.project is not None and self.to not in ("wandb", "mlflow", "trackio")
                ),
            }
        )


def export(
    paths: Annotated[list[Path], argument("PATH...", "Traces, folders of traces, or the folder of a run.")],
    out: Annotated[
        str | None,
        option(
            "--out -o FILE", "The file to write, packed if it ends in .gz; with --to a folder, or MLflow's database."
        ),
    ] = None,
    steps: Steps = None,
    time_range: Annotated[
        str | None, option("--range START:END", "Only this time since the trace's start: 100ms:1.5s.")
    ] = None,
    rank: Annotated[list[int] | None, option("--rank N", "Only this rank; repeatable.")] = None,
    categories: Annotated[
        list[str] | None, option("--categories NAMES", "Only slices of these categories: kernel,cpu_op.")
    ] = None,
    *,
    sink: SinkOptions,
    no_source: NoSource = False,
    force: Force = False,
) -> None:
    """Cut traces and merge ranks into one file that Perfetto opens; with --to, give a run to another tool.

    Events that overlap a cut's border are kept whole. Names and durations stay what they are, to the nanosecond; of
    the traces' metadata only what is known to be harmless is copied.

    With `--to` a run's metrics, phases and telemetry go there with their times and our step as axis, its findings as
    summary, notes and table, and report.html as a file. csv, parquet and tensorboard write a folder, by default below
    stepscope-exports; wandb an offline run, which `wandb sync` uploads; mlflow and trackio take your own settings where
    `--out` names no other place. A second export to tensorboard, mlflow or trackio adds what is new, and nothing twice.
    """
    sink.check()
    if sink.to is not None:
        cut_only = {"--steps": steps, "--range": time_range, "--rank": rank, "--categories": categories}
        refuse({f"{name} cuts a trace; not with --to": value is not None for name, value in cut_only.items()})
        _send(paths, sink, out, source=not no_source, force=force)
        return
    if out is None:
        raise UsageError("--out: which file? name one, or give the run to a tool with --to")
    refuse({"--no-source belongs to --to: a trace holds no source text": no_source})
    _cut(paths, Path(out), steps, time_range, rank, categories, force)


def _cut(
    paths: list[Path],
    out: Path,
    steps: str | None,
    time_range: str | None,
    rank: list[int] | None,
    categories: list[str] | None,
    force: bool,
) -> None:
    from stepscope import export as layer
    from stepscope.report.escape import plain

    cut = layer.Cut(
        steps=parse_steps(steps),
        range_ns=layer.parse_range(time_range) if time_range is not None else None,
        ranks=tuple(rank or ()),
        categories=layer.parse_categories(categories),
    )
    with _progress() as report:
        done = layer.export(paths, out, cut, force=force, progress=report)
    for problem in done.problems:
        say(problem)
    for one in done.moves[:MOST_HOSTS]:
        say(one.sentence)
    if len(done.moves) > MOST_HOSTS:
        say(f"{len(done.moves) - MOST_HOSTS} more hosts: stepscopeClocks in the file says what was done with them")
    ranks = f", {done.ranks} ranks" if done.ranks > 1 else ""
    lost = f"; {done.lost:,} could not be read" if done.lost else ""
    size = f"{done.bytes / 10**6:.1f} MB, {done.slices:,} slices{ranks}{lost}"
    print(f"Wrote {plain(done.path)} ({size})", file=sys.stderr)


def _send(paths: list[Path], wanted: SinkOptions, out: str | None, *, source: bool, force: bool) -> None:
    from stepscope import api
    from stepscope.report import outputs, words
    from stepscope.report.escape import plain
    from stepscope.sinks import Target, exported, mlflow, one_at_a_time, tensorboard, trackio, wandb
    from stepscope.sinks.exported import Exported

    tools = {
        "csv": exported.csv,
        "parquet": exported.parquet,
        "tensorboard": tensorboard.tensorboard,
        "wandb": wandb.wandb,
        "mlflow": mlflow.mlflow,
        "trackio": trackio.trackio,
    }
    to = str(wanted.to)
    if to not in tools:
        raise UsageError(f"--to {to}: no such tool; there are {', '.join(tools)}")
    target = Target(out, wanted.project, wanted.resume, force)

    def opened() -> Exported:
        options = api.ReadOptions(ignored=ignored_rules(), keep=False)
        return Exported(api.open_run(*paths, options=options), source=source)

    if wanted.follow:
        say("following the run until it ends; Ctrl-C ends this before")
        sent = tensorboard.follow(opened, target)
    else:
        run = opened()
        with outputs.progress(f"exporting to {to}"), one_at_a_time(run.folder):
            sent = tools[to](run, target)
        for text in run.absent:
            say(text)
    for text in sent.remarks:
        say(text)
    added = f"Wrote {words.things(sent.points, 'value')} to" if sent.points else "No new value for"
    print(f"{added} {plain(sent.where)}", file=sys.stderr)
    if sent.then is not None:
        print(f"Next {plain(sent.then)}", file=sys.stderr)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """Shows the share done on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from stepscope.report import outputs

    with outputs.console(sys.stderr).status("exporting …") as status:
        yield lambda share: status.update(f"exporting … {share:.0%}")


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
    from stepscope.reduction.run import ENGINES

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
    from stepscope.reduction import run

    cores = usable_cores()
    count = jobs or min(cores, MOST_JOBS)
    if engine == "dask":
        return lambda: run.dask(scheduler or run.LOCAL, count)
    if engine is None:
        sizes = [size for plan in found for size in plan.sizes()]
        engine = "pool" if len(sizes) > 1 and count > 1 and sum(sizes) >= WORTH_BYTES else "inline"
    return run.Inline if engine == "inline" else lambda: run.pool(count)


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
