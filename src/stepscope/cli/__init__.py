"""The command line: a visible table of commands, each loaded only when it is called.

`stepscope --help` therefore imports neither torch, polars, numpy nor Rich. A new command is a function in a file of
this folder and a row of `commands.json`. Errors are caught here, once: a `StepscopeError` becomes one line on stderr
and the exit code of its class; Ctrl-C ends with 130; a reader that closes the pipe ends us quietly, with 141.
"""

from __future__ import annotations

import atexit
import errno
import importlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from stepscope.errors import EnvironmentRefusal, StepscopeError, UsageError

# The parser's base of everything wrong with a command line. Its own module moved between versions of Typer, which keep
# re-exporting this child of it.
PARSE_ERROR: Any = typer.BadParameter.__base__
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
PIPE_CLOSED = 141  # 128 + SIGPIPE


class Command(NamedTuple):
    """A command of the table: the function of its name in `module` is what it does, its docstring is the full help.

    ends_options: the first word that is no option of ours starts the user's command, also without "--".
    """

    module: str
    summary: str
    examples: Sequence[str]
    ends_options: bool = False


_TABLE = json.loads(Path(__file__).with_name("commands.json").read_text(encoding="utf-8"))
COMMANDS = {name: Command(**row) for name, row in _TABLE.items()}


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
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # the interpreter flushes stdout once more at exit, which would print a second error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None
        return result


def load(name: str, command: Command) -> Any:
    """Import the function behind `command` and build its parser."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # "\b" keeps the parser from joining the examples into one paragraph
    epilog = "\n".join(["\b", "Example:" if len(command.examples) == 1 else "Examples:"])
    epilog += "".join(f"\n  {example}" for example in command.examples)
    settings = {"allow_interspersed_args": False} if command.ends_options else {}
    register = app.command(name, epilog=epilog, context_settings=settings)
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
        if error.errno != errno.ENOSPC:
            raise
        what = f" for {error.filename}" if error.filename else ""
        say(f"no space left on device{what}; send the output elsewhere")
        status = EnvironmentRefusal.exit_code
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
