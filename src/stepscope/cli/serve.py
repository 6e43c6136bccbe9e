"""`stepscope view`: a dashboard of runs, experiments and traces, in a browser on this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.cli import INTERRUPTED, say
from stepscope.cli.options import NoSource, Reading, argument, option
from stepscope.errors import EnvironmentRefusal, UnreadableInputError, UsageError

if TYPE_CHECKING:
    from stepscope.dashboard.server.start import Running


NICE = 10  # a training on the same machine goes first
_ELSEWHERE, _SCREENS = ("SSH_CONNECTION", "SLURM_JOB_ID"), ("DISPLAY", "WAYLAND_DISPLAY")


def view(
    runs: Annotated[
        list[Path] | None,
        argument(
            "RUN...",
            "Run folders, experiments, traces, or folders of them; stepscope-runs by default.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None, option("--port N", "The port; 0 is any free one. 6107 by default, or a free one.")
    ] = None,
    host: Annotated[str, option("--host ADDRESS", "Listen at this address, not on this machine alone.")] = "127.0.0.1",
    no_browser: Annotated[bool, option("--no-browser", "Open no browser.")] = False,
    base_path: Annotated[str, option("--base-path PATH", "Where a proxy shows it, e.g. /user/ann/proxy/6107.")] = "/",
    allow_host: Annotated[
        list[str] | None,
        option("--allow-host NAME", "A name by which a proxy reaches the server, or NAME:PORT; repeatable."),
    ] = None,
    *,
    reading: Reading,
    no_source: NoSource = False,
) -> None:
    """Show runs, experiments and traces in a browser, live while a run goes on.

    Takes run folders, experiments, anything `stepscope analyze` reads, and folders of runs, which become a list that
    can be searched. Nothing is written beside them. The server answers on this machine alone, and only to who has the
    token in the address that is printed on one line. From elsewhere, forward the port with ssh as the second line says.

    Behind JupyterHub, Open OnDemand or jupyter-server-proxy, name the host that the browser shows with --allow-host and
    the path with --base-path. Stop it with Ctrl-C.
    """
    from stepscope.dashboard import bundle
    from stepscope.dashboard.server import start
    from stepscope.dashboard.server.start import Opener

    if port is not None and not 0 <= port < 2**16:
        raise UsageError(f"--port {port}: not a port; give a number up to 65535, or 0 for any free one")
    options = reading.options(judged=True, keep=False)
    if bundle.folder() is None:
        raise EnvironmentRefusal(bundle.missing())
    if not runs and not Path("stepscope-runs").is_dir():
        raise UsageError("nothing to show here; name a run, a trace, or a folder of them")
    wanted = start.Settings(
        paths=tuple(runs or [Path("stepscope-runs")]),
        options=options,
        host=host,
        port=port,
        base_path=base_path,
        allow_hosts=tuple(allow_host or ()),
        source=not no_source,
    )
    if not start.is_loopback(host):
        say(f"{host} can be reached from other machines, without encryption")
    opener = Opener()

    def ready(running: Running) -> None:
        # `print` wraps nothing: whoever reads this line gets the address whole
        print(running.address, flush=True)
        if _is_remote():
            print(forwarding(running.port), flush=True)
        elif not no_browser:
            opener.open(running.address)
        with contextlib.suppress(OSError):
            os.nice(NICE)  # the browser is none of that

    try:
        start.serve(wanted, ready)
    except KeyboardInterrupt:
        opener.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)  # threads that are reading a large trace would keep the process for as long as that takes
    opener.close()


def _is_remote() -> bool:
    """Whether the browser is somewhere else: we came here by ssh, a scheduler put us here, or there is no screen."""
    elsewhere, screen = (any(map(os.environ.get, names)) for names in (_ELSEWHERE, _SCREENS))
    return elsewhere or (sys.platform.startswith("linux") and not screen)


def forwarding(port: int) -> str:
    """The command that brings the port to the machine where the browser is."""
    import getpass
    import socket

    jump = os.environ.get("SLURM_SUBMIT_HOST") if os.environ.get("SLURM_JOB_ID") else None
    host = socket.gethostname()
    through = ["-J", jump] if jump and jump != host else []
    line = ["ssh", "-N", "-L", f"{port}:127.0.0.1:{port}", *through, f"{getpass.getuser()}@{host}"]
    return " ".join(shlex.quote(part) for part in line)


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
    from stepscope.agents.jobs import Jobs, Limits, OpenRuns

    jobs = Jobs(folder.resolve(), Limits(max_seconds, max_jobs)) if allow_run else None
    server.serve(OpenRuns(folder, options, source=not no_source, jobs=jobs))
