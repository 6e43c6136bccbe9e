"""Small run folders for tests: the files a recording leaves, made of plain values. Rows are those of `builders`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.model import RANK_SCHEMA, RUN_SCHEMA, STEP_COLUMNS, STEPS_SCHEMA
from tests.builders import MS, PID, T0, Row, full_steps, rank_info, run_facts, step_rows


def make_run_folder(
    tmp_path: Path,
    *,
    steps: Iterable[Row] | None = None,
    events: Iterable[Row] = (),
    stacks_raw: str | Sequence[str] | None = None,
    stacks_index: Sequence[Row] | None = None,
    system: Iterable[Row] = (),
    processes: Iterable[Row] | None = None,
    agents: Iterable[Row] | None = None,
    manifest: Mapping[str, Any] | None = None,
    rank: int = 0,
    pid: int = PID,
    rank_json: Mapping[str, Any] | None = None,
    traces: Mapping[str, bytes | Path] | None = None,
    host: str = "a",
    name: str = "run",
) -> Path:
    """Write a run folder of one host and one rank under `tmp_path / name` and return it.

    `steps` rows as in `make_tables` (10 usual ones when None; an empty list writes only the header). `stacks_raw` is
    py-spy raw text, one segment for each string, 5 s each from `T0`. `manifest` and `rank_json` override keys.
    `traces` maps file names in the rank's folder to their bytes, or to a file to copy. Call again with the same
    `name` and another `rank` or `host` to add to the run.
    """
    run = tmp_path / name
    host_dir = run / f"host-{host}"
    rank_dir = run / f"rank-{rank}"
    host_dir.mkdir(parents=True, exist_ok=True)
    rank_dir.mkdir(parents=True, exist_ok=True)
    if not (host_dir / "manifest.json").exists():
        (host_dir / "manifest.json").write_text(json.dumps({**_manifest(host), **(manifest or {})}))
    _append(host_dir / "agents.jsonl", _agents(rank, pid) if agents is None else agents)
    _append(host_dir / "processes.jsonl", _processes(pid) if processes is None else processes)
    _append(host_dir / "system.jsonl", system)
    _write_stacks(host_dir, stacks_raw, stacks_index)
    (rank_dir / "rank.json").write_text(json.dumps({**_rank(rank, pid, host), **(rank_json or {})}))
    step_table = full_steps(step_rows(10) if steps is None else steps)
    lines: list[Any] = [{"schema": STEPS_SCHEMA, "columns": STEP_COLUMNS}]
    lines += [[_plain(row[column]) for column in STEP_COLUMNS] for row in step_table]
    _append(rank_dir / "steps.jsonl", lines)
    _append(rank_dir / "events.jsonl", [{"time_ns": T0, "duration_ns": None, "step": None, **row} for row in events])
    for file, content in (traces or {}).items():
        (rank_dir / file).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    return run


def metrics_event(*curves: tuple[str, str, Sequence[int], Sequence[float]]) -> dict[str, Any]:
    """An event of the journal that holds these: name, source, times (ns) and values."""
    series = [
        {
            "name": name,
            "source": source,
            "start_ns": times[0],
            "after_ns": [time - times[0] for time in times],
            "values": [value if math.isfinite(value) else str(value) for value in values],
        }
        for name, source, times, values in curves
    ]
    return {"kind": "metrics", "series": series}


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _append(path: Path, rows: Iterable[Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _write_stacks(folder: Path, raw: str | Sequence[str] | None, index: Sequence[Row] | None) -> None:
    texts = [raw] if isinstance(raw, str) else list(raw or ())
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        file = f"stacks-{number}.raw"
        (folder / file).write_bytes(text.encode("utf-8", "surrogateescape"))
        start = T0 + number * 5000 * MS
        row = {"segment": number, "file": file, "source": "py-spy", "pid": PID, "start_ns": start}
        row |= {"end_ns": start + 5000 * MS, "rate_hz": 100, "idle": True, "blocking": False, "samples": None}
        rows.append({**row, "errors": 0, "status": "ok", "message": ""})
    if index is not None:
        rows = [{**(rows[i] if i < len(rows) else {}), **row} for i, row in enumerate(index)]
    if rows:
        _append(folder / "stacks.jsonl", rows)


def _manifest(host: str) -> dict[str, Any]:
    facts = run_facts()
    return {
        "schema": RUN_SCHEMA,
        "recorder_version": "0.1.0",
        "name": facts.name,
        "tags": [],
        "command": list(facts.command),
        "cwd": facts.cwd,
        "host": host,
        "script": {"kind": "script", "path": "/home/user/project/train.py"},
        "user_roots": list(facts.user_roots),
        "started_ns": facts.started_ns,
        "ended_ns": facts.ended_ns,
        "exit": {"status": 0, "signal": None, "shell_status": 0},
        "clock": {"epoch_offset_ns": 0},
        "options": {},
        "git": None,
        "environment": {},
        "scheduler": None,
        "python": "3.11.7",
        "hardware": facts.hardware,
        "noise": {},
        "sampler": {"source": "py-spy", "reason": "", "version": "0.4.3"},
    }


def _rank(rank: int, pid: int, host: str) -> dict[str, Any]:
    info = rank_info(rank)
    return {
        "schema": RANK_SCHEMA,
        "rank": rank,
        "local_rank": rank,
        "world_size": 1,
        "attempt": 0,
        "pid": pid,
        "host": host,
        "started_ns": info.started_ns,
        "argv": ["train.py"],
        "main_file": info.main_file,
        "cwd": "/home/user/project",
        "versions": info.versions,
        "device": "cpu",
        "clock": {"epoch_offset_ns": 0},
    }


def _agents(rank: int, pid: int) -> list[dict[str, Any]]:
    start = T0 - 900 * MS
    woke = {"time_ns": start, "pid": pid, "ppid": 1, "argv": ["train.py"], "executable": "/usr/bin/python3"}
    woke |= {"python": "3.11.7", "torch": "2.13.0", "rank": rank, "local_rank": rank, "world_size": 1, "role": "torch"}
    return [woke, {"time_ns": start + MS, "pid": pid, "folder": f"rank-{rank}"}]


def _processes(pid: int) -> list[dict[str, Any]]:
    start = T0 - 1000 * MS
    row = {
        "time_ns": start,
        "pid": pid,
        "ppid": 1,
        "start_ns": start,
        "comm": "python",
        "executable": "/usr/bin/python3",
    }
    return [{**row, "command": "python train.py", "python": True, "torch": True, "role": "root"}]
