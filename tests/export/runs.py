"""A run folder with one window, whose steps only the journal numbers."""

from __future__ import annotations

import json
from pathlib import Path

from stepscope.model import STEP_COLUMNS
from tests.export.traces import BASE_NS, STEP_US, save, trace


def run_folder(folder: Path, *, late_ns: int = 0) -> Path:
    """Steps 20 to 23 of 100 us each, on a clock that is `late_ns` behind the trace's, which numbers no steps."""
    rank = folder / "rank-0"
    rank.mkdir(parents=True)
    content = trace()
    annotations = [event for event in content["traceEvents"] if event["name"].startswith("ProfilerStep")]
    for event in annotations:  # an optimizer's step ends where the step does
        event.update(name="Optimizer.step#SGD.step", ts=event["ts"] + STEP_US - 10, dur=10)
    save(rank / "trace-0.pt.trace.json.gz", content)
    rows = []
    for index in range(4):
        row = dict.fromkeys(STEP_COLUMNS)
        start_ns = BASE_NS + 1_000_000 + index * STEP_US * 1000 - late_ns
        row.update(
            step=20 + index, kind="train", start_ns=start_ns, wall_ns=STEP_US * 1000, in_window=True, signal="optimizer"
        )
        rows.append(list(row.values()))
    lines = [json.dumps({"columns": list(STEP_COLUMNS)}), *map(json.dumps, rows)]
    (rank / "steps.jsonl").write_text("\n".join(lines) + "\n")
    return folder
