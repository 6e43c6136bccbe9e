"""`stepscope run`: parse, record, then report; ends with the command's own status whatever becomes of the report."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from stepscope.cli import checks, say
from stepscope.cli.options import (
    FailOn,
    Force,
    JsonFile,
    NoSource,
    Priced,
    Quiet,
    Rate,
    RunFolder,
    argument,
    option,
    parse_checks,
)
from stepscope.cli.settings import ignored_rules, watch_share
from stepscope.errors import StepscopeError, UsageError
from stepscope.record.agent.knobs import parse
from stepscope.record.host.options import DEFAULT_RATE_HZ, RecordOptions, parse_window
from stepscope.report import outputs
from stepscope.report.document import report_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stepscope.api import Run
    from stepscope.record.host.folder import Part
    from stepscope.record.host.launch import Outcome
    from stepscope.record.host.openmetrics import Endpoint


def run(
    command: Annotated[list[str], argument("COMMAND...", "The training command, unchanged.")],
    out: RunFolder = None,
    name: Annotated[str | None, option("--name NAME", "A name for the run; the script's by default.")] = None,
    tag: Annotated[list[str] | None, option("--tag TAG", "A tag to find the run by; repeatable.")] = None,
    rate: Rate = DEFAULT_RATE_HZ,
    window: Annotated[
        str | None,
        option(
            "--window SCHEDULE",
            "When torch.profiler records: skip_first=,wait=,warmup=,active=,repeat=. Once step time is steady by "
            "default.",
        ),
    ] = None,
    no_window: Annotated[bool, option("--no-window", "Never open torch.profiler.")] = False,
    window_memory: Annotated[
        bool | None,
        option(
            "--window-memory/--no-window-memory",
            "Record allocations in windows. In one more window, where memory grows or is nearly full, by default.",
        ),
    ] = None,
    max_steps: Annotated[
        int | None,
        option("--max-steps N", "End the command with SIGINT after N steps (SIGTERM where it ignores that)."),
    ] = None,
    knob: Annotated[
        list[str] | None, option("--knob KNOB=VALUE", "Train with a change, the script unedited; repeatable.")
    ] = None,
    seed: Annotated[int | None, option("--seed N", "Seed Python, numpy and torch before the script starts.")] = None,
    watch: Annotated[
        bool,
        option(
            "--watch", "Monitor norms of gradients, weights and updates, and activations, in at most 1 % of the time."
        ),
    ] = False,
    metrics_port: Annotated[
        int | None,
        option("--metrics-port PORT", "Serve how the run is as OpenMetrics on 127.0.0.1; 0 takes a free port."),
    ] = None,
    no_report: Annotated[
        bool, option("--no-report", "Record only; `stepscope analyze` makes the report later.")
    ] = False,
    quiet: Quiet = False,
    json_file: JsonFile = None,
    no_source: NoSource = False,
    force: Force = False,
    fail_on: FailOn = None,
    *,
    priced: Priced,
) -> None:
    """Record a training command and report where its time goes.

    Everything of ours goes to stderr, after the command has ended, but for the address of `--metrics-port`. The exit
    status is the command's own.

    `--knob` tries one change by hand: `--knob loader.num_workers=4`, `--knob env:OMP_NUM_THREADS=2`, `--knob
    arg:--batch-size=64`; docs/knobs.md names them all, and the report says what could not be applied.

    `stepscope run --watch -- python train.py` says how large gradients, weights and updates of each layer are, and what
    modules put out, in few steps, which count for no other figure (docs/metrics.md). So do `[watch]` with `on = true`
    in stepscope.toml and STEPSCOPE_WATCH=1; STEPSCOPE_WATCH=0 says no where the file says yes.

    `stepscope run --metrics-port 9464 -- python train.py` lets Prometheus, or W&B itself, read steps, losses and the
    machine once a second (docs/live.md). STEPSCOPE_METRICS_TOKEN is the token that they have to give.

    With `--fail-on`, a command that ended with 0 gives 1 if its run holds what was named, after the report, and 4 if
    there is no report to tell from; so does one that `--max-steps` has ended. Where several launchers share one job,
    the last one to end reports and checks; the others keep their command's status. Of more than 16 launchers each
    machine first reduces what it recorded (docs/cluster.md).
    """
    from stepscope.record.host.folder import part_in_report, reduces, say_done
    from stepscope.record.host.launch import launch
    from stepscope.record.host.signals import MAX_STEPS_MARKER

    if json_file == outputs.STDOUT:
        raise UsageError("--json - does not work here: stdout is the command's; name a file")
    plan = outputs.Plan(json_file=json_file, force=force)
    plan.check()
    names = parse_checks(fail_on)
    if no_report and (names or json_file is not None):
        raise UsageError("--no-report contradicts --json and --fail-on, which need one; drop it")
    ignored = ignored_rules()  # a mistake in the settings is said before the command starts
    watched, prices = watch_share(asked=watch), priced.prices()
    options = RecordOptions(
        command=tuple(command),
        out=out,
        name=name,
        tags=tuple(tag or ()),
        rate_hz=rate,
        window=parse_window(window, off=no_window, memory=window_memory),
        max_steps=max_steps,
        knobs=tuple(parse(text) for text in knob or ()),
        seed=seed,
        watch=watched,
    )
    reading = {"ignored": ignored, "prices": prices}
    endpoint = None if metrics_port is None else _listen(metrics_port, quiet=quiet)
    outcome = launch(options, meanwhile=None if no_report else _import_the_report, endpoint=endpoint)
    sys.stderr = cast("TextIO", _MayGoUnread(sys.stderr))
    if not (no_report or outcome.hurried) and reduces(outcome.run, outcome.host_dir):
        outcome = _reduce(outcome, quiet=quiet)
    say_done(outcome.host_dir)
    if no_report:
        if not quiet:
            say(outcome.problem or f"recorded; make the report with: stepscope analyze {outcome.run}")
        raise typer.Exit(outcome.status)
    part = part_in_report(outcome.run, outcome.host_dir)
    checked: int | None = None
    with _status_first(outcome, quiet=quiet):
        recorded = _report(outcome, part, plan, reading, quiet=quiet, source=not no_source)
        if recorded is not None:
            checked = checks.judge(recorded, names, quiet=quiet, source=not no_source)
    if checked is None:
        checked = _without_report(outcome, part, names, quiet=quiet)
    # a status that is that of the signal of --max-steps says nothing about the command
    signalled = outcome.status in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    ours = signalled and max_steps is not None and (outcome.host_dir / MAX_STEPS_MARKER).exists()
    raise typer.Exit(checked if names and ours else outcome.status or checked)


def _listen(port: int, *, quiet: bool) -> Endpoint | None:
    """The endpoint of `--metrics-port`; None, in a line, where the port is taken: that is no reason not to train."""
    from stepscope.record.host import openmetrics

    try:
        endpoint = openmetrics.listen(port, os.environ)
    except OSError as error:
        if not quiet:
            say(
                f"no metrics are served: port {port} cannot be had ({error.strerror}); the run is recorded all the same"
            )
        return None
    if not quiet:
        query = "" if openmetrics.TOKEN_VARIABLE in os.environ else f"?token={endpoint.token}"
        say(f"metrics at {endpoint.address}{query}")
    return endpoint


REDUCE_SECONDS = 600.0  # of a machine's recording: eight ranks with three windows of 50 MB each take some four minutes


def _reduce(outcome: Outcome, *, quiet: bool) -> Outcome:
    """Reduce what this machine recorded, in a process of its own; the outcome is hurried where a signal ends that."""
    from stepscope.record.host.launch import package_folder, without_user_code
    from stepscope.record.host.signals import Interrupted, interrupted_on_termination

    host = outcome.host_dir.name.removeprefix("host-")
    words = ["reduce", str(outcome.run), "--host", host]
    try:
        with interrupted_on_termination():
            done = subprocess.run(
                [sys.executable, "-m", "stepscope", *words, "--engine", "inline", "--quiet"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=REDUCE_SECONDS,
                cwd=str(Path(package_folder()).parent),  # `-m` puts the working directory on the path
                env=without_user_code(os.environ), check=False,
            )  # fmt: skip
    except (Interrupted, KeyboardInterrupt):
        return replace(outcome, hurried=True)
    except (OSError, subprocess.SubprocessError) as error:
        why = "it took too long" if isinstance(error, subprocess.TimeoutExpired) else str(error)
    else:
        told = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = "" if done.returncode == 0 else told[-1] if told else f"status {done.returncode}"
    if why and not quiet:
        say(f"what this machine recorded was not reduced ({why}); try: {shlex.join(['stepscope', *words])}")
    return outcome


def _import_the_report() -> None:
    """What the report takes half a second to import is there by the time that the command ends."""
    import stepscope.analyze.pictures
    import stepscope.dashboard.pages
    import stepscope.dashboard.single
    import stepscope.dashboard.terminal
    import stepscope.diagnose  # noqa: F401


def _report(
    outcome: Outcome, part: Part, plan: outputs.Plan, reading: Mapping[str, Any], *, quiet: bool, source: bool
) -> Run | None:
    """Show and write the report, where it is ours to make and there is time for it: then the run is returned."""
    from stepscope import api
    from stepscope.dashboard import single, terminal
    from stepscope.record.host.folder import Part
    from stepscope.record.host.scheduler import keep_accounting
    from stepscope.record.host.signals import interrupted_on_termination

    if outcome.problem and not quiet:
        say(outcome.problem)
    if outcome.hurried:
        if not quiet and part is not Part.SILENT:
            say(f"asked to end, so no report yet; make it with: stepscope analyze {outcome.run}")
        return None
    if part is not Part.REPORT:
        if part is Part.WORD and not quiet:
            say(f"recorded into {outcome.run}; when all its tasks have ended: stepscope analyze {outcome.run}")
        return None
    with interrupted_on_termination():
        keep_accounting(outcome.run)
        run = api.open_run(outcome.run, options=api.ReadOptions(**reading))
        with contextlib.nullcontext() if quiet else outputs.progress("making the report"):
            report, render = run.report(source=source), single.renderer(run, source=source)
            page = outputs.write(report, outcome.run, render)[1]
        if not quiet:
            terminal.show_report(report, sys.stderr, page=str(page))
            plan.write(report, render)
        elif plan.json_file is not None:
            outputs.write_file(Path(plan.json_file), report_bytes(report), make_folder=True)
    return run


def _without_report(outcome: Outcome, part: Part, names: tuple[str, ...], *, quiet: bool) -> int:
    """The status of checks that were not made: a missing report passes none, unless another launcher makes it."""
    from stepscope.record.host.folder import Part

    ours = part is Part.REPORT or outcome.hurried
    if not names or not ours:
        return checks.PASSED
    if not quiet and part is not Part.SILENT:
        again = f"stepscope analyze {shlex.quote(str(outcome.run))} --fail-on {','.join(names)}"
        say(f"check not judged: {', '.join(names)}: no report; check with: {again}")
    return checks.NOT_JUDGED


class _MayGoUnread:
    """A standard error that nobody may read, or with a full disk: the command's status counts all the same."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, and from the first failure on to nowhere."""
        self._or_nowhere(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._or_nowhere(self._stream.flush)

    def _or_nowhere(self, attempt: Callable[[], object]) -> None:
        try:
            attempt()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextlib.contextmanager
def _status_first(outcome: Outcome, *, quiet: bool) -> Iterator[None]:
    """The command has run and its status is what counts: whatever fails after it is one line, never a traceback."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - Ctrl-C as well
        what = str(error) if isinstance(error, StepscopeError) else f"{type(error).__name__}: {error}".rstrip(": ")
        if not quiet:
            say(f"no report ({what}); the recording is kept, try: stepscope analyze {outcome.run}")
