"""The command line as a shell sees it: help, exit codes, one-line errors, quiet ends."""

from __future__ import annotations

import os
import re
import shlex
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
from tests.cli.calls import call
from tests.comparison.run_sets import make_run


def test_help_lists_every_command_and_each_has_one_with_an_example(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def shown(*words: str) -> str:
        assert call(*words, "--help") == 0
        out, err = capfd.readouterr()
        assert err == ""
        return out

    listed = shown()
    assert "stepscope run -- python train.py" in listed
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary[:40])}", listed, re.MULTILINE)
        own = shown(name)
        for example in command.examples:
            assert example.startswith(f"stepscope {name}")
            assert f"\n    {example}\n" in own
        assert all(len(line) <= 80 for line in own.splitlines() if "stepscope" not in line)


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
        ("stepscope runs . > /dev/full", 4, "stepscope: no space left on device; send the output elsewhere\n"),
        ("stepscope runs . | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("stepscope --help > /dev/full", 4, "stepscope: no space left on device; send the output elsewhere\n"),
        (
            "mkdir gone; cd gone; rmdir ../gone; stepscope run -- true",
            4,
            "stepscope: No such file or directory; check that it is there, and its permissions\n",
        ),
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
from stepscope import __main__ as program
program.LARGE_BYTES = int(sys.argv[2])
program.spare_memory([sys.argv[1], "/nowhere"])
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


TREE = ("empty", "mine", "run/rank-0", "experiment/runs/001-pilot/rank-0", "experiment/runs/002-baseline/rank-0")
STACKS = 'process 10:"python train.py";thread (10): MainThread;<module> (train.py:9);step (pkg/flow/n.py:3) 40\n'
FILES = {
    "empty.txt": "",
    "garbage.json": "\0\x01 not a trace",
    "bare.json": '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]}',
    "profile.txt": STACKS,
    "mine/thesis.txt": "years",
    "train.sbatch": "#!/bin/bash\nsrun python train.py\n",
    "other.sbatch": "#!/bin/bash\necho python train.py\n",
}
TABLE = "analyze t.json --table operators"
TRY = "experiment --try gc=freeze"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with something of every kind in it; the user's cache is elsewhere."""
    folder = tmp_path / "here"
    for name in (*TREE, *(f"runs/run-{number}/rank-0" for number in range(5))):
        (folder / name).mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    gpu_traces.write(folder / "t.json")
    make_run(folder / "a")
    make_run(folder / "b")
    (folder / "link").symlink_to("train.sbatch")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("nonsense", 2, "--help`"),
        ("--nonsense", 2, "--nonsense"),
        ("analyze", 2, "PATH"),
        ("analyze . --nonsense", 2, "--nonsense"),
        ("analyze . --json", 2, "--json"),
        ("analyze missing", 3, "no such file or folder"),
        ("analyze empty", 3, "no trace in it"),
        ("analyze empty.txt", 3, "empty.txt"),
        ("analyze garbage.json", 3, "garbage.json"),
        ("analyze runs", 3, "holds 5 runs, name one of them, e.g. runs/run-2, runs/run-3, runs/run-4"),
        ("analyze experiment", 3, "holds 2 runs, name one of them, e.g. experiment/runs/001-pilot"),
        ("analyze a --json - --html -", 2, "stdout"),
        ("analyze a --json x --html x", 2, "name the same file"),
        ("analyze a --json .", 2, "."),
        ("analyze a --json empty.txt", 2, "empty.txt: exists; add --force"),
        ("analyze a --fail-on recompiles", 2, "no such check; there are recompile, graph-break"),
        ("analyze a --fail-on ''", 2, "--fail-on (nothing): no such check"),
        ("analyze a --fail-on '\x1b[2J'", 2, "no such check"),
        ("analyze a --fail-on recompile --diff b", 2, "leave out --diff"),
        ("analyze t.json --steps 9:3", 2, "--steps 9:3"),
        ("analyze t.json --steps x", 2, "--steps x"),
        ("analyze t.json --steps 900:901", 2, "no such step was recorded"),
        ("analyze t.json --map /build", 2, "--map /build"),
        ("analyze t.json --map =x", 2, "--map =x"),
        ("analyze t.json --tables x --no-cache", 2, "--no-cache"),
        ("analyze t.json --sort calls", 2, "--table"),
        ("analyze t.json --table nothing", 2, "overview, steps, gpus"),
        (f"{TABLE} --sort nothing", 2, "self_device"),
        (f"{TABLE} --group launch", 2, "name or shapes"),
        ("analyze t.json --table gpus --group name", 2, "none for gpus"),
        ("analyze t.json --table kernels --step 1", 2, "--step"),
        (f"{TABLE} --filter '('", 2, "regular expression"),
        (f"{TABLE} --top -1", 2, "--top"),
        (f"{TABLE} --html x.html", 2, "--html"),
        ("analyze t.json --table stacks", 2, "--filter"),
        (f"{TABLE} --csv - --json -", 2, "stdout"),
        (f"{TABLE} --diff-span 1", 2, "--diff"),
        ("analyze t.json --diff nowhere", 3, "no such file"),
        ("analyze t.json --diff . --table counters", 2, "overview, tensorboard"),
        ("hotspots", 2, "nothing to read"),
        ("hotspots missing.txt", 3, "missing.txt"),
        ("hotspots bare.json", 3, "no sampled stacks"),
        ("hotspots profile.txt --rows 0", 2, "--rows 0: not a number of rows"),
        ("hotspots profile.txt --rows many", 2, "or all"),
        ("hotspots profile.txt --by lines", 2, "line, function, file, module"),
        ("hotspots profile.txt --process worker", 2, "main, workers, all"),
        ("hotspots profile.txt --rank 7", 2, "ranks with samples: 0"),
        ("hotspots profile.txt --phase forwards", 2, "phases with samples"),
        ("hotspots profile.txt --by file --no-aggregate-leaf-paths", 2, "leave out --by"),
        ("hotspots profile.txt --library /", 2, "--library"),
        ("hotspots profile.txt --map nothing", 2, "--map nothing"),
        ("hotspots profile.txt --json - --csv -", 2, "both want stdout"),
        ("hotspots profile.txt --library a --library-name a", 2, "give one of them"),
        ("hotspots profile.txt --rows 1 --num-rows 1", 2, "give one of them"),
        ("hotspots profile.txt --file profile.txt", 2, "give one of them"),
        ("flamegraph missing.txt", 3, "missing.txt"),
        ("flamegraph empty.txt", 3, "empty.txt"),
        ("flamegraph profile.txt --by colour", 2, "--by colour: unknown; use function or line"),
        ("flamegraph profile.txt --min-share -1", 2, "--min-share -1"),
        ("flamegraph profile.txt --phase naptime", 2, "--phase naptime"),
        ("flamegraph profile.txt --rank 9", 2, "--rank 9"),
        ("flamegraph profile.txt --process gpu", 2, "--process gpu"),
        ("flamegraph profile.txt --diff missing.txt", 3, "missing.txt"),
        ("flamegraph profile.txt --diff others", 2, "--rank 1 --diff others"),
        ("flamegraph profile.txt --tree rank:8", 2, "there are all"),
        ("flamegraph profile.txt -o a.png", 2, "its ending names no format; use .html"),
        ("compare t.json empty", 3, "empty"),
        ("compare empty a", 3, "empty"),
        ("compare a missing", 3, "missing"),
        ("compare t.json garbage.json", 3, "garbage.json"),
        ("compare a a", 2, "on both sides"),
        ("compare a", 2, "B"),
        ("compare a b --top -1", 2, "--top"),
        ("compare a b --json - --csv -", 2, "stdout"),
        *((f"compare a b --fail-on '{check}'", 2, "slower=3%") for check in ("faster=3%", "slower", "slower=x%", "")),
        *((f"compare a b --fail-on '{check}'", 2, "slower=3%") for check in ("slower=3", "slower=-1%")),
        ("experiment -- true", 2, "nothing to try"),
        ("experiment --try no.such=1 -- true", 2, "no.such"),
        ("experiment --try loader.num_workers=two -- true", 2, "loader.num_workers"),
        ("experiment --try loader.num_workers=2,x -- true", 2, "loader.num_workers"),
        ("experiment --try gc -- true", 2, "gc"),
        (f"{TRY} --try gc=freeze -- true", 2, "gc=freeze is given twice"),
        (f"{TRY} --steps 9 -- true", 2, "--steps 9"),
        (f"{TRY} --warmup -1 -- true", 2, "--warmup -1"),
        (f"{TRY} --budget 0 -- true", 2, "--budget"),
        (f"{TRY} --screen -- true", 2, "--screen"),
        (f"{TRY} --pairs 4:3 -- true", 2, "--pairs"),
        (f"{TRY} --pairs many -- true", 2, "--pairs"),
        (f"{TRY} --width 0% -- true", 2, "--width"),
        ("experiment --from no-such-run -- true", 2, "no-such-run"),
        ("experiment --from empty -- true", 3, "empty"),
        (f"{TRY} --self -- true", 2, "--self"),
        ("experiment --together --self -- true", 2, "--together"),
        (f"{TRY} -- no-such-program-here", 4, "command not found"),
        (f"{TRY} --out /proc/self/nothing/here -- true", 4, "--out"),
        (f"{TRY} --out mine -- true", 2, "holds no experiment"),
        ("run --json - -- true", 2, "stdout is the command's"),
        ("run --window active=x -- true", 2, "--window"),
        ("run --no-window --window active=1 -- true", 2, "--no-window"),
        ("run --rate 0 -- true", 2, "--rate"),
        ("run --max-steps 0 -- true", 2, "--max-steps"),
        ("run --no-report --json x -- true", 2, "--no-report"),
        ("run --no-report --fail-on recompile -- true", 2, "--no-report"),
        ("run --out /proc/self/nothing/here -- true", 4, "--out"),
        ("run --out a -- true", 2, "a"),
        ("run -- no-such-program-here", 127, "command not found"),
        ("slurm absent", 3, "absent"),
        ("slurm .", 3, "."),
        ("slurm other.sbatch", 2, "stepscope run --"),
        ("slurm train.sbatch --out other.sbatch", 2, "--force"),
        *((f"slurm train.sbatch --force --out {name}", 2, "never changed") for name in ("./train.sbatch", "link")),
        ("attach 0", 2, "no process id"),
        ("attach 4194305", 3, "no process 4194305"),
        *((f"attach 1 --seconds {seconds}", 2, "--seconds") for seconds in ("0", "nan")),
        ("attach 1 --rows none", 2, "--rows"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_everything_as_it_was(
    line: str, status: int, said: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() if path.is_file() else None for path in here.rglob("*")}
    assert call(*shlex.split(line)) == status
    shown = capfd.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1), shown
    assert shown.err.startswith("stepscope: ")
    assert said in shown.err
    assert "\x1b" not in shown.err
    assert {path: path.read_bytes() if path.is_file() else None for path in here.rglob("*")} == before
