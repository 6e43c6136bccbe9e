"""What `stepscope reduce` takes: `python benchmarks/reduction.py BASE [BASE ...] [--packed-mb 50] [--steps 10000]`.

Each BASE is a real trace, repeated until it packs to the size asked for (generate_trace.py), and reduced alone; then a
host of eight ranks with a journal and telemetry and no trace. Processor time and peak memory are those of the whole
command, in a process of its own, so that other work on the machine does not matter to them. The result goes between
markers of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from generate_trace import generate
from results import RESULTS, machine, put_between_markers

from stepscope.schema import RANK_SCHEMA, RUN_SCHEMA, STEP_COLUMNS, STEPS_SCHEMA

LIMIT_SECONDS, LIMIT_MB = 10.0, 500.0
T0, MS = 1_750_000_000_000_000_000, 1_000_000
RANKS = 8
PHASES_MS = {"data_wait_ns": 1, "forward_ns": 300, "backward_ns": 500, "optimizer_ns": 20, "other_ns": 5}


@dataclass(frozen=True)
class Cost:
    cpu_seconds: float
    peak_mb: float
    made_bytes: int


def reduce(run: Path, out: Path) -> Cost:
    """Reduce in a process of its own."""
    line = [sys.executable, "-m", "stepscope", "reduce", str(run), "--out", str(out), "--engine", "inline", "--quiet"]
    process = subprocess.Popen(line)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(line)} ended with {process.returncode}")
    made = sum(path.stat().st_size for path in (out / "reduced").rglob("*") if path.is_file())
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, made)


def packed(base: Path, target: Path, packed_mb: float) -> float:
    """Repeat a trace until it packs to about so many MB; its size in MB as JSON."""
    generate(base, target, 50)
    size_mb = 50 * packed_mb * 1e6 / target.stat().st_size
    generate(base, target, size_mb)
    return size_mb


def make_host(run: Path, steps: int) -> None:
    """A host's recording: all phases of a step vary by 3 %, telemetry is read once a second."""
    chance = random.Random(1)
    host = run / "host-a"
    host.mkdir(parents=True)
    manifest = {"schema": RUN_SCHEMA, "name": "train", "host": "a", "started_ns": T0, "ended_ns": None}
    (host / "manifest.json").write_text(json.dumps(manifest))
    end = T0
    for rank in range(RANKS):
        folder, now = run / f"rank-{rank}", T0
        folder.mkdir()
        known = {"schema": RANK_SCHEMA, "rank": rank, "world_size": RANKS, "pid": 100 + rank, "host": "a"}
        (folder / "rank.json").write_text(json.dumps(known))
        with (folder / "steps.jsonl").open("w") as file:
            file.write(json.dumps({"schema": STEPS_SCHEMA, "columns": STEP_COLUMNS}) + "\n")
            for step in range(steps):
                phases = {name: int(ms * MS * chance.gauss(1, 0.03)) for name, ms in PHASES_MS.items()}
                row = {"step": step, "kind": "train", "epoch": 0, "start_ns": now, "wall_ns": sum(phases.values())}
                row |= {**phases, "device_ns": sum(phases.values()), "samples": 8, "fetches": 1, "signal": "optimizer"}
                now += row["wall_ns"]
                file.write(json.dumps([row.get(name) for name in STEP_COLUMNS]) + "\n")
        end = max(end, now)
    with (host / "system.jsonl").open("w") as file:
        for time in range(T0, end, 1000 * MS):
            metrics = [["busy_cores", "cores", 8.1, None, None], ["cpu_frequency_mhz", "MHz", 2600.1, None, None]]
            for rank in range(RANKS):
                gpu, pid = f"gpu:{rank}", 100 + rank
                metrics += [
                    ["gpu_sm_clock_mhz", "MHz", 1400 + chance.randrange(50), None, gpu],
                    ["gpu_power_w", "W", round(chance.gauss(600, 10), 1), None, gpu],
                    ["gpu_temperature_c", "C", 60, None, gpu],
                    ["gpu_process", "count", 1.0, pid, gpu],
                    ["rss_bytes", "bytes", 8 * 10**9 + chance.randrange(10**6), pid, None],
                    ["cpu_pct", "%", round(chance.gauss(100, 1), 2), pid, None],
                ]
            file.write(json.dumps({"time_ns": time, "metrics": metrics}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, nargs="+")
    parser.add_argument("--packed-mb", type=float, default=50)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for number, base in enumerate(args.base):
            trace = place / f"trace-{number}" / "rank0.json.gz"
            trace.parent.mkdir()
            size_mb = packed(base, trace, args.packed_mb)
            cost = reduce(trace.parent, place / f"out-{number}")
            what = f"{base.name}, {trace.stat().st_size / 1e6:.0f} MB packed, {size_mb:.0f} MB as JSON"
            rows.append((what, cost, f"{LIMIT_SECONDS:.0f} s, {LIMIT_MB:.0f} MB"))
        make_host(place / "run", args.steps)
        rows.append((f"{RANKS} ranks of {args.steps:,} steps, no trace", reduce(place / "run", place / "out"), ""))
    lines = [f"Made with `python benchmarks/reduction.py ... --packed-mb {args.packed_mb:g} --steps {args.steps}`.", ""]
    lines += [f"- {name}: {value}" for name, value in machine("stepscope", "polars", "numpy").items()]
    lines += ["", "| what | processor time | peak memory | made | limit |", "|---|---|---|---|---|"]
    lines += [
        f"| {what} | {cost.cpu_seconds:.1f} s | {cost.peak_mb:.0f} MB | {cost.made_bytes / 1e6:.2f} MB | {limit} |"
        for what, cost, limit in rows
    ]
    text = "\n".join(lines)
    print(text)
    put_between_markers(RESULTS, "reduction", text)


if __name__ == "__main__":
    main()
