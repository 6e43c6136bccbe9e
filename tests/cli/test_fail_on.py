"""`--fail-on`: what `analyze` and `run` end with, and the line that says why."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from stepscope import api
from stepscope.analyze import compilers
from stepscope.cli.options import CHECKS
from stepscope.model.compilers import CompilersView
from tests.cli.calls import call
from tests.records import replace
from tests.report.fabricate import analysis, diagnosis, write_script
from tests.report.fabricate_compilers import cause, facts, view

main = partial(call, "analyze")

REPOSITORY = Path(__file__).resolve().parents[2]
SRUN = REPOSITORY / "tests" / "integration" / "scripts" / "srun.py"


def clean(file: str) -> CompilersView:
    """Compiled once, watched, and nothing wrong with it."""
    return replace(view(file), backends=(facts(recompiles=0, graph_breaks=0, limit_hits=0),), causes=(), storms=())


def broken(file: str) -> CompilersView:
    """A graph break and no recompile."""
    found = cause(
        file, id="break", kind="graph_break", cause="print", text="a print", subject=None, changes=(), count=2
    )
    return replace(clean(file), backends=(facts(recompiles=0, limit_hits=0),), causes=(found,))


def recompiled(file: str) -> CompilersView:
    """Eleven recompiles and no graph break."""
    return replace(clean(file), backends=(facts(graph_breaks=0, limit_hits=0),), causes=(cause(file),))


def unwatched(file: str) -> CompilersView:
    """A source that tells neither."""
    return replace(clean(file), backends=(facts(recompiles=None, graph_breaks=None),))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The script of a run in `./run`, of which only what compilers did is still to be said."""
    (tmp_path / "run" / "rank-0").mkdir(parents=True)
    monkeypatch.setattr(api.Run, "diagnosis", diagnosis(tmp_path))
    monkeypatch.chdir(tmp_path)
    return write_script(tmp_path)


def test_the_names_are_those_of_the_analysis() -> None:
    assert CHECKS == compilers.CHECKS


