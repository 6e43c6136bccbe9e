"""What watching torch.compile costs a training: `python benchmarks/compile_overhead.py [--quick]`.

Three parts, each with A against A beside it, all in one process (`benchmarks/compile_loop.py`), because two processes
that do the same differ by more than is looked for:

- capture     a compiled loop that never compiles again; the probe of compilations is put in (B) and taken out (A, C)
- everything  the same loop; all hooks of the recorder
- often       a loop that does nothing but compile, with the backend "eager"; the probe of compilations

A pair is B against A of the same round; the control is C against A. The noise floor of a row is the far end of its
control's interval: an effect whose median lies within cannot be told from none; a floor above 3 % decides nothing. Keep
the machine idle; it takes about four minutes. The result goes between the markers "compile_overhead" of
benchmarks/RESULTS.md, except with --quick.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from estimates import Estimate, estimate
from overhead import SHORT_STEP_LIMIT_US, agent_environment
from results import RESULTS, machine, put_between_markers

from stepscope.record.agent.config import epoch_offset_ns

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 900
WIDEST_FLOOR = 0.03  # a machine noisier than this shows nothing
# (part, what a unit of it is, clock)
ROWS = (
    ("capture", "step", "cpu"),
    ("capture", "step", "wall"),
    ("everything", "step", "cpu"),
    ("everything", "step", "wall"),
    ("often", "compilation", "cpu"),
    ("often", "compilation", "wall"),
)
SECTION = """
## Watching torch.compile

What the capture of compilations costs a compiled training: a loop that never compiles again, where it has nothing to do
but look, and a loop that does nothing but compile, with the backend that does least. The rest of recording goes on
while the capture is switched; a row of all hooks stands beside it. Each is held against its own A against A: an effect
whose median lies within that control's interval is below the noise floor. How it is measured is said in
`benchmarks/compile_overhead.py`.
"""
CLOCKS = {"cpu": "processor time", "wall": "wall time"}


@dataclass(frozen=True)
class Plan:
    """Rounds of each part, and the length of a block of the first two."""

    rounds: int = 80
    everything_rounds: int = 24
    often_rounds: int = 36
    block_ms: float = 300.0


@dataclass(frozen=True)
class Row:
    """One line of the result: `effect` is B over A, `control` C over A; `added_us` B minus A, median."""

    part: str
    unit: str
    clock: str
    base_us: float
    effect: Estimate
    control: Estimate
    added_us: Estimate
    verdict: str


def measure(plan: Plan, backend: str, folder: Path) -> Any:
    """Run the loop under the agent and check that it was watched."""
    out, run = folder / "costs.json", folder / "run"
    config = {**asdict(plan), "backend": backend, "out": str(out)}
    environ = agent_environment(run, epoch_offset_ns())
    line = [sys.executable, str(HERE / "compile_loop.py"), json.dumps(config)]
    done = subprocess.run(line, env=environ, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"compile_loop.py failed with status {done.returncode}")
    events = [json.loads(line) for file in run.glob("rank-*/events.jsonl") for line in file.read_text().splitlines()]
    if not any(event.get("kind") == "compile" and event.get("recompile_reason") for event in events):
        raise SystemExit("the agent wrote no recompilation, so there is nothing to measure")
    return json.loads(out.read_text())


def judge(effect: Estimate, control: Estimate) -> str:
    """Whether the effect stands out from what the loop without it differs from itself."""
    if effect.low is None or effect.high is None:
        return f"undecided: {effect.pairs} pairs are too few"
    floor = control.widest(1)
    if floor > WIDEST_FLOOR:
        return f"undecided: A against A spreads by {floor * 100:.1f} %"
    above = "below" if effect.median - 1 <= floor else "above" if effect.low > 1 else "undecided: the median is above"
    return f"{above} the noise floor of {floor * 100:.2f} %"


def row(part: str, unit: str, clock: str, rounds: list[dict[str, dict[str, float]]]) -> Row:
    """B against A and C against A of every round, by one clock."""
    arms = [{arm: cost[clock] for arm, cost in costs.items()} for costs in rounds]
    effect = estimate([cost["B"] / cost["A"] for cost in arms])
    control = estimate([cost["C"] / cost["A"] for cost in arms])
    added = estimate([(cost["B"] - cost["A"]) / 1e3 for cost in arms])
    base_us = statistics.median(cost["A"] for cost in arms) / 1e3
    return Row(part, unit, clock, base_us, effect, control, added, judge(effect, control))


def percent(value: Estimate) -> str:
    """Median and interval as a change in percent."""
    low, high = ("?" if end is None else f"{(end - 1) * 100:+.2f}" for end in (value.low, value.high))
    return f"{(value.median - 1) * 100:+.2f} [{low}, {high}] %"


def table(rows: list[Row], plan: Plan, command: str, about: dict[str, str]) -> str:
    """The result as Markdown."""
    lines = [
        f"Made with `{command}`: {plan.rounds} rounds of the capture in a loop that never compiles again, "
        f"{plan.everything_rounds} of all hooks, {plan.often_rounds} in a loop that only compiles; "
        "medians with 95 % sign intervals.",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
        "| what is switched | measured per | clock | with against without | A against A | added | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    names = {"capture": "capture", "everything": "all hooks", "often": "capture, compiling all the time"}
    for each in rows:
        base = f"{each.unit} of {each.base_us / 1e3:.2f} ms"
        low, high = ("?" if end is None else f"{end:+.1f}" for end in (each.added_us.low, each.added_us.high))
        added = f"{each.added_us.median:+.1f} [{low}, {high}] µs"
        if each.part == "everything" and each.clock == "cpu":
            added += f" (limit {SHORT_STEP_LIMIT_US:.0f})"
        lines.append(
            f"| {names[each.part]} | {base} | {CLOCKS[each.clock]} | {percent(each.effect)} | {percent(each.control)} "
            f"| {added} | {each.verdict} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="measure what watching torch.compile costs a training loop")
    parser.add_argument("--quick", action="store_true", help="a smoke test: the figures mean nothing, none is kept")
    parser.add_argument("--backend", default="inductor", help="of the loop that never compiles again")
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--everything-rounds", type=int, default=Plan.everything_rounds)
    parser.add_argument("--often-rounds", type=int, default=Plan.often_rounds)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file whose table is replaced")
    parser.add_argument("--json", type=Path, default=None, help="also write every figure here")
    return parser.parse_args()


def main() -> None:
    """Measure, print, keep."""
    args = arguments()
    plan = Plan(args.rounds, args.everything_rounds, args.often_rounds)
    if args.quick:
        plan = Plan(8, 8, 8, block_ms=20.0)
    about = machine("stepscope", "torch")
    if float(about["load before"]) > 0.5:
        print(f"the machine is busy (load {about['load before']}): its noise floor will be high", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as name:
        costs = measure(plan, args.backend, Path(name))
    rows = [row(part, unit, clock, costs[part]) for part, unit, clock in ROWS]
    command = " ".join(["python", "benchmarks/compile_overhead.py", *sys.argv[1:]])
    text = table(rows, plan, command, {**about, "backend": args.backend})
    print(text)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(each) for each in rows], indent=1))
    if not args.quick:
        if "<!-- compile_overhead:begin -->" not in args.results.read_text():
            args.results.write_text(args.results.read_text() + SECTION)
        put_between_markers(args.results, "compile_overhead", text)
        print(f"written to {args.results}", file=sys.stderr)


if __name__ == "__main__":
    main()
