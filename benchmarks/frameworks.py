"""What a recording says of loops of real frameworks, beside what they count and time of themselves.

    python benchmarks/frameworks.py [--only NAME...] [--quick] [--python PYTHON]

Runs every loop of `tests/frameworks/loops` twice, plain and under `stepscope run`, with the Python of `make frameworks`
(or --python). The table goes between the markers "frameworks" of benchmarks/RESULTS.md; with --quick (six short
loops) or --only it is printed alone. Counts do not depend on the machine's load, phases do: keep it idle.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from results import RESULTS, machine, put_between_markers  # noqa: E402
from tests.frameworks.catalogue import ALL, PYTHON, Loop, interpreter, missing  # noqa: E402
from tests.frameworks.compared import Compared, compare  # noqa: E402

QUICK = ("accelerate", "lightning", "ignite", "skorch", "endless_loader", "without_loader")
SECTION = """
## Loops of frameworks

Each loop counts its own trained steps, evaluation steps and samples, and times its data, forward, backward and
optimizer by hand (`tests/frameworks/loops`). It runs plain and under `stepscope run`; the table sets what the recording
says beside what the loop says of itself. "phases": the largest difference of a phase from the time taken by hand in the
same run, in points of all time taken by hand. "step": the median step over the one timed by hand. "framework's": the
framework's own number of the last step, ours and its. Without a loader nobody counts samples or evaluation steps (–).
"""
HEAD = ("loop", "steps", "evaluation", "samples", "phases", "step", "framework's", "first finding", "wrong")


def row(loop: Loop, compared: Compared) -> tuple[list[str], list[str]]:
    """The cells of one loop, and what is wrong with it."""
    truth, (trained, evaluated) = compared.truth, compared.samples
    wrong = compared.problems
    known = truth["samples"] is not None
    worst = max(compared.points.items(), key=lambda item: abs(item[1]))
    ours, its = compared.framework_step, truth["framework_step"]
    cells = [
        loop.name,
        f"{len(trained)}/{truth['steps']}",
        "–" if truth["evaluated"] is None else f"{len(evaluated)}/{len(truth['evaluated'])}",
        ("**no**" if "samples" in wrong else "exact") if known else "–",
        f"{worst[0]} {worst[1]:+.1f}",
        "–" if compared.step_ratio is None else f"{compared.step_ratio:.2f}",
        "–" if its is None else f"{'–' if ours is None else ours}/{its}",
        compared.first_finding,
        ", ".join(wrong) or "–",
    ]
    return cells, wrong


def section(rows: list[tuple[list[str], list[str]]], about: dict[str, str]) -> str:
    """Everything between the markers."""
    lines = ["Made with `python benchmarks/frameworks.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |" for cells, _ in rows]
    lines.append("")
    for name in ("steps", "evaluation", "samples", "phases", "framework step"):
        right = [name not in wrong and "failed" not in wrong for _, wrong in rows]
        lines.append(f"- {name} right: {sum(right)} of {len(rows)}")
    return "\n".join(lines)


def measure(loop: Loop, python: Path, absent: set[str]) -> tuple[list[str], list[str]]:
    """The row of one loop; one that cannot run says why."""
    lacking = absent.intersection(("torch", *loop.needs))
    if lacking:
        return [loop.name, *["–"] * 6, "not run", f"{', '.join(sorted(lacking))} is not installed"], ["failed"]
    folder = Path(tempfile.mkdtemp(prefix=f"{loop.name}-"))
    try:
        return row(loop, compare(loop, python, folder))
    except Exception as error:  # noqa: BLE001  # one loop's failure is a row of the table, not its end
        return [loop.name, *["–"] * 6, "failed", str(error).strip().splitlines()[-1][:200]], ["failed"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[loop.name for loop in ALL])
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}; nothing written")
    parser.add_argument("--python", type=Path, default=interpreter(), help="a Python that has the frameworks")
    options = parser.parse_args()
    if not options.python.is_file():
        sys.exit(f"{options.python} is missing: `make frameworks` makes it, or --python (or {PYTHON}) names another")
    names = options.only or (QUICK if options.quick else [loop.name for loop in ALL])
    about, absent, rows = machine("stepscope"), missing(options.python), []
    for loop in ALL:
        if loop.name in names:
            start = time.monotonic()
            rows.append(measure(loop, options.python, absent))
            told = ", ".join(rows[-1][1]) or "right"
            print(f"{loop.name}: {told}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    text = section(rows, about)
    print(text)
    if not (options.quick or options.only):
        if "<!-- frameworks:begin -->" not in RESULTS.read_text():
            RESULTS.write_text(RESULTS.read_text().rstrip() + "\n" + SECTION)
        put_between_markers(RESULTS, "frameworks", text)


if __name__ == "__main__":
    main()
