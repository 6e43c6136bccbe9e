"""`stepscope sweep`: search values of knobs for the best metric, and say which of them decide it."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli import say
from stepscope.cli.experiment import SIGNAL_STATUS, Progress, repeated
from stepscope.cli.options import Force, HtmlFile, JsonFile, OptionGroup, Quiet, argument, option
from stepscope.errors import EnvironmentRefusal, StepscopeError, UnreadableInputError

if TYPE_CHECKING:
    from stepscope.model.sweep import Sweep
    from stepscope.report import outputs
    from stepscope.sweep.space import Request


class Asked(OptionGroup, frozen=True):
    """What is searched and how: all that makes one sweep, and the folder it is in."""

    param: Annotated[
        list[str] | None,
        option("--param KNOB=VALUES", "A knob and its values: LOW..HIGH, log:LOW..HIGH or a,b,c; repeatable."),
    ] = None
    metric: Annotated[
        list[str] | None,
        option("--metric NAME:min|max", "The metric to judge by, or seconds; twice for two objectives."),
    ] = None
    metric_of: Annotated[
        str,
        option("--metric-of FIGURE", "Which of its values counts: last, best, or tail, the mean of its last tenth."),
    ] = "last"
    base: Annotated[list[str] | None, option("--base KNOB=VALUE", "A setting of every trial; repeatable.")] = None
    trials: Annotated[int | None, option("--trials N", "Trials to make; 20 by default, of a grid all.")] = None
    sampler: Annotated[str, option("--sampler NAME", "How values are chosen: tpe, random or grid.")] = "tpe"
    seed: Annotated[int, option("--seed N", "Seed of the choice, and of every trial.")] = 0
    prune_after: Annotated[
        int | None,
        option("--prune-after STEPS", "Every STEPS training steps, end a trial that is worse than half of the others."),
    ] = None
    budget: Annotated[float | None, option("--budget MIN", "Start no trial that would end after MIN minutes.")] = None
    out: Annotated[Path | None, option("--out DIR", "The sweep's folder; named after it by default.")] = None

    def request(self, command: list[str]) -> Request:
        """Raises `UsageError` for what cannot be searched or contradicts itself."""
        from stepscope.record.agent import knobs as table
        from stepscope.sweep.space import GRID, MOST_TRIALS, TRIALS, Request, objective, parameter

        fixed = tuple(table.parse(text) for text in self.base or ())
        table.check_all(fixed)
        try:
            cwd = os.getcwd()
        except OSError:
            raise EnvironmentRefusal("the working directory no longer exists; change to one that does") from None
        usual = MOST_TRIALS if self.sampler == GRID else TRIALS
        return Request(
            command=tuple(command),
            cwd=cwd,
            params=tuple(parameter(text) for text in self.param or ()),
            objectives=tuple(objective(text, self.metric_of) for text in self.metric or ()),
            base_knobs=fixed,
            sampler=self.sampler,
            seed=self.seed,
            prune_after=self.prune_after,
            trials=usual if self.trials is None else self.trials,
            budget_s=None if self.budget is None else self.budget * 60,
        )


def sweep(
    command: Annotated[list[str], argument("COMMAND...", "The training command, unchanged.")],
    asked: Asked,
    fresh: Annotated[bool, option("--fresh", "Start anew where an unfinished sweep could be continued.")] = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Search values of knobs for the best metric, and say which knobs decide it.

    The command is run once per trial, whole and in a fresh process, with values that Optuna chooses. A knob is what
    `stepscope run --knob` takes (docs/knobs.md): arg:--lr is an option of the script itself, env:NAME an environment
    variable, loader.num_workers and the like are torch's.

    A metric is one that the run recorded (docs/metrics.md): what the script logs to a tracker or by stepscope.log, or
    train/loss, which is found by itself; seconds is the time from its first step to the end of its last. A trial
    without it, or with one that is no finite number, has failed. Two metrics give the trials that no other beats in
    both.

    Stop it with Ctrl-C or kill it: the same command line goes on where it was, with more --trials too. What came of it
    is in the folder that is printed (sweep.json, report.html, runs/). Nothing needs a network.

    The exit status is 0 when it came to its end or that of its budget; 130 after Ctrl-C.
    """
    from functools import partial

    from stepscope.experiment.folder import claimed, find
    from stepscope.experiment.runner import Processes, stop_requests
    from stepscope.record.host.command import CommandNotStarted, find_script, resolve_executable
    from stepscope.report import outputs, sweep_report
    from stepscope.sweep.engine import SWEEP, Engine, held
    from stepscope.sweep.space import count, key
    from stepscope.sweep.study import library

    files = outputs.Plan(json_file=json_file, html_file=html_file, force=force)
    files.check()
    request = asked.request(command)
    library()
    try:
        resolve_executable(request.command, os.environ)
    except CommandNotStarted as error:
        raise EnvironmentRefusal(str(error)) from None
    script = find_script(request.command, os.environ, Path.cwd()).label
    known = partial(held, asked=count(request))
    folder, resumed = find(key(request), script, asked.out, fresh=fresh, what=SWEEP, held=known)

    def write(found: Sweep) -> None:
        outputs.write_file(folder / sweep_report.NAME, sweep_report.dumps(found))

    with claimed(folder, SWEEP), stop_requests() as stop, closing(Progress(quiet=quiet)) as progress:
        progress.note(f"{'going on with the unfinished sweep' if resumed else 'sweep'} in {folder}")
        conclusion = Engine(
            request=request,
            folder=folder,
            repeat=repeated("sweep", asked, command),
            run=Processes(stop).run,
            write=write,
            listener=progress,
            stop=stop,
        ).conduct()
        progress.close()
        _show(conclusion.sweep, folder, files, quiet=quiet)
        if conclusion.signal is not None and not quiet:
            say("stopped; the same command line goes on from here")
    if conclusion.trouble is not None:
        raise UnreadableInputError(conclusion.trouble)
    raise typer.Exit(0 if conclusion.signal is None else SIGNAL_STATUS + conclusion.signal)


def _show(found: Sweep, folder: Path, files: outputs.Plan, *, quiet: bool) -> None:
    """The report of the best trial with the sweep in it, and the table on the terminal."""
    from stepscope import api
    from stepscope.dashboard import single, terminal
    from stepscope.dashboard.pages import sweeps
    from stepscope.experiment.folder import RUNS
    from stepscope.report import outputs, sweep_report

    document = sweep_report.sweep_document(found)
    report = sweeps.alone(document)
    render: outputs.Render = sweeps.render
    best = document["best"]
    if best is not None and best["folder"]:
        try:
            run = api.open_run(folder / RUNS / best["folder"])
            report, render = sweeps.beside(run.report(), document), single.renderer(run)
        except StepscopeError:
            pass  # the run may be gone; what was read of it is not
    page = outputs.write(report, folder, render)[1]
    if not quiet:
        stream = sys.stderr if files.uses_stdout else sys.stdout
        terminal.show_sweep(document, outputs.console(stream), page=str(page))
    if files.json_file is not None:
        outputs.emit(files.json_file, sweep_report.dumps(found))
    if files.html_file is not None:
        outputs.emit(files.html_file, page.read_bytes())