@pytest.mark.parametrize(
    ("holds", "names", "status", "said"),
    [
        (recompiled, ["recompile"], 1, ["check failed: recompile: 11 recompilations"]),
        (recompiled, ["graph-break"], 0, ["check passed: graph-break: no graph break"]),
        (broken, ["graph-break"], 1, ["check failed: graph-break: 2 graph breaks"]),
        (broken, ["recompile"], 0, ["check passed: recompile: no recompilation"]),
        (clean, ["recompile", "graph-break"], 0, ["check passed: recompile", "check passed: graph-break"]),
        (broken, ["recompile,graph_break"], 1, ["check passed: recompile", "check failed: graph-break"]),
        (unwatched, ["recompile", "graph-break"], 4, ["check not judged: recompile", "check not judged: graph-break"]),
        (view, ["graph-break , recompile", "recompile"], 1, ["check failed: graph-break", "check failed: recompile"]),
    ],
)
def test_status_and_line(
    file: str,
    holds: object,
    names: list[str],
    status: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert callable(holds)
    monkeypatch.setattr(api.Run, "analysis", analysis(Path(file).parent, compilers=holds(file)))
    options = [option for name in names for option in ("--fail-on", name)]

    assert main("run", *options) == status
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert len(lines) == len(said)
    assert all(line.startswith(f"stepscope: {words}") for line, words in zip(lines, said, strict=True)), lines
    assert shown.out.startswith("pictures: 512 of 521 train steps")  # the report is shown all the same


def test_a_hostile_reason_stays_on_its_line(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = cause(file, text="a\nb\x1b[2J\u202ec  # secret = 1\n" + "x" * 100_000)
    monkeypatch.setattr(
        api.Run, "analysis", analysis(Path(file).parent, compilers=replace(recompiled(file), causes=(bad,)))
    )
    assert main("run", "--fail-on", "recompile", "--no-source") == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert not {"\x1b", "\u202e"} & set(line)
    assert "secret" not in line
    assert main("run", "--fail-on", "recompile") == 1
    assert len(capsys.readouterr().err) < 5_000


# `stepscope run` as it is, its analysis made up: argv is the name of a function of this module, then the options.
# What needs NumPy is imported after the command has ended, as the program itself does it: its threads would take the
# signals that the recorder waits for.
DRIVER = """
import sys
from pathlib import Path
from stepscope import api, cli

def made_up(run):
    from tests.cli import test_fail_on
    from tests.report.fabricate import analysis, write_script
    file = write_script(Path.cwd())
    return analysis(Path.cwd(), compilers=getattr(test_fail_on, sys.argv[1])(file))

def no_finding(run):
    from tests.report.fabricate import diagnosis
    return diagnosis(Path.cwd())

api.Run.analysis = property(made_up)
api.Run.diagnosis = property(no_finding)
cli.main(["run", *sys.argv[2:]])
"""


def recorded(
    folder: Path, holds: str, *options: str, command: str = "", before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """`stepscope run --out r` of a small Python program, with what compilers did made up."""
    program = [sys.executable, "-S", "-c", command or "pass"]
    line = [*before, sys.executable, "-c", DRIVER, holds, "--out", "r", *options, "--", *program]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)


# as the recorder in a training process does it after the last step it was allowed
REACHES_MAX_STEPS = """
import pathlib, time
(host,) = pathlib.Path("r").glob("host-*")
(host / "max-steps").write_text("{}")
time.sleep(100)
"""
# the first task ends once both have begun, the second once the launcher of the first has ended
TAKES_TURNS = """
import json, os, pathlib, time
first, second = (pathlib.Path("r", name, "manifest.json") for name in ("host-node1", "host-node2"))
for _ in range(600):
    if os.environ["SLURM_PROCID"] == "0":
        done = first.exists() and second.exists()
    else:
        done = first.exists() and json.loads(first.read_text())["ended_ns"] is not None
    if done:
        break
    time.sleep(0.1)
"""
MANY_HOSTS = "import pathlib; [pathlib.Path('r', f'host-{n}').mkdir() for n in range(40)]"
NO_PLACE = "import pathlib; pathlib.Path('r/report.json/taken').mkdir(parents=True)"
SRUNS = (sys.executable, str(SRUN), "--nodes")


@pytest.mark.process
@pytest.mark.parametrize(
    ("holds", "command", "before", "options", "status", "said"),
    [
        ("recompiled", "raise SystemExit(7)", (), (), 7, "check failed: recompile"),  # its own status comes first
        ("recompiled", "", (), ("--quiet",), 1, ""),
        # a command that we ended is judged by its run
        ("recompiled", REACHES_MAX_STEPS, (), ("--max-steps", "5"), 1, "check failed: recompile"),
        ("clean", REACHES_MAX_STEPS, (), ("--max-steps", "5"), 0, "check passed: recompile"),
        # a report that cannot be made passes no check; of a job with many launchers the last one makes it
        ("clean", NO_PLACE, (), (), 4, "/r --fail-on recompile"),
        ("recompiled", MANY_HOSTS, (*SRUNS, "1"), ("--quiet",), 0, ""),
        # of several launchers the last one reports and checks; the other ends first, with its command's status
        ("recompiled", TAKES_TURNS, (*SRUNS, "2"), (), 1, "check failed: recompile"),
    ],
)
def test_what_a_run_ends_with(
    tmp_path: Path, holds: str, command: str, before: tuple[str, ...], options: tuple[str, ...], status: int, said: str
) -> None:
    done = recorded(tmp_path, holds, *options, "--fail-on", "recompile", command=command, before=before)
    assert done.returncode == status, done.stderr
    found = [line for line in done.stderr.splitlines() if "check " in line]
    assert len(found) == bool(said), done.stderr
    assert said in "".join(found)
    assert done.stdout == ""
    assert said or done.stderr == ""
