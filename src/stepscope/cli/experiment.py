"""`stepscope experiment`: try changes on a training command without editing it, and say which of them help.

While it runs, stderr gets one line for each run that ended, with the estimate so far; a terminal also shows the run in
progress, how many are to come and the time they take.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from stepscope.cli import say
from stepscope.cli.options import Force, HtmlFile, JsonFile, OptionGroup, Priced, Quiet, argument, ignored_rules, option
from stepscope.errors import EnvironmentRefusal, StepscopeError, UnreadableInputError, UsageError

if TYPE_CHECKING:
    from rich.status import Status

    from stepscope.dashboard.blocks import Block
    from stepscope.experiment.folder import Made
    from stepscope.experiment.plan import Request, Slot
    from stepscope.experiment.propose import Proposals
    from stepscope.model.comparison import Candidate, Experiment, Outcome
    from stepscope.model.machine import Prices
    from stepscope.model.sweep import Sweep, Trial
    from stepscope.report import outputs
    from stepscope.sweep.space import Request as Search


_PAIRS = re.compile(r"(\d{1,3})(?::(\d{1,3}))?")
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*%?")
SIGNAL_STATUS = 128


class Asked(OptionGroup, frozen=True):
    """What is tried and how: all that makes one experiment, and the folder it is in."""

    tries: Annotated[
        list[str] | None, option("--try KNOB=V1,V2", "A change to try, one candidate per value; repeatable.")
    ] = None
    source: Annotated[
        str | None,
        option(
            "--from RUN|findings",
            "Try what the findings of this run suggest; findings: of a run that is recorded first.",
        ),
    ] = None
    together: Annotated[
        bool, option("--together", "All --try are one candidate (several values: every combination).")
    ] = False
    itself: Annotated[
        bool, option("--self", "The baseline against itself: the smallest effect this machine can show.")
    ] = False
    screen: Annotated[
        bool, option("--screen", "Switch all knobs in a two-level design, then confirm the best combination.")
    ] = False
    base: Annotated[
        list[str] | None, option("--base KNOB=VALUE", "A setting of every run, baseline included; repeatable.")
    ] = None
    quiet_machine: Annotated[
        bool, option("--quiet-machine", "Pin cores and threads, freeze garbage, of every run; name what stays noisy.")
    ] = False
    pairs: Annotated[
        str | None,
        option("--pairs MIN:MAX", "Pairs of runs per candidate, 5:10 by default; a clear effect ends after 3."),
    ] = None
    steps: Annotated[int | None, option("--steps N", "Measured steps of a run; chosen from the step time.")] = None
    warmup: Annotated[int | None, option("--warmup N", "Most steps of warm-up before them; found in the run.")] = None
    width: Annotated[str, option("--width X%", "A candidate's runs end when its interval is +-X %.")] = "2%"
    threshold: Annotated[str, option("--threshold X%", "Effects below this do not matter to you.")] = "1%"
    loss_band: Annotated[str, option("--loss-band X%", "How far a candidate's loss may lie from the baseline's.")] = (
        "5%"
    )
    budget: Annotated[float | None, option("--budget MIN", "Start no run that would end after MIN minutes.")] = None
    seed: Annotated[int, option("--seed N", "Seed of the first pair; every further pair has the next.")] = 0
    out: Annotated[Path | None, option("--out DIR", "The experiment's folder; named after it by default.")] = None

    def request(self, command: list[str]) -> Request:
        """Raises `UsageError` for what cannot be tried or contradicts itself."""
        from stepscope.comparison.thresholds import LEAST_PAIRS, MOST_PAIRS
        from stepscope.experiment.plan import FINDINGS, SELF_PAIRS, Request, candidates_of
        from stepscope.record.agent import knobs as table

        least, most = (SELF_PAIRS, SELF_PAIRS) if self.itself else (LEAST_PAIRS, MOST_PAIRS)
        if self.pairs is not None:
            match = _PAIRS.fullmatch(self.pairs.strip())
            if match is None:
                text = "not MIN:MAX; give two numbers, e.g. --pairs 3:10, or one for both"
                raise UsageError(f"--pairs {self.pairs}: {text}")
            least, most = int(match[1]), int(match[2] or match[1])
        if self.together and not self.tries:
            raise UsageError("--together is about --try; give --try KNOB=VALUE twice or more")
        source = self.source
        if source not in (None, FINDINGS) and not Path(str(source)).exists():
            raise UsageError(f"--from {source}: no such run; name a run folder, or findings to record one first")
        fixed = tuple(table.parse(text) for text in self.base or ())
        table.check_all(fixed)
        return Request(
            command=tuple(command),
            cwd=_working_folder(),
            candidates=candidates_of(self.tries or (), together=self.together),
            source=source if source in (None, FINDINGS) else os.path.abspath(str(source)),
            base_knobs=fixed,
            least_pairs=least,
            most_pairs=most,
            width=_fraction("--width", self.width),
            threshold=_fraction("--threshold", self.threshold),
            loss_band=_fraction("--loss-band", self.loss_band),
            budget_s=None if self.budget is None else self.budget * 60,
            **{name: getattr(self, name) for name in _AS_TYPED},
        )

    def line(self, command: list[str]) -> str:
        """The command line that asks for it again; options that are as by default are left out."""
        return _repeated("experiment", self, command, _IN_LINE, _SPELLED)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise EnvironmentRefusal("the working directory no longer exists; change to one that does") from None


def _script(command: Sequence[str]) -> str:
    """How the script of a command is called; raises `EnvironmentRefusal` where the command cannot be started."""
    from stepscope.record.host.command import CommandNotStarted, find_script, resolve_executable

    try:
        resolve_executable(command, os.environ)
    except CommandNotStarted as error:
        raise EnvironmentRefusal(str(error)) from None
    return find_script(command, os.environ, Path.cwd()).label


def _repeated(
    name: str,
    asked: OptionGroup,
    command: list[str],
    order: Sequence[str] = (),
    spelled: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The line of a command whose options are `asked`, in this `order`; those `spelled` have another name in Python."""
    line, usual = ["stepscope", name], type(asked)()
    for field in order or asked.__struct_fields__:
        option = "--" + spelled.get(field, field).replace("_", "-")
        value = getattr(asked, field)
        if value == getattr(usual, field):
            continue
        for each in value if isinstance(value, list) else [value]:
            text = f"{each:g}" if isinstance(each, float) else str(each)
            line += [option] if each is True else [option, text]
    return shlex.join([*line, "--", *command])


