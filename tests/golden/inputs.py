"""The inputs: made up ones, which are everywhere, and real traces, where they lie beside the project."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepscope.api import is_run_folder
from tests import gpu_traces
from tests.dashboard import served_runs
from tests.fuzz import cases
from tests.reduced_runs import Made, reduced_run

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
REAL = (
    *("kineto_tb_plugin/resnet50_num_workers_0", "kineto_tb_plugin/resnet50_num_workers_4"),
    *("hta/df_index_resolver", "hta/ns_resolution_trace", "hta/trace_filter", "hta/nccl_parser_config"),
    *("hta/mtia_inference_trace", "hta/rank_non_gpu", "hta/critical_path", "hta/cpu_only", "hta/amd_trace"),
    *("hta/call_stack", "hta/trace_diff", "hta/triton_example", "tracelens/b200", "tracelens/h100"),
    *("tracelens/torch_compile_triton", "tracelens/mi300", "tracelens/inference"),
    *("py_spy/plain.txt", "py_spy/gil.txt", "py_spy/spawn.txt", "py_spy/speedscope.json"),
    *("torch_xla/good.metricsfile.txt", "torch_xla/bad.metricsfile.txt", "torch_xla/fallback.debug.log"),
)
PAIRS = (
    ("small", "other"),
    ("traces/gpu.json", "traces/cpu.json"),
    ("kineto_tb_plugin.resnet50_num_workers_0", "kineto_tb_plugin.resnet50_num_workers_4"),
)


@dataclass(frozen=True)
class Input:
    """What is shown of `path`, or of what changed between it and `against`. `whole`: parts are kept as they are."""

    name: str
    path: Path
    whole: bool
    against: Path | None = None


def made_up(folder: Path) -> list[Input]:
    """Written below `folder`: recordings, reduced tables, traces, stacks, a snapshot, reports of torch_xla."""
    made = [make(folder) for make in (served_runs.small, served_runs.fuzzed, served_runs.empty, _other)]
    made.append(reduced_run(folder / "reduced_run", Made(ranks=24, steps=60, windows=20, missing=range(16, 20))))
    traces = folder / "traces"
    traces.mkdir()
    files: dict[str, Callable[[Path], object]] = {
        "gpu.json": lambda path: gpu_traces.write(path, steps=6),
        "cpu.json": served_runs.cpu_trace,
        "stacks.raw": lambda path: path.write_text(cases.raw()),
        "profile.speedscope.json": lambda path: path.write_text(json.dumps(cases.speedscope())),
        "snapshot.pickle": lambda path: path.write_bytes(pickle.dumps(cases.snapshot())),
        "metrics.txt": lambda path: path.write_text(cases.metrics()),
    }
    for name, write in files.items():
        write(traces / name)
    paths = [*made, *(traces / name for name in files)]
    return [*(Input(path.name, path, whole=True) for path in paths), *_pairs(folder, whole=True)]


def real(folder: Path) -> list[Input]:
    """Those of `REAL` that lie beside the project, copied below `folder`: they are called alike everywhere."""
    found, copies = [], folder / "real"
    copies.mkdir()
    for place in REAL:
        source, target = SHARED / place, copies / place.replace("/", ".")
        if source.exists():
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
            found.append(Input(target.name, target, whole=False))
    return [*found, *_pairs(copies, whole=False)]


def recordings(folder: Path) -> list[Input]:
    """The run folders in a folder."""
    return [Input(path.name, path, whole=True) for path in sorted(folder.iterdir()) if is_run_folder(path)]


def _pairs(folder: Path, *, whole: bool) -> list[Input]:
    pairs = [(folder / a, folder / b) for a, b in PAIRS]
    there = [pair for pair in pairs if all(path.exists() for path in pair)]
    return [Input(f"{a.name}-{b.name}", a, whole, against=b) for a, b in there]


def _other(parent: Path) -> Path:
    """`small` without its window, every step of rank 1 a little shorter."""
    made = served_runs.small(parent / "others").rename(parent / "other")
    for trace in made.glob("rank-*/trace-*"):
        trace.unlink()
    journal = made / "rank-1" / "steps.jsonl"
    head, *rows = journal.read_text().splitlines()
    wall = json.loads(head)["columns"].index("wall_ns")
    shorter = [[*row[:wall], row[wall] - 1_000_000, *row[wall + 1 :]] for row in map(json.loads, rows)]
    journal.write_text("\n".join([head, *map(json.dumps, shorter)]) + "\n")
    return made
