"""`stepscope experiment`: try changes on a training command without editing it, and say which of them help."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct

from stepscope.cli.options import Force, HtmlFile, JsonFile, Quiet
from stepscope.errors import EnvironmentRefusal, UsageError

if TYPE_CHECKING:
    from stepscope.experiment.plan import Request
    from stepscope.experiment.propose import Proposals
    from stepscope.model.experiment import Candidate, Experiment
    from stepscope.report import outputs

_PAIRS = re.compile(r"(\d{1,3})(?::(\d{1,3}))?")
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*%?")
_SIGNAL_STATUS = 128
WIDTH, THRESHOLD, LOSS_BAND, SEED = "2%", "1%", "5%", 0


def experiment(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The training command, unchanged.")],
    tries: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="KNOB=V1,V2", help="A change to try, one candidate per value; repeatable."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN|findings",
            help="Try what the findings of this run suggest; findings: of a run that is recorded first.",
        ),
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="All --try are one candidate (several values: every combination).")
    ] = False,
    itself: Annotated[
        bool, typer.Option("--self", help="The baseline against itself: the smallest effect this machine can show.")
    ] = False,
    screen: Annotated[
        bool,
        typer.Option("--screen", help="Switch all knobs in a two-level design, then confirm the best combination."),
    ] = False,
    base: Annotated[
        list[str] | None,
        typer.Option("--base", metavar="KNOB=VALUE", help="A setting of every run, baseline included; repeatable."),
    ] = None,
    quiet_machine: Annotated[
        bool,
        typer.Option(
            "--quiet-machine", help="Pin cores and threads, freeze garbage, of every run; name what stays noisy."
        ),
    ] = False,
    pairs: Annotated[
        str | None,
        typer.Option(
            "--pairs",
            metavar="MIN:MAX",
            help="Pairs of runs per candidate, 5:10 by default; a clear effect ends after 3.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="Measured steps of a run; chosen from the step time.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option("--warmup", metavar="N", help="Most steps of warm-up before them; found in the run.")
    ] = None,
    width: Annotated[
        str, typer.Option("--width", metavar="X%", help="A candidate's runs end when its interval is +-X %.")
    ] = WIDTH,
    threshold: Annotated[
        str, typer.Option("--threshold", metavar="X%", help="Effects below this do not matter to you.")
    ] = THRESHOLD,
    loss_band: Annotated[
        str, typer.Option("--loss-band", metavar="X%", help="How far a candidate's loss may lie from the baseline's.")
    ] = LOSS_BAND,
    budget: Annotated[
        float | None, typer.Option("--budget", metavar="MIN", help="Start no run that would end after MIN minutes.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed of the first pair; every further pair has the next.")
    ] = SEED,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The experiment's folder; named after it by default.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew where an unfinished experiment could be continued.")
    ] = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    force: Force = False,
    quiet: Quiet = False,
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

    The exit status is 0 when it came to its end or that of its budget, whatever it found; 130 after Ctrl-C.
    """
    from stepscope.experiment.plan import Request, candidates_of
    from stepscope.record.agent import knobs as table
    from stepscope.report import outputs

    least, most = _pair_limits(pairs, itself)
    if together and not tries:
        raise UsageError("--together is about --try; give --try KNOB=VALUE twice or more")
    files = outputs.Plan(json_file=json_file, html_file=html_file, force=force)
    files.check()
    fixed = tuple(table.parse(text) for text in base or ())
    table.check_all(fixed)
    request = Request(
        command=tuple(command),
        cwd=_working_directory(),
        candidates=candidates_of(tries or (), together=together),
        source=_source(source),
        screen=screen,
        itself=itself,
        quiet_machine=quiet_machine,
        base_knobs=fixed,
        steps=steps,
        warmup=warmup,
        least_pairs=least,
        most_pairs=most,
        width=parse_percent("--width", width),
        threshold=parse_percent("--threshold", threshold),
        loss_band=parse_percent("--loss-band", loss_band),
        seed=seed,
        budget_s=None if budget is None else budget * 60,
    )
    options = _options(
        {
            "--out": (None if out is None else str(out), None),
            "--try": (tries, None),
            "--base": (base, None),
            "--from": (source, None),
            "--pairs": (pairs, None),
            "--steps": (steps, None),
            "--warmup": (warmup, None),
            "--together": (together, False),
            "--self": (itself, False),
            "--screen": (screen, False),
            "--quiet-machine": (quiet_machine, False),
            "--width": (width, WIDTH),
            "--threshold": (threshold, THRESHOLD),
            "--loss-band": (loss_band, LOSS_BAND),
            "--seed": (seed, SEED),
            "--budget": (budget, None),
        }
    )
    call = Call(request, shlex.join(["stepscope", "experiment", *options, "--", *command]), files, quiet)
    status = call.conduct(out, fresh=fresh)
    raise typer.Exit(status)