_AS_TYPED = ("screen", "itself", "quiet_machine", "steps", "warmup", "seed")
_SPELLED = {"tries": "try", "source": "from", "itself": "self"}  # options whose name is another one in Python
_IN_LINE = (
    *("out", "tries", "base", "source", "pairs", "steps", "warmup", "together", "itself", "screen"),
    *("quiet_machine", "width", "threshold", "loss_band", "seed", "budget"),
)


def experiment(
    command: Annotated[list[str], argument("COMMAND...", "The training command, unchanged.")],
    asked: Asked,
    fresh: Annotated[bool, option("--fresh", "Start anew where an unfinished experiment could be continued.")] = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    force: Force = False,
    quiet: Quiet = False,
    *,
    priced: Priced,
) -> None:
    """Try changes on a training command without editing it, and say with an interval which of them help.

    The command is run again and again for some 20 s of steps: as it is, and with each change, in turns, always in a
    fresh process, both of a pair with the same seed. A change is named by a knob: loader.num_workers,
    loader.prefetch_factor, loader.pin_memory, torch.num_threads, amp.dtype, compile and more (docs/knobs.md); env:NAME
    is an environment variable, arg:--flag an option of the script itself.

    Values are separated by commas, unless the whole is a value of its own: those of env: and arg: are never split
    (give --try again for another one). With --together all --try make one candidate.

    Stop it with Ctrl-C or kill it: the same command line goes on where it was. What came of it is in the folder that is
    printed (experiment.json, report.html, runs/), and every run there is one that `stepscope compare` reads.

    The exit status is 0 when it came to its end or that of its budget, whatever it found; 3 where the command cannot be
    measured again and again; 130 after Ctrl-C.
    """
    from stepscope.comparison.thresholds import Limits
    from stepscope.experiment.engine import Engine
    from stepscope.experiment.folder import claimed, find
    from stepscope.experiment.plan import FINDINGS, key
    from stepscope.experiment.runner import Processes, stop_requests
    from stepscope.report import experiment_report, outputs

    files = outputs.Plan(json_file=json_file, html_file=html_file, force=force)
    files.check()
    request, prices = asked.request(command), priced.prices()
    script = _script(request.command)
    folder, resumed = find(key(request), script, asked.out, fresh=fresh)

    @functools.cache
    def propose(pilot: Path | None, named: tuple[Candidate, ...]) -> Proposals:
        """What the findings of a run suggest, after what the user named."""
        from stepscope import api
        from stepscope.experiment.propose import baseline_of, proposals

        path = pilot if pilot is not None else Path(str(request.source))
        run = api.open_run(path, options=api.ReadOptions(ignored=ignored_rules()))
        base = baseline_of(run.analysis, run.diagnosis)
        return proposals(base, named, Limits(threshold=request.threshold, width=request.width))

    if request.source not in (None, FINDINGS) and not resumed:
        propose(None, request.candidates)  # a run that cannot be read is an error before anything is started

    def write(found: Experiment) -> None:
        outputs.write_file(folder / experiment_report.NAME, experiment_report.dumps(found))

    with claimed(folder), stop_requests() as stop, closing(Progress(quiet=quiet)) as progress:
        progress.note(f"{'going on with the unfinished experiment' if resumed else 'experiment'} in {folder}")
        conclusion = Engine(
            request=request,
            folder=folder,
            repeat=asked.line(command),
            run=Processes(stop, prices),
            write=write,
            propose=propose,
            listener=progress,
            stop=stop,
        ).conduct()
        progress.close()
        if conclusion.signal is None or conclusion.experiment.baseline:
            _show(request, conclusion.experiment, folder, files, prices, quiet=quiet)
        if conclusion.signal is not None and not quiet:
            say("stopped; the same command line goes on from here")
    _end(conclusion.trouble, conclusion.signal)


