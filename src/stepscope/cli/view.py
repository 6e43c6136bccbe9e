"""`stepscope view`: a dashboard of runs, experiments and traces, in a browser on this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.cli import INTERRUPTED, say
from stepscope.cli.options import NoSource, Reading, argument, option
from stepscope.errors import EnvironmentRefusal, UsageError

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

    jump = os.environ.get("SLURM_SUBMIT_HOST") if os.environ.get("SLURM_JOB_ID") else None
    host = socket.gethostname()
    through = ["-J", jump] if jump and jump != host else []
    line = ["ssh", "-N", "-L", f"{port}:127.0.0.1:{port}", *through, f"{getpass.getuser()}@{host}"]
    return " ".join(shlex.quote(part) for part in line)
