"""How long a user waits for a trace: `python benchmarks/whole_process.py [--rounds 5] [--peers-python PATH]`.

Whole processes, imports included, nothing kept from before: `stepscope analyze` with an empty cache, the same with
`--json`, and HolisticTraceAnalysis that loads the trace and makes one temporal breakdown. They take turns, in another
order each round; medians are told. `--before DIR` adds the source of another version of ours. Keep the machine idle.
The result goes between markers of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import compileall
import gzip
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from generate_trace import generate
from peers_environment import peers_python
from results import RESULTS, machine, put_between_markers

HERE = Path(__file__).resolve().parent
TRACES = HERE.parent.parent / "shared" / "traces"
FILES = (
    "hta/df_index_resolver/df_index_resolver.json.gz",
    "tracelens/h100/facebook_timesformer-base-finetuned-k400__1016002.json.gz",
    "kineto_tb_plugin/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz",
    "tracelens/b200/eager_trace.json.gz",
    "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
)
LARGE_MB = 200  # of a trace made of the first
PEER = """
import logging, sys
logging.disable(logging.WARNING)
from hta.trace_analysis import TraceAnalysis
TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/", include_last_profiler_step=True).get_temporal_breakdown(visualize=False)
"""  # noqa: E501


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers-python", type=Path)
    parser.add_argument("--before", type=Path, help="the `src` folder of another version of ours")
    options = parser.parse_args()
    peer = peers_python(HERE / ".peers", options.peers_python)
    for source in filter(None, (HERE.parent / "src", options.before)):
        compileall.compile_dir(source, quiet=2)  # as pip leaves a package, also where Python keeps no bytecode
    rows = []
    with tempfile.TemporaryDirectory() as name:
        large = Path(name) / f"{LARGE_MB}-mb.json.gz"
        generate(TRACES / FILES[0], large, LARGE_MB)
        for trace in (*(TRACES / file for file in FILES), large):
            seconds = _measured(trace, options.rounds, peer, options.before)
            rows.append(_row(trace, seconds))
            print(rows[-1], flush=True)
    head = ["trace", "unpacked", *_NAMES.values(), "HTA / ours", "HTA / with --json"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *rows]
    facts = ", ".join(f"{key} {value}" for key, value in machine("stepscope").items())
    text = "\n".join([f"Medians of {options.rounds}, seconds. {facts}.", "", *lines])
    put_between_markers(RESULTS, "whole_process", text)


_NAMES = {"before": "before", "ours": "stepscope analyze", "json": "with --json", "hta": "HTA"}


def _measured(trace: Path, rounds: int, peer: Path | None, before: Path | None) -> dict[str, float | None]:
    """The median seconds of each; None of one that is not there or failed."""
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    ours = [sys.executable, "-m", "stepscope", "analyze"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands: dict[str, list[str]] = {"ours": [*ours, str(trace)]}
        commands["json"] = [*ours, "--force", "--json", str(folder / "report.json"), str(trace)]
        if before is not None:
            commands["before"] = commands["ours"]
        if peer is not None:
            commands["hta"] = [str(peer), "-c", PEER, str(trace)]
        for number in range(rounds):
            for what in sorted(commands, key=lambda what, number=number: hash((what, number)) % 97):
                cache = folder / f"{what}-{number}"
                source = str(before) if what == "before" else str(HERE.parent / "src")
                environ = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": source if what != "hta" else ""}
                began = time.perf_counter()
                ended = subprocess.run(commands[what], env=environ, capture_output=True, check=False)
                if ended.returncode == 0:
                    found[what].append(time.perf_counter() - began)
    return {what: statistics.median(taken) if taken else None for what, taken in found.items()}


def _row(trace: Path, seconds: dict[str, float | None]) -> str:
    with gzip.open(trace) as file:
        size = sum(len(block) for block in iter(lambda: file.read(2**20), b""))
    cells = [trace.name.removesuffix(".json.gz")[:40], f"{size / 1e6:,.0f} MB"]
    cells += ["–" if seconds[name] is None else f"{seconds[name]:.2f}" for name in _NAMES]
    for ours in ("ours", "json"):
        known, hta = seconds[ours], seconds["hta"]
        cells.append("–" if known is None or hta is None else f"{hta / known:.1f} ×")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
