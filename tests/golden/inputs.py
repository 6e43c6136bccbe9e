"""The inputs: made up ones, which are everywhere, and real traces, where they lie beside the project."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

from tests import gpu_traces
from tests.dashboard import served_runs
from tests.fuzz import cases

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
REAL = (
    *("kineto_tb_plugin/resnet50_num_workers_0", "kineto_tb_plugin/resnet50_num_workers_4"),
    *("hta/df_index_resolver", "hta/ns_resolution_trace", "hta/trace_filter", "hta/nccl_parser_config"),
    *("hta/mtia_inference_trace", "hta/rank_non_gpu", "hta/critical_path", "hta/memory_analysis", "hta/cpu_only"),
    *("tracelens/b200/eager_trace.json.gz", "tracelens/torch_compile_triton", "tracelens/mi300"),
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    *("py_spy/plain.txt", "py_spy/gil.txt", "py_spy/speedscope.json"),
    *("torch_xla/good.metricsfile.txt", "torch_xla/bad.metricsfile.txt", "torch_xla/fallback.debug.log"),
)
NAMES = {name.replace("/", "."): name for name in REAL}


@dataclass(frozen=True)
class Input:
    """`root` is the folder that stands for all machines' in what is kept; `whole`: parts are kept as they are."""

    name: str
    paths: tuple[Path, ...]
    root: Path
    whole: bool


def made_up(folder: Path) -> list[Input]:
    """Written below `folder`: recordings, traces of both kinds, stacks, a snapshot, reports of torch_xla."""
    files = {
        "gpu.json": lambda path: gpu_traces.write(path, steps=6),
        "cpu.json": served_runs.cpu_trace,
        "stacks.raw": lambda path: path.write_text(cases.raw()),
        "profile.speedscope.json": lambda path: path.write_text(json.dumps(cases.speedscope())),
        "snapshot.pickle": lambda path: path.write_bytes(pickle.dumps(cases.snapshot())),
        "metrics.txt": lambda path: path.write_text(cases.metrics()),
    }
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    found = [
        Input(made.name, (made,), folder, whole=True) for made in (served_runs.small(runs), served_runs.empty(runs))
    ]
    for name, write in files.items():
        write(folder / name)
        found.append(Input(name, (folder / name,), folder, whole=True))
    return found


def real() -> list[Input]:
    """Those of `REAL` that are there."""
    found = [Input(name, (SHARED / place,), SHARED, whole=False) for name, place in NAMES.items()]
    return [given for given in found if given.paths[0].exists()]
