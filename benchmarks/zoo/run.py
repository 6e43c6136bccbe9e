"""Scores diagnoses on scripts whose cost is known: `python benchmarks/zoo/run.py [--only NAME...] [--quick]`.

For every entry of `table.py`: the planted form under `stepscope run`; both forms unrecorded, in alternating order, to
measure what the twin saves; the planted form under TraceML. Scripts of frameworks take the environment of `make
frameworks` or the Python of --python, are left out without one, and are not shown to TraceML. A script that fails makes
a row that says so. Keep the machine idle; it takes about half an hour. The result goes between the markers "zoo" of
benchmarks/RESULTS.md, except with --quick (one round, half the steps) or --only, which print it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import launch  # noqa: E402
import traceml_peer  # noqa: E402
from planted import find  # noqa: E402
from results import RESULTS, machine, put_between_markers  # noqa: E402
from score import gain, score  # noqa: E402
from table import ENTRIES, Entry  # noqa: E402
from tests.frameworks.catalogue import PYTHON, interpreter, missing  # noqa: E402
from zoo_report import SECTION, Row, text  # noqa: E402

ROUNDS = 3
RUNS = HERE / "stepscope-runs"  # everything a run leaves, kept to be looked at until the next
PEER = HERE.parent / ".peers" / "traceml"


def measure(entry: Entry, rounds: int, part: float, traceml: Path | None) -> Row:
    """Everything about one script. What fails ends the row, not the run."""
    folder = RUNS / entry.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    peer = None
    try:
        planted = None if entry.clean else find(entry.script)
        report = launch.recorded(entry, folder, part)
        peer = None if traceml is None or entry.needs else launch.under_traceml(entry, folder, part, traceml)
        measured = None if entry.clean else gain([_round(entry, folder, part, number) for number in range(rounds)])
        return Row(entry, score(entry, report, planted, measured), measured, peer)
    except (launch.Failed, ValueError, KeyError, OSError) as error:
        return Row(entry, peer=peer, problem=str(error))


def _round(entry: Entry, folder: Path, part: float, number: int) -> tuple[float, float]:
    """Mean step times of (planted, fixed), the first of the two changing from round to round."""
    order = (False, True) if number % 2 == 0 else (True, False)
    means = {fixed: launch.plain(entry, folder, part, fixed=fixed) for fixed in order}
    return means[False], means[True]


def main() -> None:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[entry.name for entry in ENTRIES])
    parser.add_argument("--quick", action="store_true", help="one round, half the steps, nothing written")
    parser.add_argument("--rounds", type=int, default=None, help=f"plain runs of each form ({ROUNDS})")
    parser.add_argument("--python", type=Path, help="a Python that has the frameworks")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    part = 0.5 if options.quick else 1.0
    about = machine("stepscope", "torch", "numpy", "pillow")
    traceml, peer_problem = traceml_peer.environment(PEER)
    if traceml is not None:
        about["TraceML"] = traceml_peer.REQUIREMENT
    if options.python is not None:
        os.environ[PYTHON] = str(options.python.absolute())
    absent = missing(interpreter())
    entries = [entry for entry in ENTRIES if not options.only or entry.name in options.only]
    left_out = [entry.name for entry in entries if entry.needs in absent]
    entries = [entry for entry in entries if entry.needs not in absent]
    if left_out:
        print(f"not run, {interpreter()} lacks what they need: {', '.join(left_out)}", file=sys.stderr)
    rows = []
    for number, entry in enumerate(entries, 1):
        start = time.monotonic()
        rows.append(measure(entry, rounds, part, traceml))
        told = rows[-1].problem or f"{time.monotonic() - start:.0f} s"
        print(f"{number}/{len(entries)} {entry.name}: {told}", file=sys.stderr, flush=True)
    interval = "the 95 % sign interval" if rounds >= 6 else "their range"
    how = f"Made with `python benchmarks/zoo/run.py --rounds {rounds}`: medians of the rounds, in brackets {interval}."
    section = text(rows, how, about, peer_problem)
    print(section)
    if not (options.quick or options.only):
        if "<!-- zoo:begin -->" not in RESULTS.read_text():
            RESULTS.write_text(RESULTS.read_text().rstrip() + "\n" + SECTION)
        put_between_markers(RESULTS, "zoo", section)


if __name__ == "__main__":
    main()
