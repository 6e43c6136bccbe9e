"""Experiments on two equal programs: how often stepscope calls them different.

    python benchmarks/same_program.py [--comparisons 20] [--keep DIR]

Each comparison is a whole `stepscope experiment` of a real training script against itself: the candidate differs in an
environment variable that nothing reads. A verdict other than "no difference" or "undecided" is false. Keep the machine
idle: it waits until what ran before has faded from the load average. The result goes into RESULTS.md.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results import RESULTS, machine, put_between_markers

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "naive_gpt" / "train.py"
COMMAND = [sys.executable, str(SCRIPT), "--steps", "400"]
KNOB = "env:READ_BY_NOTHING=1"
LIMITS = ["--warmup", "8", "--steps", "24", "--pairs", "3:3"]  # or twenty comparisons take hours
MOST_FALSE = 2  # of twenty
RIGHT = ("no_difference", "undecided")
IDLE_LOAD, PATIENCE_S = 0.5, 600
FIGURES = {"mean_ms": "mean", "median_ms": "median"}


def wait_until_idle() -> None:
    """Until the load average of the last minute is low; what it is after a while is what this machine has."""
    deadline = time.monotonic() + PATIENCE_S
    while os.getloadavg()[0] > IDLE_LOAD and time.monotonic() < deadline:
        time.sleep(5)


def compare(folder: Path, number: int) -> dict[str, Any]:
    """One experiment; the candidate of its document."""
    document = folder / f"{number:02d}.json"
    command = [sys.executable, "-m", "stepscope", "experiment", "--try", KNOB, *LIMITS, "--quiet"]
    command += ["--out", str(folder / f"{number:02d}"), "--json", str(document), "--", *COMMAND]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"comparison {number} ended with {done.returncode}: {done.stderr.strip()}")
    (candidate,) = json.loads(document.read_text())["candidates"]
    return dict(candidate)


def row(number: int, candidate: dict[str, Any]) -> str:
    """A line of the table; the figure is the one that the verdict rests on."""
    figure = candidate["decided_by"] or "mean_ms"
    effect = candidate["effects"].get(figure) or {}
    ratio, low, high = (effect.get(key) for key in ("ratio", "low", "high"))
    change = "–" if ratio is None else f"{100 * (ratio - 1):+.1f} %"
    interval = "–" if low is None or high is None else f"{100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %"
    word = candidate["verdict"].replace("_", " ")
    return f"| {number} | {word} | {FIGURES[figure]} | {change} | {interval} | {candidate['pairs']} |"


def summary(found: list[dict[str, Any]], seconds: float) -> list[str]:
    """What the comparisons say together."""
    words = collections.Counter(one["verdict"] for one in found)
    false = sum(count for word, count in words.items() if word not in RIGHT)
    halves = [
        (one["effect"]["high"] - one["effect"]["low"]) / 2
        for one in found
        if one["effect"] and one["effect"]["low"] is not None
    ]
    allowed = MOST_FALSE * len(found) / 20
    holds = "holds" if false <= allowed else "missed"
    counts = ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in words.most_common())
    lines = [
        f"- verdicts: {counts}",
        f"- other than no difference or undecided: {false} of {len(found)} (at most {allowed:.0f}): {holds}",
        f"- took {seconds / 60:.0f} min, {sum(one['pairs'] for one in found)} pairs of runs",
    ]
    if halves:
        lines.append(f"- half-width of the interval, median: {100 * statistics.median(halves):.1f} %")
    return lines


def main() -> None:
    """Run all comparisons, then write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="a folder for the experiments; else they are deleted")
    options = parser.parse_args()
    wait_until_idle()
    about = machine("stepscope", "torch", "scipy")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepscope-same-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for number in range(1, options.comparisons + 1):
            found.append(compare(folder, number))
            print(row(number, found[-1]), file=sys.stderr, flush=True)
    lines = [
        f"Made with `python benchmarks/same_program.py --comparisons {options.comparisons}`: `stepscope experiment`"
    ]
    lines += [f"with `{' '.join(LIMITS)}` on `examples/naive_gpt` against itself.", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", "| comparison | verdict | by the step's | change | interval | pairs |", "|---|---|---|---|---|---|"]
    lines += [row(number, one) for number, one in enumerate(found, 1)]
    lines += ["", *summary(found, time.monotonic() - began)]
    put_between_markers(RESULTS, "same", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
