"""What recording costs a training loop: `python benchmarks/overhead.py [--quick] [--only PART …]`.

Four parts, each for one thread and for as many threads as there are cores, each with A against A beside it:

- recording   one loop in one process; the agent's hooks are taken out and the telemetry process is stopped (A, C), or
              put in and let go on (B), for blocks of a second: the wall time of a step, as two processes that do the
              same differ by more than is looked for
- sampling    one endless loop; py-spy at the default rate and mode is switched on (B) and off (A, C) beside it
- hooks       one loop in one process; the agent's hooks are taken out (A, C) and put in (B) for short blocks of it, on
              a step that trains a single weight and on one of 1 ms, with a loader and without: microseconds per step,
              of the training thread's processor time, of which other processes take nothing; the hooks never wait
- metrics     the same with all hooks in, of which those that keep losses, rates and norms are put in (B) and taken out;
              the steps clip their gradients

A pair is B against A of the same round; the control is C against A. Keep the machine idle. The result goes between
the markers of benchmarks/RESULTS.md, except with --quick.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from estimates import Estimate, estimate, verdict
from results import RESULTS, machine, put_between_markers

from stepscope.record.agent.config import Clock, WindowConfig, epoch_offset_ns
from stepscope.record.host.launch import child_environment, package_folder
from stepscope.record.host.options import DEFAULT_RATE_HZ, SEGMENT_SECONDS
from stepscope.record.host.pyspy import Sampler, find_pyspy
from stepscope.record.host.telemetry import TelemetryConfig

HERE = Path(__file__).resolve().parent
ORDERS = tuple(itertools.permutations("ABC"))
PARTS = ("recording", "sampling", "hooks", "metrics")

RECORDING_LIMIT = 0.01  # of the step time …
SHORT_STEP_MS, SHORT_STEP_LIMIT_US = 3.0, 30.0  # … or this much a step, where steps are shorter
METRICS_LIMIT_US = 6.0
SAMPLING_LIMIT = 0.02


@dataclass(frozen=True)
class Plan:
    """How long and how often: rounds of sampling (`pairs`), of recording, and of hooks, and the length of their blocks.

    `block_seconds` is one on or off period of sampling: a whole segment by default.
    """

    pairs: int = 20
    recording_rounds: int = 40
    recording_ms: float = 1000.0  # telemetry takes a reading about once
    hook_rounds: int = 200
    hook_ms: float = 200.0
    block_seconds: float = SEGMENT_SECONDS


@dataclass(frozen=True)
class Row:
    """One line of the result. Ratios are B over A (neutral 1); microseconds are B minus A (neutral 0)."""

    part: str
    threads: int
    length: str
    base_ms: float
    effect: Estimate
    control: Estimate
    unit: str  # "ratio" | "us"
    limit: float
    verdict: str


Steps = dict[str, list[list[int]]]  # {length: [[start_ns, end_ns], …]}


# ------------------------------------------------------------------------------------------------------ processes


def start_loop(config: dict[str, Any], environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start loop.py and return once it has imported torch."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "loop.py"), json.dumps(config)], env=environ, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"loop.py did not start (status {process.wait()})")
    return process


def run_loop(config: dict[str, Any], folder: Path, *, recorded: bool = False, telemetry: bool = False) -> Any:
    """Run loop.py to its end and return what it measured."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "steps.json"
    beside = out.parent / "beside"
    config = {**config, "out": str(out), "beside": str(beside) if telemetry else None}
    with contextlib.ExitStack() as stack:
        offset = epoch_offset_ns()
        environ = agent_environment(out.parent / "run", offset) if recorded else None
        process = start_loop(config, environ)
        if telemetry:
            pid = stack.enter_context(telemetry_beside(process.pid, out.parent / "run" / "host-bench", offset))
            beside.write_text(str(pid))
        if process.wait() != 0:
            raise SystemExit(f"loop.py failed with status {process.returncode}")
    if recorded and not list((out.parent / "run").glob("rank-*/steps.jsonl")):
        raise SystemExit("the agent wrote no steps, so there is nothing to measure")
    return json.loads(out.read_text())


