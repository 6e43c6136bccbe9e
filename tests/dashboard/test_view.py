"""The command `stepscope view`: its address, its end, and who gets to know the address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from stepscope.cli.serve import forwarding
from stepscope.dashboard import bundle
from stepscope.dashboard.server.start import Opener, Running, Settings
from stepscope.errors import EnvironmentRefusal
from tests.dashboard.client import Dashboard


def view(*arguments: str, **more: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "SLURM_"))}
    kept |= {"BROWSER": "false", **more}
    line = [sys.executable, "-m", "stepscope", "view", *arguments]
    return subprocess.Popen(line, env=kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(bundle.folder() is None, reason="needs the built front end (npm run build in web/)")
def test_the_command_prints_one_address_and_ends_with_ctrl_c(small_run: Path) -> None:
    remote = {"SSH_CONNECTION": "a 1 b 2", "COLUMNS": "40"}
    with view(str(small_run), "--no-browser", "--port", "0", **remote) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline()
            match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{20,})\n", address)
            assert match is not None, address
            forwarding = process.stdout.readline()
            assert forwarding.startswith(f"ssh -N -L {match[1]}:127.0.0.1:{match[1]} ")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert process.stderr is not None
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_a_taken_port_is_refused_in_a_line(small_run: Path, dashboard: Dashboard) -> None:
    with pytest.raises(EnvironmentRefusal, match=f"port {dashboard.running.port} .* is taken; .*--port"):
        Running(Settings(paths=(small_run,), port=dashboard.running.port))


def test_forwarding_goes_through_the_login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_SUBMIT_HOST", "login1")
    assert re.fullmatch(r"ssh -N -L 6107:127.0.0.1:6107 -J login1 \S+@\S+", forwarding(6107))
    monkeypatch.delenv("SLURM_JOB_ID")
    assert "-J" not in forwarding(6107)


def test_a_browser_is_given_a_file_that_only_its_user_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    opener = Opener()
    assert opener.open("http://127.0.0.1:1/?token=secret&x=1")
    assert "secret" not in opened[0]
    path = Path(opened[0].removeprefix("file://"))
    assert path.stat().st_mode & 0o077 == 0
    assert "token=secret&amp;x=1" in path.read_text()
    opener.close()
    assert not path.exists()


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, stepscope.cli as c; c.load('view', c.COMMANDS['view']); "
    code += "print([m for m in ('polars', 'numpy', 'starlette', 'uvicorn', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
