"""Runs of several ranks for tests of rules on communication, and what the rules say of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.model import Analysis, Diagnosis, Finding, Place
from stepscope.model.sampled import RankLine, RankLines, SampledViews
from tests.analyze.scenes import TRAIN
from tests.analyze.test_ranks import rank_rows, sites
from tests.builders import make_tables
from tests.records import replace

Phases = Sequence[float]


def analysis_of(*ranks: list[dict[str, Any]], ddp: bool = True, **more: Any) -> Analysis:
    journal = [*(sites(len(ranks)) if ddp else []), *more.pop("journal", [])]
    return analyze(make_tables(steps=[row for rows in ranks for row in rows], journal=journal, **more))


def two(first: Phases, second: Phases, **more: Any) -> Analysis:
    return analysis_of(rank_rows(0, first), rank_rows(1, second), **more)


def of_category(diagnosis: Diagnosis) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.category == "communication"]


def only(analysis: Analysis, rule: str) -> Finding:
    (finding,) = of_category(diagnose(analysis))
    assert finding.rule == rule
    return finding


def loader_sites(**more: Any) -> list[dict[str, Any]]:
    made = {"kind": "loader", "id": 1, "epoch": 0, "num_workers": 0, "batch_size": 8}
    return [made, {"kind": "site", "what": "DataLoader", "file": TRAIN, "line": 75, **more}]


def line(place: Place, phase: str, by_rank: dict[int, float], *, waiting: bool = False) -> RankLine:
    spread = max(by_rank.values()) - min(by_rank.values())
    most = max(by_rank, key=lambda rank: by_rank[rank])
    return RankLine(place, phase, by_rank, spread, most, waiting, None)


def with_lines(analysis: Analysis, lines: Sequence[RankLine], straggler: int | None = None) -> Analysis:
    work = next((one.place for one in lines if not one.waiting), None)
    wait = next((one.place for one in lines if one.waiting), None)
    found = RankLines(
        unit="ms per step",
        ranks=(0, 1),
        lines=tuple(lines),
        straggler=straggler,
        straggler_place=None if straggler is None else work,
        waiters=() if straggler is None else (1 - straggler,),
        waiter_place=None if straggler is None else wait,
        verdict="",
        source="sampled stacks",
    )
    return replace(analysis, sampled=SampledViews((), {}, (), None, found, {}))
