"""`stepscope mcp`: the runs of a folder as tools for coding agents, by the Model Context Protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from stepscope.cli.options import NoSource, Reading, argument, option
from stepscope.errors import EnvironmentRefusal, UnreadableInputError, UsageError

MOST_AT_ONCE = 64


def mcp(
    folder: Annotated[Path, argument("FOLDER", "What can be asked for lies below it.")] = Path(),
    allow_run: Annotated[
        bool, option("--allow-run", "Let the agent record and experiment with commands, in folders below FOLDER.")
    ] = False,
    max_seconds: Annotated[float, option("--max-seconds S", "End what it started after so long.")] = 3600,
    max_jobs: Annotated[int, option("--max-jobs N", "The most it may have running at once.")] = 1,
    *,
    reading: Reading,
    no_source: NoSource = False,
) -> None:
    """Serve runs to coding agents: the Model Context Protocol on standard input and output.

    An agent's configuration names this command (docs/agents.md). It can list runs, read findings with their lines, read
    tables, hot lines and source around a finding, compare runs, and read verdicts of experiments. Answers hold 4 kB
    unless more is asked for. Nothing is written but tables of traces in your cache. Runs are opened below FOLDER alone;
    of source files, those that are as a run recorded them or lie below the working directory.

    With --allow-run it can also start `stepscope run` and `stepscope experiment` with a command of its choice, which
    runs with your rights: in folders below FOLDER, results in FOLDER/stepscope-runs, at most --max-jobs at once and
    --max-seconds long. All of it ends with the server.
    """
    if not 0 < max_seconds < 1e7:
        raise UsageError(f"--max-seconds {max_seconds:g}: give seconds, more than 0, e.g. --max-seconds 3600")
    if not 1 <= max_jobs <= MOST_AT_ONCE:
        raise UsageError(f"--max-jobs {max_jobs}: give 1 to {MOST_AT_ONCE}")
    if not folder.is_dir():
        raise UnreadableInputError(f"{folder}: no such folder; name one that holds runs")
    options = reading.options(judged=True, keep=False)
    try:
        from stepscope.agents import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types", "anyio"):
            raise
        raise EnvironmentRefusal(
            "the tools for agents need mcp 2 or newer; install it with: pip install 'stepscope[agents]'"
        ) from None
    from stepscope.agents.jobs import Jobs, Limits
    from stepscope.agents.open_runs import OpenRuns

    jobs = Jobs(folder.resolve(), Limits(max_seconds, max_jobs)) if allow_run else None
    server.serve(OpenRuns(folder, options, source=not no_source, jobs=jobs))
