"""The command line as a shell sees it: help, exit codes, one-line errors, quiet ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope import cli
from stepscope.cli import COMMANDS, Command
from stepscope.errors import EnvironmentRefusal, StepscopeError, UnreadableInputError, UsageError
from tests import gpu_traces


def stepscope(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepscope", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80"},
    )


def test_help_lists_every_command_with_what_it_does() -> None:
    done = stepscope("--help")

    assert (done.returncode, done.stderr) == (0, "")
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary[:40])}", done.stdout, re.MULTILINE)
    assert "stepscope run -- python train.py" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    done = stepscope(name, "--help")

    assert (done.returncode, done.stderr) == (0, "")
    for example in COMMANDS[name].examples:
        assert example.startswith(f"stepscope {name}")
        assert f"\n    {example}\n" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "stepscope" not in line)


@pytest.mark.parametrize(
    ("error", "code"), [(StepscopeError, 1), (UsageError, 2), (UnreadableInputError, 3), (EnvironmentRefusal, 4)]
)
def test_an_error_of_ours_is_one_line_and_its_code(
    error: type[StepscopeError], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        """Fail."""
        raise error("two\nlines \x1b[2J of text")

    assert run_command(broken, monkeypatch) == code
    assert capsys.readouterr().err == "stepscope: two lines \\x1b[2J of text\n"


def run_command(function: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """Put `function` into the table of commands and run it in this process."""
    monkeypatch.setitem(sys.modules, "stepscope.cli.trial", SimpleNamespace(trial=function))
    monkeypatch.setitem(COMMANDS, "trial", Command("Try.", ("stepscope trial",), "trial"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["trial"])
    return int(ended.value.code or 0)


SLOW = """
import sys, time
from stepscope import cli
def trial():
    "Wait, or write."
    {body}
sys.modules["stepscope.cli.trial"] = sys.modules["__main__"]
cli.COMMANDS["trial"] = cli.Command("Try.", (), "trial")
cli.main(["trial"])
"""


def test_ctrl_c_ends_with_130_and_no_traceback() -> None:
    body = "print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", SLOW.format(body=body)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert errors == ""


@pytest.mark.parametrize("body", ["print('x' * 1_000_000)", "print('x')", "while True: print('x')"])
def test_a_closed_pipe_ends_quietly(body: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", SLOW.format(body=body)], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(writer)

    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("shell", "status", "said"),
    [
        (
            "stepscope analyze trace.json > /dev/full",
            4,
            "stepscope: no space left on device; send the output elsewhere\n",
        ),
        ("stepscope --help > /dev/full", 4, "stepscope: no space left on device; send the output elsewhere\n"),
        ("stepscope analyze trace.json >&-", 0, ""),
        ("stepscope analyze trace.json 2>&-", 0, ""),
        ("stepscope analyze trace.json | true; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_output_that_goes_nowhere_is_a_status_and_a_line(tmp_path: Path, shell: str, status: int, said: str) -> None:
    gpu_traces.write(tmp_path / "trace.json")
    command = shell.replace("stepscope ", f"{sys.executable} -m stepscope ")
    settings = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (status, said)


PROGRAM = """
import os, sys
from pathlib import Path
from stepscope.cli import options
options.LARGE_BYTES = int(sys.argv[2])
options.spare_memory([Path(sys.argv[1]), Path("/nowhere")])
assert "polars" not in sys.modules
print(os.environ.get("_RJEM_MALLOC_CONF", "as it is"))
"""


@pytest.mark.parametrize(("least", "conf"), [(10, "dirty_decay_ms:0,muzzy_decay_ms:0"), (11, "as it is")])
def test_large_files_make_polars_give_memory_back(tmp_path: Path, least: int, conf: str) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(b"x" * 10)
    fresh = {name: value for name, value in os.environ.items() if name != "_RJEM_MALLOC_CONF"}  # Polars sets its own
    command = [sys.executable, "-c", PROGRAM, str(file), str(least)]
    done = subprocess.run(command, capture_output=True, text=True, env=fresh)
    assert done.stdout.strip() == conf, done.stderr