class Call(Struct, frozen=True):
    """One call of the command: what is asked for, the line that asks it again, and what is to be written."""

    request: Request
    line: str
    files: outputs.Plan
    quiet: bool

    def conduct(self, out: Path | None, *, fresh: bool) -> int:
        """Find the folder, run the experiment in it, show what came of it; returns the exit status."""
        from stepscope.cli.checks import say
        from stepscope.cli.experiment_progress import Progress
        from stepscope.experiment import folder
        from stepscope.experiment.engine import Engine, Parts
        from stepscope.experiment.plan import key
        from stepscope.experiment.result import Frame
        from stepscope.experiment.runner import Processes, StopRequests

        script = _script(self.request.command)
        identity = key(self.request)
        place = folder.find(identity, script, out, fresh=fresh)
        propose = self._proposer(place.resumed)

        def write(found: Experiment) -> None:
            from stepscope.report import experiment_report, outputs

            outputs.write_file(place.folder / experiment_report.NAME, experiment_report.dumps(found))

        with folder.claimed(place.folder), StopRequests() as stop, Progress(quiet=self.quiet) as progress:
            progress.begin(place.folder, resumed=place.resumed)
            parts = Parts(
                frame=Frame(request=self.request, folder=str(place.folder), repeat=self.line),
                key=identity,
                run=Processes(stop),
                write=write,
                propose=propose,
                listener=progress,
                stop=stop,
            )
            conclusion = Engine(parts).conduct()
            progress.close()
            if conclusion.signal is None or conclusion.experiment.baseline:
                self._show(conclusion.experiment, place.folder)
            if conclusion.signal is not None and not self.quiet:
                say("stopped; the same command line goes on from here")
        return 0 if conclusion.signal is None else _SIGNAL_STATUS + conclusion.signal

    def _proposer(self, resumed: bool) -> Callable[[Path | None, tuple[Candidate, ...]], Proposals]:
        """What the findings of a run suggest, after what the user named.

        A run that cannot be read is an error before anything is started.
        """
        from stepscope.experiment.plan import FINDINGS

        request = self.request

        def propose(pilot: Path | None, named: tuple[Candidate, ...]) -> Proposals:
            from stepscope import api
            from stepscope.cli import settings
            from stepscope.experiment.propose import baseline_of, proposals

            path = pilot if pilot is not None else Path(str(request.source))
            run = api.open_run(path, options=api.ReadOptions(ignored=settings.load().ignore))
            base = baseline_of(run.analysis, run.diagnosis)
            return proposals(base, named, threshold=request.threshold, width=request.width)

        if request.source in (None, FINDINGS) or resumed:
            return propose
        found = propose(None, request.candidates)
        return lambda pilot, named: found  # noqa: ARG005 - what the engine would pass is known

    def _show(self, found: Experiment, folder: Path) -> None:
        """The report of a run of the baseline with the experiment in it, and the table on the terminal."""
        from stepscope import api
        from stepscope.dashboard import single
        from stepscope.dashboard.pages import experiments
        from stepscope.errors import StepscopeError
        from stepscope.report import experiment_report, outputs

        report = None
        render: outputs.Render = experiments.render
        recorded = _diagnosed(self.request, found, folder)
        if recorded is not None:
            try:
                run = api.open_run(recorded)
                report, render = run.report(), single.renderer(run)
            except StepscopeError:
                report = None  # the run may be gone; what was measured of it is not
        page = experiment_report.write(found, report, folder, render)[-1]
        if (source := _source_run(self.request)) is not None:
            # the candidates came from it, so it is the run that was opened above
            experiment_report.leave_with(found, source, render if report is not None else None)
        document = experiment_report.experiment_document(found)
        if not self.quiet:
            stream = sys.stderr if self.files.uses_stdout else sys.stdout
            experiment_report.render(document, outputs.console(stream), page=str(page))
        if self.files.json_file is not None:
            outputs.emit(self.files.json_file, experiment_report.dumps(found))
        if self.files.html_file is not None:
            outputs.emit(self.files.html_file, page.read_bytes())


