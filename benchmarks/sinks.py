"""How long a million values take to other tools, and fewer to slow ones: `python benchmarks/sinks.py`.

A run folder of 20 series with 50,000 values each, every value at a moment of its own, which is the worst case: values
of one moment share a record. Each way is the whole command in a process of its own, reading included; the processor
time stands beside, as the machine may be busy. The result goes between the markers "sinks" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from results import RESULTS, machine, put_between_markers  # noqa: E402
from tests.builders import MS, T0, step_rows  # noqa: E402
from tests.run_folders import make_run_folder, metrics_event  # noqa: E402

SERIES, VALUES = 20, 50_000
LIMIT_S = {"tensorboard": 10.0, "csv": 10.0}
TOOLS = ("csv", "parquet", "tensorboard", "trackio", "wandb", "mlflow")
SLOW, FEWER = ("wandb", "mlflow"), 20  # take each value by itself; they get a twentieth
LONGEST_S = 900
OFFLINE = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}


def recorded(folder: Path, values: int) -> Path:
    """A run folder with `SERIES` series of so many values."""
    events = []
    for number in range(SERIES):
        times = [T0 + at * MS + number * 1_000 for at in range(values)]
        events.append(metrics_event((f"train/series_{number}", "log", times, [at / 7 for at in range(values)])))
    return make_run_folder(folder, steps=step_rows(1_000), events=events)


def measured(command: list[str], folder: Path) -> tuple[float, float] | str:
    """Seconds by the clock and of the processor; or why there are none."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environ = os.environ | OFFLINE | {"WANDB_DATA_DIR": str(folder / "wandb-data")}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return f"not over after {LONGEST_S} s"
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description="measure how long a million values take to other tools")
    parser.add_argument("--only", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the values; keeps no result")
    args = parser.parse_args()
    about = machine("stepscope", "tensorboardX", "wandb", "mlflow-skinny", "trackio")
    lines = [*(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| to | values | seconds | of the processor | limit |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as name:
        folder = Path(name)
        runs = {}
        for way in ("(reading alone)", *args.only):
            values = VALUES // (100 if args.quick else FEWER if way in SLOW else 1)
            if values not in runs:
                (folder / str(values)).mkdir()
                runs[values] = str(recorded(folder / str(values), values))
            export = ["export", runs[values], "--to", way]
            words = export if way in TOOLS else ["analyze", runs[values], "--table", "metrics"]
            found = measured([sys.executable, "-m", "stepscope", *words], folder)
            figures = f"{found} | " if isinstance(found, str) else f"{found[0]:.1f} | {found[1]:.1f}"
            limit = f"{LIMIT_S[way]:.0f} s" if way in LIMIT_S else ""
            lines.append(f"| {way} | {SERIES * values:,} | {figures} | {limit} |")
            print(lines[-1], flush=True)
    if not args.quick:
        put_between_markers(RESULTS, "sinks", "\n".join(lines))


if __name__ == "__main__":
    main()
