"""Inputs that are no files to read, or far larger than they look: pipes, devices, holes, and bombs of gzip."""

from __future__ import annotations

import gzip
import os
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

HOLE_BYTES = 3 * 2**30
BOMB_BYTES = 3 * 2**30
_CHUNK = 2**24
_EVENT = b'{"ph":"X","cat":"cpu_op","name":"aten::add","pid":1,"tid":1,"ts":1,"dur":1},'
_FRAMES = b'{"$schema":"https://www.speedscope.app/file-format-schema.json","shared":{"frames":['

RUN_FILES = (
    *("host-a/manifest.json", "host-a/agents.jsonl", "host-a/processes.jsonl", "host-a/system.jsonl"),
    *("host-a/stacks.jsonl", "host-a/stacks-0.raw", "host-a/stacks-0.times.json", "host-a/last-word.json"),
    *("rank-0/rank.json", "rank-0/steps.jsonl", "rank-0/events.jsonl", "rank-0/trace-0.pt.trace.json.gz"),
    *("rank-0/trace-1.pt.trace.json", "rank-0/last-word.json", "job.json", "notebook/cells.json"),
    *("report.json", "experiment.json", "tables/tables.json", "tables/steps.parquet", "host-a/recorder.log"),
)
# (name, what it begins with, what then comes again and again)
BOMBS = (
    ("space.json.gz", b'{"traceEvents":[', b" "),
    ("events.json.gz", b'{"traceEvents":[', _EVENT),
    ("name.json.gz", b'{"traceEvents":[{"name":"', b"a"),
    ("nested.json.gz", b'{"traceEvents":[{"args":', b"["),
    ("metadata.json.gz", b'{"x":"', b"b"),
    ("stacks.txt.gz", b"", b'process 1:"p";thread (1): M;f (a.py:1) 5\n'),
    ("profile.speedscope.json.gz", _FRAMES, b'{"name":"a"},'),
    ("fr_rank_0.gz", b'{"version":"2.10","pg_config":{},"pg_status":{},"entries":[', b'{"profiling_name":"nccl:x"},'),
    ("fr_rank_1.gz", b"\x80\x02}(X\t\x00\x00\x00pg_configN", b"N"),
    ("snapshot.pickle.gz", b"\x80\x04", b"N"),
    ("timeline.raw.json.gz", b"[", b"[1,2,[3,4],5],"),
    ("report.txt.gz", b"Metric: CompileTime\n", b"  TotalSamples: 3\n"),
)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except OSError:  # only the superuser makes them
        _endless(path)


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HOLE_BYTES)


def _in_run(file: str, replace: Callable[[Path], None], folder: Path, run: Path) -> Path:
    made = folder / "run"
    shutil.copytree(run, made)
    path = made / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    replace(path)
    return made


def _alone(name: str, replace: Callable[[Path], None], folder: Path, _run: Path) -> Path:
    replace(folder / name)
    return folder / name


def _bomb(start: bytes, again: bytes, path: Path) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    first = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(again * (_CHUNK // len(again))) + packer.flush(zlib.Z_FULL_FLUSH)
    with path.open("wb") as file:
        file.write(first)
        for _ in range(BOMB_BYTES // _CHUNK):
            file.write(block)


def _members(path: Path) -> None:
    whole = gzip.compress(b'{"traceEvents":[') + gzip.compress(_EVENT) * 20_000 + gzip.compress(b"{}]}")
    path.write_bytes(whole)


CASES: tuple[Callable[[Path, Path], Path], ...] = (
    *(partial(_in_run, file, replace) for replace in (_pipe, _endless, _device, _hole) for file in RUN_FILES),
    *(
        partial(_alone, name, replace)
        for replace in (_pipe, _endless, _device, _hole)
        for name in ("t.pt.trace.json", "t.json.gz", "stacks.txt", "snapshot.pickle")
    ),
    *(partial(_alone, name, partial(_bomb, start, again)) for name, start, again in BOMBS),
    partial(_alone, "members.json.gz", _members),
)
