"""Case number N: a small good input, damaged as a generator of random numbers seeded with N decides.

First the ways to damage bytes, lines of text and JSON values.
"""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import gpu_traces, hang_dumps
from tests.dashboard import served_runs
from tests.fuzz import special
from tests.read import test_xla as texts
from tests.read.memory_files import Allocator

ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 0.1, -5.5, 1e15, 1e18, -1e18, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1),
    *(10**40, 10**400, "", "x", "\ud800", "\udfff a", "</script><script>alert(1)</script>", "../../../etc/passwd"),
    *("\x1b[2J\x1b]0;x\x07", "\x00", "a\nb", "a" * 5000, "=1+1", "[bold]x[/bold]", "\u202e\u2066", "é" * 50),
    *("NaN", "-5", "1e9", "12345678901234567890123", "cpu_op", "kernel", "gpu_memcpy", "python_function"),
    *("ProfilerStep#99999999999999999999", "ProfilerStep#-3", "ProfilerStep#1", "Memcpy DtoH (Device -> Pageable)"),
    *("M", "X", "i", "s", "f", "C", "train", "eval", "window", "site", "sources", [], {}, [[]], [1, 2], {"a": 1}),
)
NUMBERS = (
    *(b"-1", b"0", b"9" * 26, b"1e400", b"nan", b"inf", b"", b"1.5", b"-0", b"9223372036854775808", b"0x10"),
    *(b"\xd9\xa3", b"1" * 5000),
)
TAILS = (
    *(b";;;", b"\x00", b"\x1b[31m", b" (", b") 5", b";a (b:c)", b"\r", b"\xe2\x80\xa8"),
    b";" + b";".join([b"f (x.py:1)"] * 2000) + b" 3",
)
BITS = (
    *(b"\xff" * 8, b"\0" * 8, b"9" * 30, b"\xed\xa0\x80", b'"', b"{", b"]", b"\n", b"\xef\xbb\xbf", b"\xc0\x80"),
    *(b"\x1f\x8b", b"\xff\xfe", b" " * 100),
)
FEW_OR_MANY = (1, 1, 1, 2, 4, 20)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")


def of_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with some of its parts exchanged, doubled, removed or shuffled; it may be changed in place."""
    if rng.random() < 0.03:
        return rng.choice(ODD)
    for _ in range(rng.choice(FEW_OR_MANY)):
        _change(value, rng)
    if rng.random() < 0.25:
        _everywhere(value, rng)
    return value


def dumped(value: Any, rng: random.Random) -> bytes:
    """JSON text, now and then with something nested deeply."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.6)
    if rng.random() < 0.03:
        text = text.replace("}", ', "deep":' + "[" * rng.choice((100, 5000, 200_000)) + "}", 1)
    return text.encode("utf-8", "surrogatepass")


def of_json_lines(data: bytes, rng: random.Random) -> bytes:
    """Lines of JSON with some values damaged, or one column in all of them."""
    lines = data.split(b"\n")
    for _ in range(rng.choice(FEW_OR_MANY)):
        at = rng.randrange(len(lines))
        if lines[at].strip():
            lines[at] = dumped(of_value(_value(lines[at]), rng), rng)
    if rng.random() < 0.3:
        odd, key = rng.choice(ODD), None
        for at, line in enumerate(lines):
            value = _value(line)
            if isinstance(value, (dict, list)) and value:
                keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
                key = rng.choice(keys) if key is None else key
                if key in keys:
                    value[key] = odd
                    lines[at] = dumped(value, rng)
    return b"\n".join(lines)


