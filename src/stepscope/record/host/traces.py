"""Profiler windows are exported as plain JSON inside the training process and compressed here, outside of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from stepscope.record.host.jsonlines import JsonLinesTail

_CHUNK = 1 << 20
_LEVEL = 1  # traces compress tenfold at the fastest level already


def own_rank_folders(run: Path, host_dir: Path) -> list[Path]:
    """The rank folders that processes of this host have claimed; other hosts look after theirs."""
    names = []
    tail = JsonLinesTail(host_dir / "agents.jsonl")
    while rows := tail.read():
        for row in rows:
            name = row.get("folder")
            if isinstance(name, str) and name == Path(name).name and name not in names:
                names.append(name)
    return [run / name for name in names if (run / name).is_dir()]


def compress_traces(folders: list[Path]) -> int:
    """Replace every `trace-*.json` by its `.json.gz`; returns how many. One that fails stays as it is."""
    done = 0
    for folder in folders:
        for path in sorted(folder.glob("trace-*.json")):
            done += _compress(path)
    return done


def _compress(path: Path) -> bool:
    from isal import igzip

    target = path.with_name(path.name + ".gz")
    part = path.with_name(path.name + ".gz.part")
    try:
        with path.open("rb") as source, igzip.open(part, "wb", compresslevel=_LEVEL) as sink:
            shutil.copyfileobj(source, sink, _CHUNK)
        os.replace(part, target)
        path.unlink()
    except OSError:
        part.unlink(missing_ok=True)
        return False
    return True
