"""What recording and the report add to a short run: `python benchmarks/short_run.py [--rounds 5] [--python PATH]`.

A script of the zoo is run plainly and under `stepscope run`, in turns, as whole processes with their report. Where the
difference goes is told by the run folder's own times: until the command starts, in the command beyond what it takes
plainly (of which the windows of torch.profiler), from its end to the complete manifest (the last stacks, compressing
traces), and reading, analysis and report. `--python` names an interpreter with the frameworks, else those are left
out. Keep the machine idle.
The result goes between markers of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from results import RESULTS, machine, put_between_markers

HERE = Path(__file__).resolve().parent
ZOO = HERE / "zoo"
LIMIT_S = 1.5


class Case(NamedTuple):
    """A command; `{python}` stands for the interpreter, `steps` is about six seconds."""

    name: str
    command: tuple[str, ...]
    frameworks: bool = False


CASES = (
    Case("CNN, one process", ("{python}", "clean_cnn.py", "--steps", "120")),
    Case("DDP, two ranks", ("{python}", "-m", "torch.distributed.run", "--nproc-per-node=2", "clean_ranks.py")),
    Case("HF Trainer", ("{python}", "clean_hf_trainer.py", "--steps", "60"), frameworks=True),
)


class Parts(NamedTuple):
    """Seconds of one recorded run."""

    whole: float
    start: float
    command: float
    windows: float
    end: float
    report: float


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", type=Path, help="an interpreter with transformers, for the loops of frameworks")
    options = parser.parse_args()
    head = ["run", "plain s", "recorded s", "more s", "start", "command", "of it windows", "end", "report"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case in CASES:
        if case.frameworks and options.python is None:
            continue
        python = str(options.python) if case.frameworks else sys.executable
        lines.append(_row(case, python, options.rounds))
        print(lines[-1], flush=True)
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    text = f"Medians of {options.rounds} rounds. {about}. Limit: {LIMIT_S} s more, report included.\n\n"
    put_between_markers(RESULTS, "short-run", text + "\n".join(lines))


def _row(case: Case, python: str, rounds: int) -> str:
    command = [python if word == "{python}" else word for word in case.command]
    plain: list[float] = []
    recorded: list[Parts] = []
    for number in range(rounds + 1):  # the first of each warms the caches of files
        sides = (_plain, _recorded) if number % 2 else (_recorded, _plain)
        for side in sides:
            found = side(command)
            if number:
                recorded.append(found) if isinstance(found, Parts) else plain.append(found)
    usual = statistics.median(plain)
    middle = Parts(*map(statistics.median, zip(*recorded, strict=True)))
    cells = (
        usual,
        middle.whole,
        middle.whole - usual,
        middle.start,
        middle.command - usual,
        middle.windows,
        middle.end,
        middle.report,
    )
    return f"| {case.name} | " + " | ".join(f"{seconds:.2f}" for seconds in cells) + " |"


def _plain(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=ZOO, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def _recorded(command: list[str]) -> Parts:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        ours = [sys.executable, "-m", "stepscope", "run", "--out", str(run), "--", *command]
        began_ns, started = time.time_ns(), time.perf_counter()
        subprocess.run(ours, cwd=ZOO, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        whole = time.perf_counter() - started
        (path,) = run.glob("host-*/manifest.json")
        manifest = json.loads(path.read_bytes())
        parts = Parts(
            whole=whole,
            start=(manifest["started_ns"] - began_ns) / 1e9,
            command=(manifest["ended_ns"] - manifest["started_ns"]) / 1e9,
            windows=_windows_s(run),
            end=(path.stat().st_mtime_ns - manifest["ended_ns"]) / 1e9,
            report=(began_ns - path.stat().st_mtime_ns) / 1e9 + whole,
        )
        shutil.rmtree(run)
    return parts


def _windows_s(run: Path) -> float:
    """Of the rank that spent most on them."""
    names = ("start_duration_ns", "stop_duration_ns", "export_duration_ns")
    spent = [0]
    for journal in run.glob("rank-*/events.jsonl"):
        events = [json.loads(line) for line in journal.read_text().splitlines()]
        windows = [event for event in events if event["kind"] == "window"]
        spent.append(sum(window.get(name) or 0 for window in windows for name in names))
    return max(spent) / 1e9


if __name__ == "__main__":
    main()
