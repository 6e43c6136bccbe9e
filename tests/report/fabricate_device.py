"""Made-up facts of traces that something else recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepscope.model import (
    Abstention,
    Analysis,
    DeviceLine,
    DeviceLines,
    DeviceTime,
    Diagnosis,
    Place,
    ReadingFacts,
    TraceFacts,
)
from tests.records import replace
from tests.report.fabricate import analysis, kept, run_facts

MS = 1_000_000
READING = kept("reading", ReadingFacts)


def trace_facts(**changes: Any) -> TraceFacts:
    return replace(kept("trace", TraceFacts), **changes)


def device_time(scope: str, **changes: Any) -> DeviceTime:
    return replace(kept("device_time", DeviceTime), scope=scope, **changes)


def device_line(file: str, line: int, ns: int, **changes: Any) -> DeviceLine:
    line_facts = {"place": Place(file, line, "main"), "ns": ns, "share": ns / (500 * MS), "ms_per_step": ns / MS / 10}
    top = (("gemm_kernel", ns),)
    return replace(kept("device_line", DeviceLine), **{**line_facts, "via": {"sequence": ns}, "top": top, **changes})


def foreign(folder: Path, **changes: Any) -> Analysis:
    """What is known of a trace that something else recorded: no stacks, no journal, no command."""
    lines = kept("device_lines", DeviceLines, str(folder / "train.py"))
    run = run_facts(folder, command=(), hosts=(), exit_status=None, started_ns=None)
    facts = analysis(
        folder,
        run=run,
        stacks=None,
        loader=None,
        loops=None,
        io=None,
        windows=(),
        processes=(),
        traces=(trace_facts(),),
        reading=READING,
        device_time=(device_time("launched"), device_time("all", events=12_000, total_ns=690 * MS)),
        device_lines=lines,
    )
    return replace(facts, **changes)


NONE_FOUND = Diagnosis(findings=(), abstained=(Abstention("input.loader_bound", "the data wait of the steps"),))
