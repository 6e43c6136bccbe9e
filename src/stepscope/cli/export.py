"""`stepscope export`: traces, cut and merged, as one Chrome trace for a viewer; with `--to`, a run for another tool."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from stepscope.cli import say
from stepscope.cli.options import Force, NoSource, OptionGroup, Steps, argument, option, parse_steps
from stepscope.errors import UsageError, refuse

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
    from stepscope.cli.settings import ignored_rules
    from stepscope.report import outputs, words
    from stepscope.report.escape import plain
    from stepscope.sinks import Target, files, mlflow, tensorboard, trackio, wandb
    from stepscope.sinks.exported import Exported

    tools = {
        "csv": files.csv,
        "parquet": files.parquet,
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
        with outputs.progress(f"exporting to {to}"):
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
