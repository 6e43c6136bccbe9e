"""The command line: a visible table of commands, each loaded only when it is called.

`stepscope --help` therefore imports neither torch, polars, numpy nor Rich. A new command is a function in a file of
this folder and one line in `COMMANDS`. Errors are caught here, once: a `StepscopeError` becomes one line on stderr and
the exit code of its class; Ctrl-C ends with 130; a reader that closes the pipe ends us quietly, with 141.
"""

from __future__ import annotations

import atexit
import errno
import importlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from stepscope.errors import EnvironmentRefusal, StepscopeError, UnreadableInputError, UsageError

# The parser's base of everything wrong with a command line. Its own module moved between versions of Typer, which keep
# re-exporting this child of it.
PARSE_ERROR: Any = typer.BadParameter.__base__
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
PIPE_CLOSED = 141  # 128 + SIGPIPE


class Command(NamedTuple):
    """One line of the table: the function of its name is what it does, its docstring is the full help."""

    summary: str
    examples: tuple[str, ...]
    module: str
    settings: Mapping[str, Any] = MappingProxyType({})  # context settings of the command's parser


COMMANDS: dict[str, Command] = {
    "run": Command(
        "Record a training command and report where its time goes.",
        (
            "stepscope run -- python train.py",
            "stepscope run --out runs/a -- torchrun --nproc-per-node=2 train.py",
            "stepscope run --fail-on recompile,graph-break -- python train.py --steps 50   # in CI",
        ),
        "record",
        # the first word that is no option of ours starts the user's command, also without "--"
        {"allow_interspersed_args": False},
    ),
    "analyze": Command(
        "Show the report of a recorded run, or of third-party traces.",
        (
            "stepscope analyze stepscope-runs/20260101-120000-train",
            "stepscope analyze RUN --json -",
            "stepscope analyze RUN --fail-on recompile",
            "stepscope analyze RUN --brief   # the findings in 4 kB of JSON",
            "stepscope analyze logs/worker0.1700000000000.pt.trace.json.gz --source-root src",
            "stepscope analyze logs --table operators --sort self_device --top 20",
            "stepscope analyze logs/before --diff logs/after",
        ),
        "analyze",
    ),
    "hotspots": Command(
        "Name the functions that the sampled stacks stand in.",
        (
            "stepscope hotspots stepscope-runs/20260101-120000-train",
            "stepscope hotspots profile.txt --library mylib --rows 20",
            "stepscope hotspots RUN --rank 1 --phase data_wait --json hotspots.json",
        ),
        "stacks",
    ),
    "fix": Command(
        "Show the change that a finding names as a patch, or what has to be decided.",
        (
            "stepscope fix stepscope-runs/20260101-120000-train",
            "stepscope fix RUN --finding input.loader_bound | git apply",
            "stepscope fix RUN --finding input.loader_bound --apply",
        ),
        "fix",
    ),
    "flamegraph": Command(
        "Draw sampled stacks as an interactive flame graph in one file.",
        (
            "stepscope flamegraph stepscope-runs/20260101-120000-train",
            "stepscope flamegraph profile.txt -o profile.svg",
            "stepscope flamegraph RUN --diff OTHER_RUN",
            "stepscope flamegraph RUN --rank 1 --diff others",
        ),
        "stacks",
    ),
    "view": Command(
        "Show runs and traces in a browser, live while a run goes on.",
        (
            "stepscope view stepscope-runs/20260101-120000-train",
            "stepscope view stepscope-runs   # a folder of runs, as a list",
            "stepscope view logs/worker0.1700000000000.pt.trace.json.gz --no-browser --port 7000",
        ),
        "serve",
    ),
    "runs": Command(
        "List runs, and delete those that nobody needs any more.",
        (
            "stepscope runs",
            "stepscope runs --tag nightly --knob loader.num_workers=4 --json -",
            "stepscope runs --older-than 30 --keep 5 --prune   # what it would free; --yes deletes",
        ),
        "runs",
    ),
    "batch": Command(
        "Name the samples of a step, and the steps whose loss or norm went wrong.",
        ("stepscope batch RUN", "stepscope batch RUN --step 1040", "stepscope batch RUN --step 1040 --json batch.json"),
        "analyze",
    ),
    "attach": Command(
        "Sample a running job, and show its hotspots.",
        ("stepscope attach 4242", "stepscope attach 4242 --seconds 120 --out runs/slow"),
        "record",
    ),
    "compare": Command(
        "Say whether a run is faster than another, and what changed.",
        (
            "stepscope compare runs/before runs/after",
            "stepscope compare sets/before sets/after --fail-on slower=3%   # folders of several runs, in CI",
            "stepscope compare logs/workers_0 logs/workers_4 --html compared.html",
            "stepscope compare trace.json.gz trace.json.gz --span 1 --against-span 2",
        ),
        "compare",
    ),
    "export": Command(
        "Cut and merge traces for Perfetto, or give a run to TensorBoard, W&B, MLflow or Trackio.",
        (
            "stepscope export RUN --steps 5:7 -o cut.json.gz",
            "stepscope export rank0.json rank1.json -o both.json.gz",
            "stepscope export RUN --to tensorboard --out logs",
            "stepscope export RUN --to wandb",
        ),
        "export",
    ),
    "reduce": Command(
        "Reduce a run near its data to small tables, from which many ranks are judged.",
        (
            "stepscope reduce RUN   # behind `srun --ntasks-per-node=1` each node what it recorded",
            "stepscope reduce RUN --host node7 --force",
            "stepscope reduce RUN --engine dask --scheduler slurm --jobs 16",
        ),
        "export",
    ),
    "slurm": Command(
        "Write a copy of a batch script with recording switched on.",
        ("stepscope slurm train.sbatch", "stepscope slurm train.sbatch -o recorded.sbatch"),
        "record",
    ),
    "experiment": Command(
        "Try changes on a training command, and say with an interval which help.",
        (
            "stepscope experiment --try loader.num_workers=2,4 -- python train.py",
            "stepscope experiment --from stepscope-runs/20260101-120000-train -- python train.py",
            "stepscope experiment --from findings --budget 30 -- python train.py",
            "stepscope experiment --try 'env:OMP_NUM_THREADS=4' --try 'arg:--workers=2' -- python train.py",
            "stepscope experiment --self -- python train.py   # how small an effect this machine can show",
        ),
        "experiment",
        {"allow_interspersed_args": False},
    ),
    "sweep": Command(
        "Search values of knobs for the best metric, and say which of them decide it.",
        (
            "stepscope sweep --param arg:--lr=log:1e-5..1e-2 --param arg:--batch-size=8,16,32 --metric val/loss:min "
            "--trials 20 -- python train.py",
            "stepscope sweep --param arg:--lr=log:1e-4..1e-2 --metric train/loss:min --metric seconds -- "
            "python train.py",
            "stepscope sweep --param env:OMP_NUM_THREADS=1..8 --metric perf/samples_per_s:max --metric-of tail "
            "--sampler grid -- python train.py",
        ),
        "experiment",
        {"allow_interspersed_args": False},
    ),
    "replay": Command(
        "Run one operator of a run alone, on devices, threads and dtypes beside each other.",
        (
            "stepscope replay RUN --op linalg_qr --devices cpu,cuda",
            "stepscope replay RUN --op mm --devices cpu --threads 1,2,4 --dtypes float32,float64",
        ),
        "replay",
    ),
    "mcp": Command(
        "Serve runs to coding agents by the Model Context Protocol.",
        (
            "stepscope mcp",
            "stepscope mcp stepscope-runs",
            "stepscope mcp --allow-run --max-seconds 1800   # it may start trainings below this folder",
        ),
        "serve",
    ),
    "doctor": Command(
        "Say what this machine allows, and what each limit costs the report.",
        ("stepscope doctor",),
        "record",
    ),
}


