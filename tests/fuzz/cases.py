"""Case number N: a small good input, damaged as a generator of random numbers seeded with N decides."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import gpu_traces, hang_dumps
from tests.dashboard import served_runs
from tests.fuzz import damage, special
from tests.read import xla_texts as texts
from tests.read.memory_files import Allocator


class Seeds:
    """The good inputs, written once into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.exists():
            folder.mkdir(parents=True)
            self._write()
        self.files = sorted(path for path in folder.iterdir() if path.is_file())
        self.run = folder / "small"

    def _write(self) -> None:
        gpu_traces.write(self.folder / "gpu.json", steps=3)
        served_runs.cpu_trace(self.folder / "cpu.json")
        for name, text in {"stacks.raw": raw(), "stacks.txt": collapsed(), "metrics.txt": metrics()}.items():
            (self.folder / name).write_text(text)
        (self.folder / "profile.speedscope.json").write_text(json.dumps(speedscope()))
        (self.folder / "snapshot.pickle").write_bytes(pickle.dumps(snapshot()))
        (self.folder / "fr_rank_0.json").write_text(json.dumps(flight_recorder()))
        counts = hang_dumps.communicator({0: 9, 1: 8}, {2: {"unresponsive": True, "considered_dead": False}})
        (self.folder / "ras.json").write_text(json.dumps(hang_dumps.ras(counts)))
        served_runs.small(self.folder)


def make(number: int, folder: Path, seeds: Seeds) -> Path:
    """Write the input of case `number` below `folder` and return its path; negative numbers are those of `special`."""
    if number < 0:
        return special.CASES[-1 - number](folder, seeds.run)
    rng = random.Random(number)
    if rng.random() < 0.4:
        return _run(folder, seeds, rng)
    source = rng.choice(seeds.files)
    data, name = source.read_bytes(), source.name
    if source.suffix == ".pickle":
        data = _pickled(rng) if rng.random() < 0.6 else damage.of_bytes(data, rng)
    else:
        data = _damaged(name, data, rng)
        if source.suffix == ".json" and rng.random() < 0.2:
            data, name = damage.packed(data, rng), name + ".gz"
    path = folder / name
    path.write_bytes(data)
    return path


def _run(folder: Path, seeds: Seeds, rng: random.Random) -> Path:
    path = folder / "run"
    shutil.copytree(seeds.run, path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in rng.sample(files, rng.choice((1, 1, 1, 2, 3, 6))):
        if rng.random() < 0.15:
            rng.choice(_REPLACEMENTS)(file)
        elif file.suffix == ".gz":
            content = _damaged("trace.json", gzip.decompress(file.read_bytes()), rng)
            file.write_bytes(damage.packed(content, rng))
        else:
            file.write_bytes(_damaged(file.name, file.read_bytes(), rng))
    return path


def _damaged(name: str, data: bytes, rng: random.Random) -> bytes:
    way = rng.random()
    if name.endswith(".jsonl"):
        return damage.of_json_lines(data, rng) if way < 0.7 else damage.of_lines(data, rng)
    if name.endswith(".json") and way < 0.7:
        return damage.dumped(damage.of_value(json.loads(data), rng), rng)
    return damage.of_lines(data, rng) if way < 0.85 else damage.of_bytes(data, rng)


def _pickled(rng: random.Random) -> bytes:
    value = rng.choice((snapshot, flight_recorder))()
    return pickle.dumps(damage.of_value(value, rng), protocol=rng.randrange(6))


def _folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link_instead(target: str) -> Callable[[Path], None]:
    def replace(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return replace


_REPLACEMENTS: tuple[Callable[[Path], None], ...] = (
    Path.unlink,
    _folder_instead,
    _link_instead("/etc/passwd"),
    _link_instead("/dev/zero"),
    _link_instead("loop"),
    lambda file: file.chmod(0),
    lambda file: file.write_bytes(b"") and None,
)


def raw() -> str:
    frames = "<module> (/p/train.py:70);main (/p/train.py:64);step (/v/torch/nn/modules/module.py:9)"
    line = 'process 100:"python train.py";thread ({}): {};{};{} (/p/data.py:{}) {}\n'
    return "".join(line.format(100 + i % 2, "Main", frames, f"f{i}", 20 + i, i + 1) for i in range(12))


def flight_recorder() -> dict[str, Any]:
    calls = [hang_dumps.call(line=20 + number) for number in range(6)]
    groups = {hang_dumps.WORLD: ("default_pg", range(2)), "pp": ("PP", (0, 1))}
    return hang_dumps.dump(
        [*calls, hang_dumps.call("pp", "send 0->1", 7, open=True), hang_dumps.call(open=True)], groups
    )


def collapsed() -> str:
    return "".join(f"<module> (/p/train.py:7);f{i} (/p/data.py:{i});g [gil] {i + 1}\n" for i in range(12))


def speedscope() -> dict[str, Any]:
    frames = [{"name": f"f{i}", "file": "/p/train.py", "line": i} for i in range(6)]
    sampled = {"type": "sampled", "name": "Main", "unit": "seconds", "startValue": 0, "endValue": 6}
    sampled |= {"samples": [[0, i] for i in range(6)], "weights": [1] * 6}
    events = [{"type": "O", "frame": 0, "at": 0}, {"type": "O", "frame": 1, "at": 1}]
    events += [{"type": "C", "frame": 1, "at": 4}, {"type": "C", "frame": 0, "at": 5}]
    evented = {"type": "evented", "name": "t", "unit": "microseconds", "startValue": 0, "endValue": 5, "events": events}
    schema = "https://www.speedscope.app/file-format-schema.json"
    return {"$schema": schema, "shared": {"frames": frames}, "profiles": [sampled, evented], "exporter": "py-spy"}


def metrics() -> str:
    sections = [texts.section(step, texts.report(step, step, step, {"aten::nonzero": step})) for step in range(1, 5)]
    return "".join(sections) + texts.analysis("Compilation", texts.SYNC) + texts.post_analysis()


def snapshot() -> dict[str, Any]:
    allocator = Allocator()
    kept = [allocator.allocate(1000 * i, 10 + i) for i in range(1, 5)]
    allocator.record()
    for line in range(20):
        kept.append(allocator.allocate(4000 + line, 20 + line % 3))
        if line % 2:
            allocator.free(kept.pop(0))
    allocator.out_of_memory(2**30, 2**20, 40)
    return allocator.snapshot()