def _end(trouble: str | None, signal: int | None) -> NoReturn:
    if trouble is not None:
        raise UnreadableInputError(trouble)
    raise typer.Exit(0 if signal is None else SIGNAL_STATUS + signal)


def _show(
    request: Request, found: Experiment, folder: Path, files: outputs.Plan, prices: Prices, *, quiet: bool
) -> None:
    """The report of a run of the baseline with the experiment in it, and the table on the terminal.

    That run is the one that the findings are of, else one of the baseline.
    """
    from stepscope import api
    from stepscope.dashboard import single
    from stepscope.dashboard.pages import experiments
    from stepscope.experiment.folder import RUNS
    from stepscope.experiment.plan import FINDINGS
    from stepscope.report import experiment_report

    source = None if request.source in (None, FINDINGS) else Path(str(request.source))
    source = source if source is not None and source.is_dir() else None  # one of ours
    recorded = source
    if request.source == FINDINGS:
        recorded = next(iter(sorted((folder / RUNS).glob("*-pilot"))), None)
    elif request.source is None and found.baseline:
        recorded = Path(found.baseline[-1].path)
    report = None
    render: outputs.Render = experiments.render
    if recorded is not None:
        try:
            run = api.open_run(recorded, options=api.ReadOptions(prices=prices))
            report, render = run.report(), single.renderer(run)
        except StepscopeError:
            report = None  # the run may be gone; what was measured of it is not
    page = experiment_report.write(found, report, folder, render)[-1]
    if source is not None:
        # the candidates came from it, so it is the run that was opened above
        experiment_report.leave_with(found, source, render if report is not None else None)
    document = experiment_report.experiment_document(found)
    _put(document, None if quiet else experiments.screen(document), page, files)


def _put(document: dict[str, Any], shown: Iterable[Iterable[Block]] | None, page: Path, files: outputs.Plan) -> None:
    """Print what is to be `shown` of the document, and write the files that were asked for."""
    from stepscope.dashboard import terminal
    from stepscope.report import outputs
    from stepscope.report.escape import json_bytes

    if shown is not None:
        stream = sys.stderr if files.uses_stdout else sys.stdout
        terminal.show_search(document, shown, outputs.console(stream), page=str(page))
    if files.json_file is not None:
        outputs.emit(files.json_file, json_bytes(document))
    if files.html_file is not None:
        outputs.emit(files.html_file, page.read_bytes())