class LazyCommand(TyperCommand):
    """Stands in the group's table for a command whose module is imported when it is parsed."""

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(name, short_help=command.summary, help=command.summary, rich_markup_mode=None)
        self._command = command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse `args` with the real command, which from here on takes this one's place."""
        return load(self.name or "", self._command).make_context(info_name, args, parent=parent, **extra)


class CommandGroup(TyperGroup):
    """The group that turns the two ways of being stopped from outside into exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command; raises `typer.Exit` with 130 on Ctrl-C and 141 on a closed pipe."""
        try:
            try:
                return super().invoke(ctx)
            finally:  # also of a command that ends with a status
                sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _drop_stdout()
            raise typer.Exit(PIPE_CLOSED) from None


def _drop_stdout() -> None:
    """What is still to be written goes nowhere: stdout is flushed once more at exit, which would be a second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load(name: str, command: Command) -> Any:
    """Import the function behind `command` and build its parser."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # "\b" keeps the parser from joining the examples into one paragraph
    epilog = "\n".join(["\b", "Example:" if len(command.examples) == 1 else "Examples:"])
    epilog += "".join(f"\n  {example}" for example in command.examples)
    register = app.command(name, epilog=epilog, context_settings=dict(command.settings))
    from stepscope.cli.options import ungrouped

    register(ungrouped(getattr(importlib.import_module(f"stepscope.cli.{command.module}"), name)))
    return typer.main.get_command(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from stepscope import __version__

        typer.echo(f"stepscope {__version__}")
        raise typer.Exit()


def _root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find why a PyTorch training run is slow, and name the line."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError.exit_code)


def application() -> Any:
    """The command group, with every command of the table in place but none imported."""
    app = typer.Typer(
        cls=CommandGroup, name="stepscope", add_completion=False, rich_markup_mode=None, invoke_without_command=True
    )
    app.callback(epilog="\b\nExample:\n  stepscope run -- python train.py")(_root)
    group = typer.main.get_command(app)
    for name, command in COMMANDS.items():
        group.add_command(LazyCommand(name, command), name)  # type: ignore[attr-defined]
    return group


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in `SystemExit`."""
    try:
        status = application().main(args=arguments, prog_name="stepscope", standalone_mode=False)
    except StepscopeError as error:
        say(str(error))
        status = error.exit_code
    except PARSE_ERROR as error:
        command = error.ctx.command_path if error.ctx else "stepscope"
        say(f"{error.format_message().rstrip('.')}; see `{command} --help`")
        status = UsageError.exit_code
    except OSError as error:
        full = error.errno == errno.ENOSPC
        if full and not error.filename:
            _drop_stdout()
        where = f"{error.filename}: " if error.filename else ""
        what = "no space left on device; send the output elsewhere"
        say(where + (what if full else f"{error.strerror or error}; check that it is there, and its permissions"))
        status = EnvironmentRefusal.exit_code
    except KeyboardInterrupt:  # before a command was found
        status = INTERRUPTED
    except Exception as error:
        # columns are read when they are first asked for, long after their file was found to be one
        if type(error).__module__ != "polars.exceptions" or not str(error).startswith("parquet:"):
            raise
        say(f"a table that was given is damaged ({error}); make it again, as by `stepscope reduce RUN`")
        status = UnreadableInputError.exit_code
    sys.exit(status if isinstance(status, int) else 0)


def process() -> None:
    """`main` as a process, which ends without taking apart what it holds: a tenth of a second after a trace.

    As the interpreter ends, threads are waited for, exit functions run, and output is flushed.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: what is written to it goes nowhere
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open for as long as the process
    try:
        main()
    except SystemExit as ended:
        status = ended.code
    wait_for_threads = getattr(threading, "_shutdown", None)
    if wait_for_threads is None or not isinstance(status, int):
        sys.exit(status)
    wait_for_threads()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # a full disk, or closed output: the interpreter has a status for it
        sys.exit(status)
    os._exit(status)


def say(text: str) -> None:
    from stepscope.report.escape import one_line

    print(f"stepscope: {one_line(text)}", file=sys.stderr, flush=True)
