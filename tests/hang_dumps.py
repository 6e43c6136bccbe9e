"""Dumps of flight recorders for tests, made of plain values: what each rank called, in order."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

T0 = 1_790_000_000 * 10**9
SCRIPT = "/home/me/job/train.py"
_TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
WORLD = "0"

Group = tuple[str, Sequence[int] | None]  # description and ranks; None where dumps do not tell them
Call = dict[str, Any]


def call(group: str = WORLD, kind: str = "all_reduce", line: int = 10, **more: Any) -> Call:
    """A call that was over; `more` are fields of its entry, or `open=True` for one that was not."""
    return {"group": group, "kind": kind, "line": line, **more}


def entries(calls: Sequence[Call], groups: Mapping[str, Group]) -> list[dict[str, Any]]:
    """The entries of one rank; numbers are counted by group where a call does not give its own."""
    counted: dict[str, int] = {}
    found = []
    for number, given in enumerate(calls):
        more = {key: value for key, value in given.items() if key not in ("group", "kind", "line", "open")}
        group, kind, over = given["group"], given["kind"], not given.get("open")
        p2p = kind.startswith(("send", "recv"))
        counted[group] = counted.get(group, 0) + (not p2p)
        found.append(
            {
                "record_id": number,
                "pg_id": 0,
                "process_group": (group, groups[group][0]),
                "collective_seq_id": counted[group],
                "p2p_seq_id": 0,
                "op_id": number,
                "profiling_name": f"nccl:{kind}",
                "time_created_ns": T0 + number * 10**6,
                "input_sizes": [[8]],
                "input_dtypes": ["Float"],
                "output_sizes": [[8]],
                "output_dtypes": ["Float"],
                "state": "completed" if over else "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": over,
                "timeout_ms": 600_000,
                "is_p2p": p2p,
                "frames": [
                    {"name": kind, "filename": _TORCH, "line": 3245},
                    {"name": "step", "filename": SCRIPT, "line": given["line"]},
                    {"name": "<module>", "filename": SCRIPT, "line": 99},
                ],
                **more,
            }
        )
    return found


def dump(calls: Sequence[Call], groups: Mapping[str, Group], **more: Any) -> dict[str, Any]:
    """What one rank's flight recorder holds."""
    told = {
        name: {"name": name, "desc": description, "ranks": str(list(ranks))}
        for name, (description, ranks) in groups.items()
        if ranks is not None
    }
    return {"version": "2.10", "pg_config": told, "pg_status": {}, "entries": entries(calls, groups), **more}


def write(
    folder: Path, ranks: Mapping[int, Sequence[Call]], groups: Mapping[str, Group] | None = None, form: str = "json"
) -> Path:
    """The dumps of these ranks in `folder`; all of them are in the group of all where no other group is given."""
    groups = groups or {WORLD: ("default_pg", range(max(ranks) + 1))}
    folder.mkdir(parents=True, exist_ok=True)
    for rank, calls in ranks.items():
        own = {name: one for name, one in groups.items() if one[1] is None or rank in one[1]}
        value = dump(calls, own)
        data = json.dumps(value).encode() if form == "json" else pickle.dumps(value)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    return folder


def ras(*communicators: Mapping[str, Any], timestamp: str = "2026-11-26 12:00:00") -> dict[str, Any]:
    """A report of NCCL's RAS."""
    return {
        "nccl_version": "2.28.9",
        "timestamp": timestamp,
        "communicators_count": len(communicators),
        "communicators": list(communicators),
    }


def communicator(counts: Mapping[int, int], gone: Mapping[int, Mapping[str, bool]] | None = None) -> dict[str, Any]:
    """A communicator with the number of AllReduce that each rank has made, and the status of those who are gone."""
    gone = gone or {}

    def rank(number: int, **more: Any) -> dict[str, Any]:
        return {"rank": number, "host": "10.0.0.1", "pid": 100 + number, "cuda_dev": number, "nvml_dev": number, **more}

    return {
        "hash": "0x1",
        "secondary_hash": "0x2:0x3",
        "size": len(counts) + len(gone),
        "ranks_count": len(counts),
        "missing_ranks_count": len(gone),
        "ranks": [
            rank(number, status={"async_error": 0}, collective_counts={"AllReduce": made, "Broadcast": 0})
            for number, made in counts.items()
        ],
        "missing_ranks": [rank(number, status=dict(status)) for number, status in gone.items()],
    }