def agent_environment(run: Path, offset: int, **more: Any) -> dict[str, str]:
    """The environment `stepscope run --no-window` gives its command, with `more` in its configuration."""
    host = run / "host-bench"
    host.mkdir(parents=True)
    window = asdict(WindowConfig(mode="off"))
    configuration = {
        "run": str(run),
        "host_dir": str(host),
        "package": package_folder(),
        "launcher_pid": os.getpid(),
        "epoch_offset_ns": offset,
        "window": window,
        "max_steps": None,
        "faults": None,
        **more,
    }
    return child_environment(os.environ, configuration)


@contextlib.contextmanager
def telemetry_beside(pid: int, host_dir: Path, offset: int) -> Iterator[int]:
    """The telemetry process as `stepscope run` starts it, without sampling."""
    config = TelemetryConfig(str(host_dir), pid, offset, DEFAULT_RATE_HZ, SEGMENT_SECONDS, None)
    line = [sys.executable, "-m", "stepscope.record.host.telemetry", json.dumps(asdict(config))]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


# ------------------------------------------------------------------------------------------------------- measuring


def mean_ms(rows: list[list[int]]) -> float:
    """Mean step time: what the user pays, stalls included."""
    if not rows:
        raise SystemExit("no step was measured; use longer --seconds")
    return statistics.fmean(end - start for start, end in rows) / 1e6


def rounds(pairs: int, measure: Callable[[str], Steps]) -> list[dict[str, Steps]]:
    """`pairs` rounds of the arms A, B and C, their order another one each time."""
    done = []
    for index in range(pairs):
        order = ORDERS[index % len(ORDERS)]
        done.append({arm: measure(arm) for arm in order})
        print(f"  round {index + 1} of {pairs}", file=sys.stderr, flush=True)
    return done


def recording(plan: Plan, threads: int, repeats: dict[str, int], folder: Path) -> list[Row]:
    """Hooks and telemetry, switched on and off beside each other."""
    config = {"mode": "switched", "threads": threads, "repeats": repeats, "clock": "wall"}
    config |= {"rounds": plan.recording_rounds, "block_ms": plan.recording_ms}
    measured = run_loop(config, folder, recorded=True, telemetry=True)
    return [recording_row(threads, length, rounds_ns) for length, rounds_ns in measured.items()]


def recording_row(threads: int, length: str, rounds_ns: list[dict[str, float]]) -> Row:
    """B over A and C over A of every round, from the mean step of its blocks in nanoseconds."""
    base_ms = statistics.median(arms["A"] for arms in rounds_ns) / 1e6
    limit = RECORDING_LIMIT if base_ms >= SHORT_STEP_MS else SHORT_STEP_LIMIT_US / 1e3 / base_ms
    effect = estimate([arms["B"] / arms["A"] for arms in rounds_ns])
    control = estimate([arms["C"] / arms["A"] for arms in rounds_ns])
    judged = verdict(effect, control, limit=limit, neutral=1)
    return Row("recording", threads, length, base_ms, effect, control, "ratio", limit, judged)


def ratio_row(
    part: str, threads: int, length: str, base_ms: float, measured: list[dict[str, Steps]], limit: float
) -> Row:
    """B over A and C over A of every round."""
    means = [{arm: mean_ms(steps[length]) for arm, steps in arms.items()} for arms in measured]
    effect = estimate([arms["B"] / arms["A"] for arms in means])
    control = estimate([arms["C"] / arms["A"] for arms in means])
    judged = verdict(effect, control, limit=limit, neutral=1)
    return Row(part, threads, length, base_ms, effect, control, "ratio", limit, judged)