def of_lines(data: bytes, rng: random.Random) -> bytes:
    """Text with lines removed, doubled, shuffled, and odd numbers in them."""
    lines = data.split(b"\n") if data.count(b"\n") > 2 else data.replace(b"}, {", b"},\n{").split(b"\n")
    for _ in range(rng.choice(FEW_OR_MANY)):
        at, way = rng.randrange(len(lines)), rng.randrange(7)
        if way == 0 and len(lines) > 1:
            del lines[at]
        elif way == 1:
            lines.insert(at, rng.choice(lines))
        elif way == 2:
            rng.shuffle(lines)
        elif way == 3:
            lines[at] = of_bytes(lines[at], rng)
        elif way == 4:
            lines[at] += rng.choice(TAILS)
        elif numbers := list(_NUMBER.finditer(lines[at])):
            found = rng.choice(numbers)
            lines[at] = lines[at][: found.start()] + rng.choice(NUMBERS) + lines[at][found.end() :]
    return b"\n".join(lines)


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, repeated, put in."""
    found = bytearray(data)
    for _ in range(rng.choice(FEW_OR_MANY)):
        if not found:
            break
        at, way = rng.randrange(len(found)), rng.randrange(7)
        if way == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif way == 1 and rng.random() < 0.3:
            del found[at:]
        elif way == 2:
            del found[at : at + rng.choice((1, 5, 100, 2000))]
        elif way == 3:
            found[at:at] = rng.randbytes(rng.choice((1, 4, 50)))
        elif way == 4:
            found[at:at] = found[at : at + rng.choice((1, 20, 1000))]
        elif way == 5:
            found[at : at + 8] = rng.choice(BITS)
        else:
            found[:0] = rng.choice(BITS)
    return bytes(found)


def packed(data: bytes, rng: random.Random) -> bytes:
    """As gzip: whole, cut, damaged, in two members, with a tail, twice, or not at all."""
    way = rng.randrange(7)
    half = rng.randrange(len(data) + 1)
    whole = gzip.compress(data)
    if way == 1:
        return whole[: rng.randrange(len(whole))]
    if way == 2:
        return of_bytes(whole, rng)
    ways = {3: gzip.compress(data[:half]) + gzip.compress(data[half:]), 4: whole + b"\0" * 512, 6: data}
    return gzip.compress(whole) if way == 5 else ways.get(way, whole)


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _change(value: Any, rng: random.Random) -> None:
    found = _place(value, rng)
    if found is None:
        return
    holder, key = found
    way = rng.random()
    if way < 0.55:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    elif way < 0.65:
        del holder[key]
    elif way < 0.75 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(rng.choice(holder)))
    elif way < 0.82 and isinstance(holder[key], (int, float)):
        holder[key] = -holder[key]
    elif way < 0.88 and isinstance(holder[key], float):
        holder[key] *= rng.choice((1e3, 1e9, 1e-9))
    elif way < 0.92:
        holder[key] = str(holder[key])
    elif isinstance(holder, dict):
        holder[rng.choice(list(holder))] = holder[key]
    else:
        rng.shuffle(holder)


def _place(value: Any, rng: random.Random) -> tuple[Any, Any] | None:
    """A random part of a value: what holds it, and where."""
    found = None
    for _ in range(12):
        if isinstance(value, dict) and value:
            key: Any = rng.choice(list(value))
        elif isinstance(value, list) and value:
            key = rng.randrange(len(value))
        else:
            break
        found = (value, key)
        value = value[key]
        if rng.random() < 0.12:
            break
    return found


def _everywhere(value: Any, rng: random.Random) -> None:
    """One key of all events, or of all their arguments, becomes the same odd value."""
    events = value.get("traceEvents", value.get("profiles")) if isinstance(value, dict) else value
    rows = [row for row in events if isinstance(row, dict)] if isinstance(events, list) else []
    if rows and rng.random() < 0.5:
        rows = [row["args"] for row in rows if isinstance(row.get("args"), dict)]
    keys = sorted({str(key) for row in rows for key in row})
    if keys:
        key, odd, share = rng.choice(keys), rng.choice(ODD), rng.choice((0.1, 0.5, 1))
        for row in rows:
            if key in row and rng.random() < share:
                row[key] = odd


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
        data = _pickled(rng) if rng.random() < 0.6 else of_bytes(data, rng)
    else:
        data = _damaged(name, data, rng)
        if source.suffix == ".json" and rng.random() < 0.2:
            data, name = packed(data, rng), name + ".gz"
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
            file.write_bytes(packed(content, rng))
        else:
            file.write_bytes(_damaged(file.name, file.read_bytes(), rng))
    return path


def _damaged(name: str, data: bytes, rng: random.Random) -> bytes:
    way = rng.random()
    if name.endswith(".jsonl"):
        return of_json_lines(data, rng) if way < 0.7 else of_lines(data, rng)
    if name.endswith(".json") and way < 0.7:
        return dumped(of_value(json.loads(data), rng), rng)
    return of_lines(data, rng) if way < 0.85 else of_bytes(data, rng)


def _pickled(rng: random.Random) -> bytes:
    value = rng.choice((snapshot, flight_recorder))()
    return pickle.dumps(of_value(value, rng), protocol=rng.randrange(6))


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