def _fraction(option: str, text: str) -> float:
    """ "2%" or "2" as 0.02; raises `UsageError`."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) < 100:
        raise UsageError(f"{option} {text}: not a percentage; give one above 0 and below 100, e.g. {option} 2%")
    return float(match[1]) / 100


class Progress:
    """The listener of an engine, of experiments or sweeps, that prints. `quiet` prints nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._stack = ExitStack()
        self._status: Status | None = None
        self._total = ""
        self._pairs: dict[str, int] = {}  # of each candidate, as of the run before
        if not quiet and sys.stderr.isatty():
            from stepscope.report import outputs

            self._status = self._stack.enter_context(outputs.console(sys.stderr).status("starting …"))

    def close(self) -> None:
        """Take the line of the run in progress away; what comes after is a report."""
        self._stack.close()
        self._status = None

    def note(self, text: str) -> None:
        if not self._quiet:
            say(text)

    def starting(self, slot: Slot, number: int, left: int | None, left_s: float | None) -> None:
        self._total = f"{number}" if left is None else f"{number} of about {number + max(left, 1) - 1}"
        self._now(f"run {self._total}", slot.label, left_s)

    def starting_trial(self, number: int, asked: int, label: str, left_s: float | None) -> None:
        self._total = f"{number} of {asked}"
        self._now(f"trial {self._total}", label, left_s)

    def finished_trial(self, trial: Trial, best: Trial | None) -> None:
        """One line for the trial: what it reached or why not, and the best so far."""
        from stepscope.report import sweep_report, words
        from stepscope.report.escape import plain

        said = ", ".join(sweep_report.number(value) for value in trial.values) or f"{trial.state}: {trial.reason}"
        took = f" ({words.seconds(trial.wall_s)})" if trial.wall_s is not None else ""
        names = (f"{sweep_report.bare(name)}={sweep_report.number(value)}" for name, value in trial.params.items())
        line = f"trial {self._total}, {plain(' '.join(names), 90)}: {said}{took}"
        self.note(line + (f"; best so far {sweep_report.number(best.value)}" if best is not None else ""))

    def _now(self, what: str, label: str, left_s: float | None) -> None:
        from stepscope.report.escape import plain

        if self._status is None:
            return
        time = ""
        if left_s is not None:
            time = f", about {f'{left_s:.0f} s' if left_s < 90 else f'{left_s / 60:.0f} min'} left"
        self._status.update(f"{what}{time}: {plain(label, 60)} …")

    def finished(self, made: Made, experiment: Experiment | None) -> None:
        """One line for the run: its step time or what went wrong, and the estimates that its pairs have changed."""
        from stepscope.report import words
        from stepscope.report.escape import plain

        said = made.failure or "no steps"
        if made.failure is None and made.measure is not None:
            withheld = next((flag for flag in made.measure.flags if flag.withholds), None)
            said = f"{words.milliseconds(made.measure.mean_ms)} a step"
            said += f", left out: {withheld.text}" if withheld else ""
        line = f"run {self._total}, {plain(made.slot.label)}: {said} ({words.seconds(made.wall_s)})"
        changed = []
        for tried in experiment.tried if experiment is not None else ():
            pairs = len(tried.outcome.pairs)
            if self._pairs.get(tried.candidate.name, 0) != pairs:
                changed.append(f"{plain(tried.candidate.name)} {_estimate(tried.outcome)}")
            self._pairs[tried.candidate.name] = pairs
        self.note(line + (f"; block {made.slot.block + 1}: {', '.join(changed)}" if changed else ""))


def _estimate(outcome: Outcome) -> str:
    """ "-27 % ± 4 %" of the headline; the verdict's words where there is no effect."""
    from stepscope.comparison.verdicts import percent

    effect = outcome.effects.get(outcome.headline)
    if effect is None:
        return outcome.verdict.text
    change = f"{percent(effect.ratio - 1, sign=True)} %"
    if effect.low is None or effect.high is None:
        return f"{change} so far"
    return f"{change} ± {percent((effect.high - effect.low) / 2)} %"


class Searched(OptionGroup, frozen=True):
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

    def request(self, command: list[str]) -> Search:
        """Raises `UsageError` for what cannot be searched or contradicts itself."""
        from stepscope.record.agent import knobs as table
        from stepscope.sweep.space import GRID, MOST_TRIALS, TRIALS, Request, objective, parameter

        fixed = tuple(table.parse(text) for text in self.base or ())
        table.check_all(fixed)
        usual = MOST_TRIALS if self.sampler == GRID else TRIALS
        return Request(
            command=tuple(command),
            cwd=_working_folder(),
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
    asked: Searched,
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

    The exit status is 0 when it came to its end or that of its budget; 3 where the command cannot be run; 130 after
    Ctrl-C.
    """
    from stepscope.experiment.folder import claimed, find
    from stepscope.experiment.runner import Processes, stop_requests
    from stepscope.report import outputs, sweep_report
    from stepscope.sweep.engine import SWEEP, Engine, held
    from stepscope.sweep.space import count, key
    from stepscope.sweep.study import library

    files = outputs.Plan(json_file=json_file, html_file=html_file, force=force)
    files.check()
    request = asked.request(command)
    library()
    script = _script(request.command)
    known = functools.partial(held, asked=count(request))
    folder, resumed = find(key(request), script, asked.out, fresh=fresh, what=SWEEP, held=known)

    def write(found: Sweep) -> None:
        outputs.write_file(folder / sweep_report.NAME, sweep_report.dumps(found))

    with claimed(folder, SWEEP), stop_requests() as stop, closing(Progress(quiet=quiet)) as progress:
        progress.note(f"{'going on with the unfinished sweep' if resumed else 'sweep'} in {folder}")
        conclusion = Engine(
            request=request,
            folder=folder,
            repeat=_repeated("sweep", asked, command),
            run=Processes(stop).run,
            write=write,
            listener=progress,
            stop=stop,
        ).conduct()
        progress.close()
        _show_sweep(conclusion.sweep, folder, files, quiet=quiet)
        if conclusion.signal is not None and not quiet:
            say("stopped; the same command line goes on from here")
    _end(conclusion.trouble, conclusion.signal)


def _show_sweep(found: Sweep, folder: Path, files: outputs.Plan, *, quiet: bool) -> None:
    """The report of the best trial with the sweep in it, and the table on the terminal."""
    from stepscope import api
    from stepscope.dashboard import single
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
    _put(document, None if quiet else sweeps.screen(document), page, files)