def hooks(plan: Plan, threads: int, repeats: dict[str, int], folder: Path, *, metrics: bool = False) -> list[Row]:
    """Microseconds the hooks add to a step. Within one process, for two processes differ by more than that."""
    shortest = min(repeats, key=int)
    config = {"mode": "switched", "threads": threads, "repeats": {shortest: repeats[shortest]}, "clock": "thread"}
    config |= {"rounds": plan.hook_rounds, "block_ms": plan.hook_ms, "metrics": metrics}
    measured = run_loop(config, folder, recorded=True)
    part, limit = ("metrics", METRICS_LIMIT_US) if metrics else ("hooks", SHORT_STEP_LIMIT_US)
    return [hooks_row(threads, length, rounds_ns, part, limit) for length, rounds_ns in measured.items()]


def hooks_row(
    threads: int,
    length: str,
    rounds_ns: list[dict[str, float]],
    part: str = "hooks",
    limit: float = SHORT_STEP_LIMIT_US,
) -> Row:
    """B minus A and C minus A of every round, from the processor time of a step in nanoseconds."""
    effect = estimate([(arms["B"] - arms["A"]) / 1e3 for arms in rounds_ns])
    control = estimate([(arms["C"] - arms["A"]) / 1e3 for arms in rounds_ns])
    judged = verdict(effect, control, limit=limit, neutral=0)
    base_ms = statistics.median(arms["A"] for arms in rounds_ns) / 1e6
    return Row(part, threads, length, base_ms, effect, control, "us", limit, judged)


def sampling(plan: Plan, threads: int, repeats: dict[str, int], folder: Path) -> list[Row]:
    """One loop; the sampler is switched on for a block in every round."""
    pyspy = find_pyspy()
    if pyspy is None:
        print("  py-spy is not installed: sampling is not measured", file=sys.stderr)
        return []
    out = Path(tempfile.mkdtemp(dir=folder)) / "steps.json"
    seconds = 3 * plan.pairs * (plan.block_seconds + 1.0) + 15  # starting and stopping py-spy takes a part of it
    config = {"mode": "mixed", "threads": threads, "repeats": repeats, "seconds": seconds, "out": str(out)}
    process = start_loop(config)
    time.sleep(3)  # warm-up and the first second
    periods: list[dict[str, tuple[int, int]]] = []
    for index in range(plan.pairs):
        order = ORDERS[index % len(ORDERS)]
        periods.append({arm: block(arm, process.pid, pyspy, plan.block_seconds, out.parent) for arm in order})
        print(f"  round {index + 1} of {plan.pairs}", file=sys.stderr, flush=True)
    if process.wait() != 0:
        raise SystemExit(f"loop.py failed with status {process.returncode}")
    steps: Steps = json.loads(out.read_text())
    measured = [{arm: within(steps, *period) for arm, period in arms.items()} for arms in periods]
    rows = []
    for length in repeats:
        base_ms = statistics.median(mean_ms(arms["A"][length]) for arms in measured)
        rows.append(ratio_row("sampling", threads, length, base_ms, measured, SAMPLING_LIMIT))
    return rows


def block(arm: str, pid: int, pyspy: str, seconds: float, folder: Path) -> tuple[int, int]:
    """One on (B) or off period; its start and end on the monotonic clock. Starting and writing belong to it."""
    begin = time.monotonic_ns()
    if arm != "B":
        time.sleep(seconds)
        return begin, time.monotonic_ns()
    failures: list[Any] = []
    sampler = Sampler(
        pyspy,
        pid,
        folder,
        rate_hz=DEFAULT_RATE_HZ,
        segment_seconds=seconds,
        now_ns=Clock(0).now,
        write=lambda row: failures.append(row) if row["status"] != "ok" else None,
        give_up=failures.append,
        targets=lambda: (pid,),
        chain=lambda _: (),
    )
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sampler.poll()
        time.sleep(max(0.0, min(0.25, end - time.monotonic())))
    sampler.stop(10)
    if failures:
        raise SystemExit(f"sampling failed: {failures[0]}")
    return begin, time.monotonic_ns()