def _diagnosed(request: Request, found: Experiment, folder: Path) -> Path | None:
    """The run whose report goes with the experiment: the one that the findings are of, else one of the baseline."""
    from stepscope.experiment.folder import RUNS
    from stepscope.experiment.plan import FINDINGS

    if request.source == FINDINGS:
        return next(iter(sorted((folder / RUNS).glob("*-pilot"))), None)
    if request.source is not None:
        return _source_run(request)
    return Path(found.baseline[-1].path) if found.baseline else None


def parse_percent(option: str, text: str) -> float:
    """ "2%" or "2" as 0.02; raises `UsageError`."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) < 100:
        raise UsageError(f"{option} {text}: not a percentage; give one above 0 and below 100, e.g. {option} 2%")
    return float(match[1]) / 100


def _pair_limits(text: str | None, itself: bool) -> tuple[int, int]:
    from stepscope.comparison.thresholds import LEAST_PAIRS, MOST_PAIRS
    from stepscope.experiment.plan import SELF_PAIRS

    if text is None:
        return (SELF_PAIRS, SELF_PAIRS) if itself else (LEAST_PAIRS, MOST_PAIRS)
    match = _PAIRS.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--pairs {text}: not MIN:MAX; give two numbers, e.g. --pairs 3:10, or one for both")
    return int(match[1]), int(match[2] or match[1])


def _source(text: str | None) -> str | None:
    from stepscope.experiment.plan import FINDINGS

    if text is None or text == FINDINGS:
        return text
    if not Path(text).exists():
        raise UsageError(f"--from {text}: no such run; name a run folder, or findings to record one first")
    return os.path.abspath(text)


def _source_run(request: Request) -> Path | None:
    """The run folder that the candidates came from, where it is one of ours."""
    from stepscope.experiment.plan import FINDINGS

    if request.source == FINDINGS or request.source is None:
        return None
    path = Path(request.source)
    return path if path.is_dir() else None


def _script(command: tuple[str, ...]) -> str:
    """The name of what is run; raises what `stepscope run` raises for a command that cannot be started."""
    from stepscope.record.host.command import CommandNotStarted, find_script, resolve_executable

    try:
        resolve_executable(command, os.environ)
    except CommandNotStarted as error:
        raise EnvironmentRefusal(str(error)) from None
    return find_script(command, os.environ, Path.cwd()).label


def _options(given: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """The options of a call as words, of each its value and its default; those that are as by default are left out."""
    words: list[str] = []
    for option, (value, default) in given.items():
        if value == default:
            continue
        if value is True:
            words.append(option)
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [option, f"{each:g}" if isinstance(each, float) else str(each)]
    return words


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise EnvironmentRefusal("the working directory no longer exists; change to one that does") from None
