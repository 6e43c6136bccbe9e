"""What records: `stepscope run` and `attach`, the copy of a batch script that does, and what this machine allows.

`run` parses, records, then reports, and ends with the command's own status whatever becomes of the report.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from stepscope.cli import say
from stepscope.cli.options import (
    NOT_JUDGED,
    PASSED,
    CsvFile,
    FailOn,
    Force,
    JsonFile,
    NoSource,
    Priced,
    Quiet,
    Rate,
    Rows,
    RunFolder,
    argument,
    ignored_rules,
    judge,
    option,
    parse_checks,
    watch_share,
)
from stepscope.errors import StepscopeError, UnreadableInputError, UsageError
from stepscope.record.host.options import DEFAULT_RATE_HZ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console

    from stepscope.api import Run
    from stepscope.record.host.doctor import Doctor
    from stepscope.record.host.folder import Part
    from stepscope.record.host.launch import Outcome
    from stepscope.record.host.openmetrics import Endpoint
    from stepscope.report import outputs


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
    from stepscope.record.agent.knobs import parse
    from stepscope.record.host.folder import part_in_report, reduces, say_done
    from stepscope.record.host.launch import launch
    from stepscope.record.host.options import RecordOptions, parse_window
    from stepscope.record.host.signals import MAX_STEPS_MARKER
    from stepscope.report import outputs

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
            checked = judge(recorded, names, quiet=quiet, source=not no_source)
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
    from stepscope.report import outputs
    from stepscope.report.document import report_bytes

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
        return PASSED
    if not quiet and part is not Part.SILENT:
        again = f"stepscope analyze {shlex.quote(str(outcome.run))} --fail-on {','.join(names)}"
        say(f"check not judged: {', '.join(names)}: no report; check with: {again}")
    return NOT_JUDGED


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


_ENDINGS = {"interrupt": ", ended by Ctrl-C", "job": ", until the job ended"}


def attach(
    pid: Annotated[int, argument("PID", "The training process, or the launcher of all ranks.")],
    seconds: Annotated[float, option("--seconds N", "How long to sample.")] = 30.0,
    rate: Rate = DEFAULT_RATE_HZ,
    out: RunFolder = None,
    native: Annotated[
        bool, option("--native", "C and C++ frames too; stops the job for a moment at each sample.")
    ] = False,
    rows: Rows = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    force: Force = False,
) -> None:
    """Sample a running job with all its workers, and show its hotspots.

    The job is only read: nothing is injected into it, and it is not stopped (but for --native). Everything below PID is
    sampled too, so name the training process for one rank with its loader workers, or torchrun for all ranks of this
    host. Ctrl-C ends the sampling early and still reports; the end of the job does too.

    The recording is a run folder, for `stepscope hotspots`, `stepscope flamegraph` and `stepscope analyze`. It holds no
    steps: only `stepscope run` sees those. Where the right to attach is missing, the error says which.
    """
    from stepscope.cli.stacks import Wanted, parse_rows
    from stepscope.record.host.attach import AttachOptions
    from stepscope.record.host.attach import attach as sample
    from stepscope.report import outputs
    from stepscope.report.escape import one_line

    outputs.check_files({"--json": json_file, "--csv": csv_file}, force=force)
    wanted = Wanted(parse_rows(rows), json_file, csv_file)
    options = AttachOptions(pid=pid, seconds=seconds, rate_hz=rate, out=out, native=native)
    with outputs.reading("sampling") as shown:

        def progress(passed: float, total: float) -> None:
            if shown is not None:
                shown(f"process {pid}", round(passed * 1000), round(total * 1000))

        attached = sample(options, progress)
    how = _ENDINGS.get(attached.ended, "")
    print(f"Sampled process {pid} for {attached.seconds:.1f} s{how}: {one_line(str(attached.run))}", file=sys.stderr)
    if attached.problem is not None:
        say(attached.problem)
    from stepscope import api
    from stepscope.analyze.host.hotspots import HotspotOptions

    with outputs.reading("reading") as reading:
        run = api.open_run(attached.run, options=api.ReadOptions(progress=reading))
        found = run.hotspots(HotspotOptions())
    wanted.put(run, found)


_STDOUT = "-"
_MOST_BYTES = 4_000_000
_LONGEST_LINE = 10_000  # of the difference shown; the file has all of it


def slurm(
    script: Annotated[Path, argument("SCRIPT", "The script that is handed to sbatch.")],
    out: Annotated[
        str | None, option("--out -o FILE", "The copy; NAME.stepscope.sbatch by default; - is stdout.")
    ] = None,
    program: Annotated[str, option("--stepscope PATH", "How stepscope is called in the job.")] = "stepscope",
    force: Force = False,
) -> None:
    """Write a copy of a batch script that records every training it starts.

    The recorder goes behind srun, mpirun or a container and in front of python, torchrun and other launchers. The
    script itself stays as it is; the difference is shown. Lines that may start a training but are not understood are
    left alone and named.
    """
    from stepscope.record.host.slurm import switch_on
    from stepscope.report.escape import plain
    from stepscope.report.outputs import write_file

    try:
        if script.stat().st_size > _MOST_BYTES:
            raise UnreadableInputError(f"{script}: too large for a batch script; give the one handed to sbatch")
        # surrogates keep bytes that are no UTF-8, and no line end is changed
        text = script.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UnreadableInputError(f"{script}: {error.strerror}; give the script that is handed to sbatch") from None
    switched = switch_on(text, program=program)
    if switched.lines:
        named = script.with_name(f"{script.stem}.stepscope{script.suffix}") if out is None else Path(out)
        target = None if out == _STDOUT else named
        if target is not None:
            if target.exists() and (os.path.samefile(script, target) or target.is_dir()):
                what = "is a folder" if target.is_dir() else "is the script itself, which is never changed"
                raise UsageError(f"{target}: {what}; name another file with --out")
            if target.exists() and not force:
                raise UsageError(f"{target}: exists; add --force to overwrite it, or name another file with --out")
            write_file(target, switched.text.encode("utf-8", "surrogateescape"))
            target.chmod(script.stat().st_mode & 0o777)
        _show_difference(script, text, target, switched.text)
        for line, remark in switched.remarks:
            say(f"line {line}: {remark}")
    if switched.recorded:
        numbers = ("line " if len(switched.recorded) == 1 else "lines ") + ", ".join(map(str, switched.recorded))
        already = f"recorded already: {numbers}" if switched.lines else ""
        say(already or f"{script} records already ({numbers}); nothing written")
    for line, reason in switched.left:
        say(f"left alone: line {line}: {reason}")
    if not switched.lines and not switched.recorded:
        raise UsageError(
            f"{script}: no line that starts a training was recognised; "
            "put `stepscope run --` before its command, behind srun and its options"
        )
    if switched.lines and target is not None:
        print(f"Wrote {plain(str(target))}; submit it with: sbatch {plain(shlex.quote(str(target)))}", file=sys.stderr)


def _show_difference(script: Path, text: str, target: Path | None, switched: str) -> None:
    """On stdout, or on stderr where stdout takes the script."""
    from stepscope.report.escape import plain

    if target is None:
        sys.stdout.buffer.write(switched.encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
    stream = sys.stderr if target is None else sys.stdout
    names = str(script), str(target) if target is not None else f"{script} with recording"
    for line in difflib.unified_diff(text.splitlines(), switched.splitlines(), *names, lineterm=""):
        print(plain(line, _LONGEST_LINE), file=stream)
    stream.flush()


_STYLES = {"ok": "green", "limited": "yellow", "missing": "yellow", "unknown": "dim"}


def doctor(
    python: Annotated[str | None, option("--python FILE", "The training environment's interpreter.")] = None,
    json_file: Annotated[str | None, option("--json FILE", "Write the facts as JSON; - is stdout.")] = None,
    force: Force = False,
) -> None:
    """Say what this machine allows, and what each limit costs the report."""
    from stepscope.record.host.doctor import examine
    from stepscope.report import outputs

    outputs.check_files({"--json": json_file}, force=force)
    with outputs.progress("looking at this machine"):
        facts = examine(python)
    data = json.dumps(facts.for_json(), indent=1).encode() + b"\n"
    if json_file == outputs.STDOUT:
        sys.stdout.buffer.write(data)
        return
    render(facts, outputs.console(sys.stdout))
    if json_file is not None:
        outputs.write_file(Path(json_file), data, make_folder=True)


def render(facts: Doctor, console: Console) -> None:
    """One row per check; what a limit costs and how to lift it under it."""
    from rich.table import Table
    from rich.text import Text

    from stepscope.report.escape import plain

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in facts.checks:
        text = Text(plain(check.finding))
        for label, part in (("costs: ", check.cost), ("get it: ", check.remedy)):
            if part:
                text.append(f"\n{label}", style="dim").append(plain(part))
        table.add_row(Text(check.name, style="bold"), Text(check.state, style=_STYLES.get(check.state, "")), text)
    console.print(table)
    if facts.pinned_command:
        console.print(Text("\nFor steady measurements, whole cores with their sibling threads:"))
        console.print(Text(f"  {facts.pinned_command}"), soft_wrap=True)