def within(steps: Steps, begin: int, end: int) -> Steps:
    """The steps that lie wholly in a period."""
    return {length: [row for row in rows if begin <= row[0] and row[1] <= end] for length, rows in steps.items()}


# ------------------------------------------------------------------------------------------------------- reporting


def figure(value: Estimate, unit: str) -> str:
    """Median and interval, as a change in percent or in microseconds."""

    def one(number: float | None) -> str:
        if number is None:
            return "?"
        return f"{(number - 1) * 100:+.2f}" if unit == "ratio" else f"{number:+.1f}"

    return f"{one(value.median)} [{one(value.low)}, {one(value.high)}]{' %' if unit == 'ratio' else ' µs'}"


def table(rows: list[Row], plan: Plan, command: str, about: dict[str, str]) -> str:
    """The result as Markdown."""
    lines = [
        f"Made with `{command}`: {plan.pairs} rounds of sampling, {plan.recording_rounds} of recording, "
        f"{plan.hook_rounds} of hooks, medians with 95 % sign intervals.",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
        "| part | threads | step | with against without | A against A | limit | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        limit = f"{row.limit * 100:.2f} %" if row.unit == "ratio" else f"{row.limit:.0f} µs"
        step = f"empty, {row.base_ms * 1e3:.0f} µs" if row.length == "noop" else f"{row.base_ms:.2f} ms"
        step += ", no loader" if row.length == "unfed" else ""
        effect, control = figure(row.effect, row.unit), figure(row.control, row.unit)
        lines.append(f"| {row.part} | {row.threads} | {step} | {effect} | {control} | {limit} | {row.verdict} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="measure what recording costs a training loop")
    parser.add_argument("--quick", action="store_true", help="a smoke test: the figures mean nothing, none is kept")
    parser.add_argument("--pairs", type=int, default=Plan.pairs, help="rounds of sampling")
    parser.add_argument("--recording-rounds", type=int, default=Plan.recording_rounds, help="rounds of recording")
    parser.add_argument("--hook-rounds", type=int, default=Plan.hook_rounds, help="rounds of hooks out and in")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", nargs="+", type=int, default=None, help="default: 1 and the number of cores")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file whose table is replaced")
    parser.add_argument("--json", type=Path, default=None, help="also write every figure here")
    return parser.parse_args()


def main() -> None:
    """Measure, print, keep."""
    args = arguments()
    plan = Plan(pairs=args.pairs, recording_rounds=args.recording_rounds, hook_rounds=args.hook_rounds)
    if args.quick:
        plan = replace(plan, pairs=2, recording_rounds=2, hook_rounds=8, block_seconds=2.0)
    about = machine("stepscope", "torch", "py-spy")
    if float(about["load before"]) > 0.5:
        print(f"the machine is busy (load {about['load before']}): expect 'undecided'", file=sys.stderr)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as name:
        folder = Path(name)
        for threads in args.threads or sorted({1, len(os.sched_getaffinity(0))}):
            repeats = run_loop({"mode": "calibrate", "threads": threads}, folder)
            for part in args.only:
                print(f"{part}, {threads} threads", file=sys.stderr, flush=True)
                measure = {
                    "recording": recording, "sampling": sampling, "hooks": hooks,
                    "metrics": partial(hooks, metrics=True),
                }[part]  # fmt: skip
                rows += measure(plan, threads, repeats, folder)
    command = " ".join(["python", "benchmarks/overhead.py", *sys.argv[1:]])
    text = table(rows, plan, command, about)
    print(text)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if not args.quick:
        put_between_markers(args.results, "overhead", text)
        print(f"written to {args.results}", file=sys.stderr)


if __name__ == "__main__":
    main()
