"""How many planted scripts `stepscope fix` cures, by its answers alone: `python benchmarks/zoo/fixes.py [--quick]`.

Each script is copied and recorded; of the findings that `analyze --brief` tells, in their order, the first for which
`fix` prints a difference is applied by `patch -p1`, to another copy. Both copies then run unrecorded, in alternating
order. A script is cured where the change applies, the script runs, and it gains in every round, by the median at least
the floor of a finding, and not certainly more than the finding's ceiling. For every other one stands the reason that
`fix` gave. The result goes between the markers "fixes" of benchmarks/RESULTS.md, except with --only or --quick, which
print it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import launch  # noqa: E402
from results import RESULTS, machine, put_between_markers  # noqa: E402
from score import Gain, gain  # noqa: E402
from table import ENTRIES, Entry  # noqa: E402

ROUNDS = 3
FLOOR = 0.05  # of the step: findings that cost less are not made
LEAST = 9  # scripts to cure


@dataclass(frozen=True)
class Copied(Entry):
    """A script of the zoo in another folder."""

    folder: Path = HERE

    @property
    def script(self) -> Path:
        return self.folder / f"{self.name}.py"


@dataclass(frozen=True)
class Row:
    """What came of one script; `said` is the reason, or what failed."""

    name: str
    rule: str = ""
    lines: str = ""
    ceiling: float | None = None
    gain: Gain | None = None
    said: str = ""

    @property
    def cured(self) -> bool:
        held = self.gain is not None and self.ceiling is not None and self.gain.low <= self.ceiling
        return held and self.gain is not None and self.gain.median >= FLOOR and self.gain.low > 0


def measure(entry: Entry, rounds: int, part: float, folder: Path) -> Row:
    """Record, ask, apply, run again. What fails ends the row, not the run."""
    before, after = _copy(entry, folder / "before"), _copy(entry, folder / "after")
    try:
        launch.recorded(before, before.folder, part)
        findings = [one for one in _brief(before.folder / "run") if one["share"] >= FLOOR]
        reasons = []
        for finding in findings:
            line = [sys.executable, "-m", "stepscope", "fix", str(before.folder / "run"), "--finding", finding["id"]]
            told = subprocess.run(line, cwd=before.folder, capture_output=True, check=False)
            if told.returncode == 0 and told.stdout:
                break
            if finding["rule"] != "system.other_processes":  # of the machine, not of the script
                reasons.append(f"{finding['rule']}: {_reason(told.stderr.decode())}")
        else:
            return Row(entry.name, said="; ".join(reasons[:1]) or "no finding")
        applied = subprocess.run(
            ["patch", "-p1"], cwd=after.folder, input=told.stdout, capture_output=True, check=False
        )
        row = Row(entry.name, finding["rule"], _changed(told.stdout.decode()), finding["gain_ceiling"])
        if applied.returncode:
            return Row(row.name, row.rule, row.lines, row.ceiling, said=f"patch: {applied.stdout.decode().strip()}")
        pairs = []
        for number in range(rounds):
            sides = (before, after) if number % 2 == 0 else (after, before)
            means = {side.folder: launch.plain(side, side.folder, part, fixed=False) for side in sides}
            pairs.append((means[before.folder], means[after.folder]))
        return Row(row.name, row.rule, row.lines, row.ceiling, gain(pairs))
    except (launch.Failed, ValueError, KeyError, OSError, subprocess.SubprocessError) as error:
        return Row(entry.name, said=f"failed: {error}")


def _copy(entry: Entry, folder: Path) -> Copied:
    folder.mkdir(parents=True)
    for name in (entry.script.name, "common.py"):
        shutil.copy(HERE / name, folder)
    return Copied(**{field.name: getattr(entry, field.name) for field in fields(Entry)}, folder=folder)


def _brief(run: Path) -> list[dict[str, Any]]:
    """The findings as a program reads them."""
    line = [sys.executable, "-m", "stepscope", "analyze", str(run), "--brief"]
    told = subprocess.run(line, capture_output=True, check=True)
    findings: list[dict[str, Any]] = json.loads(told.stdout)["findings"]
    return findings


def _reason(said: str) -> str:
    line = next((line for line in said.splitlines() if "no mechanical change: " in line), said.strip())
    return line.partition("no mechanical change: ")[2].partition(". ")[0] or line


def _changed(difference: str) -> str:
    """The lines that the difference brings, or those that it takes where it brings none."""
    lines = [line for line in difference.splitlines() if line[:3] not in ("---", "+++")]
    new = [line[1:].strip() for line in lines if line.startswith("+")]
    old = [line[1:].strip() for line in lines if line.startswith("-")]
    return " ⏎ ".join(new) if new else "without " + " ⏎ ".join(old)


def text(rows: list[Row], how: str, about: dict[str, str]) -> str:
    """The section, in Markdown."""
    cured = sum(row.cured for row in rows)
    said = [f"{how}", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    said += ["| script | change by `fix` | finding | gain | ceiling | cured |", "|---|---|---|---|---|---|"]
    for row in (row for row in rows if row.gain is not None):
        assert row.gain is not None
        assert row.ceiling is not None
        told = f"{row.gain.median:.0%} [{row.gain.low:.0%}, {row.gain.high:.0%}]"
        code = row.lines.replace("|", "\\|")
        said.append(
            f"| {row.name} | `{code}` | {row.rule} | {told} | {row.ceiling:.0%} | {'yes' if row.cured else '**no**'} |"
        )
    said += ["", "| script | no change, because |", "|---|---|"]
    said += [f"| {row.name} | {row.said.replace('|', chr(92) + '|')} |" for row in rows if row.gain is None]
    said += ["", f"- cured: {cured} of {len(rows)} (at least {LEAST}): {'holds' if cured >= LEAST else 'missed'}"]
    return "\n".join(said)


def main() -> None:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    entries = [entry for entry in ENTRIES if not entry.clean and entry.needs is None]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[entry.name for entry in entries])
    parser.add_argument("--quick", action="store_true", help="one round, half the steps, nothing written")
    parser.add_argument("--rounds", type=int, default=None, help=f"plain runs of each form ({ROUNDS})")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    about = machine("stepscope", "torch", "libcst")
    rows = []
    for entry in entries:
        if options.only and entry.name not in options.only:
            continue
        with tempfile.TemporaryDirectory(prefix="stepscope-fixes-") as folder:
            rows.append(measure(entry, rounds, 0.5 if options.quick else 1.0, Path(folder)))
        told = "cured" if rows[-1].cured else rows[-1].said or "not cured"
        print(f"{entry.name}: {told}", file=sys.stderr, flush=True)
    made = f"Made with `python benchmarks/zoo/fixes.py --rounds {rounds}`"
    how = f"{made}: gain of the mean step, median of the rounds, in brackets their range."
    section = text(rows, how, about)
    print(section)
    if not (options.quick or options.only):
        put_between_markers(RESULTS, "fixes", section)


if __name__ == "__main__":
    main()
