"""Ranks that wait for one of them, small and exposed collectives: found, kept quiet about, and abstained from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import RULES, diagnose
from stepscope.diagnose.thresholds import COLLECTIVES, RANKS
from stepscope.model import Analysis, Diagnosis, Finding, Place
from stepscope.model.facts import HotLine, LoopFacts, OperatorFacts, StackFacts
from stepscope.model.views import SpanViews, Views
from stepscope.model.views.communication import CollectiveOverWorkers, CollectiveRow, Distributed, WorkerShare
from stepscope.model.views.overview import Overview, StepBreakdown, Summary
from stepscope.model.views.spans import SpanRef
from stepscope.model.views.waits import RankLine, RankLines, SampledViews
from tests.analyze.scenes import TRAIN
from tests.analyze.test_ranks import rank_rows, sites
from tests.builders import MS, make_tables, rank_info, step_rows

NAMES = [rule.name for rule in RULES if rule.category == "communication"]
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


# --------------------------------------------------------------------------------------------------- one slow rank


def test_a_rank_with_a_slower_input() -> None:
    item = Place(TRAIN, 30, "__getitem__")
    analysis = two((1, 10, 40, 1, 1), (21, 10, 20, 1, 1), journal=loader_sites())
    finding = only(with_lines(analysis, [line(item, "data_wait", {0: 0.0, 1: 20.0})]), "communication.straggler")
    assert finding.cost_ms_per_step == pytest.approx(20)
    assert finding.share == finding.gain_ceiling == pytest.approx(20 / 53)
    assert finding.ranks == (1,)
    assert "loads its batches 20.0 ms longer" in finding.title
    assert [place.line for place in finding.where] == [30, 75]
    assert finding.confidence == "high"
    assert finding.severity == "critical"


def test_without_a_loader_the_gap_before_the_step_is_work() -> None:
    place = Place(TRAIN, 44, "monitor")
    analysis = with_lines(two((1, 10, 40, 1, 1), (21, 10, 20, 1, 1)), [line(place, "other", {0: 0.0, 1: 20.0})])
    finding = only(analysis, "communication.straggler")
    assert "works 20.0 ms longer" in finding.title
    assert "train.py:44" in finding.fix


def test_a_rank_that_computes_more() -> None:
    finding = only(two((0, 30, 20, 1, 1), (0, 10, 40, 1, 1)), "communication.straggler")
    assert finding.ranks == (0,)
    assert "the forward pass" in finding.title
    assert finding.where == ()


def test_ranks_on_a_device_are_judged_with_less_confidence() -> None:
    ranks = [rank_info(rank, device="cuda") for rank in (0, 1)]
    finding = only(two((0, 30, 20, 1, 1), (0, 10, 40, 1, 1), ranks=ranks), "communication.straggler")
    assert finding.confidence == "medium"
    assert "host" in finding.caveat


def test_sampled_lines_tell_of_work_inside_the_exchange() -> None:
    """The work lies in the phase in which the other rank waits: the steps are alike on both."""
    work, wait = Place(TRAIN, 50, "hook"), Place(TRAIN, 60, "main")
    lines = [
        line(work, "backward", {0: 20.0, 1: 1.0}),
        line(wait, "backward", {0: 20.0, 1: 39.0}, waiting=True),
    ]
    analysis = two((0, 10, 40, 1, 1), (0, 10, 40, 1, 1))
    finding = only(with_lines(analysis, lines, straggler=0), "communication.straggler")
    assert finding.cost_ms_per_step == pytest.approx(19)
    assert finding.where[0].line == 50
    assert finding.confidence in ("low", "medium")
    assert of_category(diagnose(with_lines(analysis, lines))) == []


@pytest.mark.parametrize("seed", range(5))
def test_jitter_is_no_straggler(seed: int) -> None:
    """Two healthy ranks, each step a tenth longer or shorter on either: the sum of both waits is not small."""
    draw = np.random.default_rng(seed)
    first, second = rank_rows(0, (1, 20, 30, 1, 1), count=100), rank_rows(1, (1, 20, 30, 1, 1), count=100)
    for one, other in zip(first, second, strict=True):
        for row in (one, other):
            row["forward_ns"] = int(row["forward_ns"] * draw.normal(1, 0.25))
        arrival = max(one["forward_ns"], other["forward_ns"])
        for row in (one, other):
            row["backward_ns"] += arrival - row["forward_ns"]
            row["wall_ns"] = sum(
                row[f"{phase}_ns"] for phase in ("data_wait", "forward", "backward", "optimizer", "other")
            )
    assert of_category(diagnose(analysis_of(first, second))) == []


def test_a_slow_quarter_of_the_run_is_no_straggler() -> None:
    first, second = rank_rows(0, (1, 20, 60, 1, 1)), rank_rows(1, (1, 50, 30, 1, 1))
    for row in second[:11]:
        row["forward_ns"], row["backward_ns"] = 20 * MS, 60 * MS
    assert of_category(diagnose(analysis_of(first, second))) == []


def test_ranks_that_do_not_wait_for_each_other_have_no_straggler() -> None:
    assert of_category(diagnose(two((0, 30, 20, 1, 1), (0, 10, 20, 1, 1)))) == []


def test_a_small_excess_is_not_worth_a_word() -> None:
    step, below = 100.0, 0.9 * RANKS.floor * 100.0
    analysis = two((0, 20 + below, step - 22 - below, 1, 1), (0, 20, step - 22, 1, 1))
    assert of_category(diagnose(analysis)) == []


def test_one_rank_alone_is_not_asked() -> None:
    diagnosis = diagnose(analyze(make_tables(steps=step_rows(40))))
    quiet = {one.rule for one in diagnosis.abstained if one.quiet}
    assert set(NAMES) <= quiet


def test_ranks_without_phases_abstain_by_name() -> None:
    rows = [{"rank": rank, "process": f"rank-{rank}", "step": n} for rank in (0, 1) for n in range(40)]
    abstained = {one.rule: one for one in diagnose(analysis_of(rows)).abstained}
    assert "phases" in abstained["communication.straggler"].needs
    assert not abstained["communication.straggler"].quiet
    assert "collectives" in abstained["communication.many_small_collectives"].needs


# --------------------------------------------------------------------------------------------------- unequal batches


def unequal(**more: Any) -> Analysis:
    first, second = rank_rows(0, (0, 10, 50, 1, 1), samples=8), rank_rows(1, (0, 30, 30, 1, 1), samples=24)
    return analysis_of(first, second, journal=loader_sites(), **more)


def test_unequal_batches_speak_instead_of_the_straggler() -> None:
    finding = only(unequal(), "communication.unbalanced_work")
    # forward: 30 instead of the mean 20; of the 30 ms of backward as large a part, 10 of 32 ms
    assert finding.cost_ms_per_step == pytest.approx(10 + 30 * 10 / 32)
    assert finding.gain_ceiling == pytest.approx((32 + 30) * (1 - 16 / 24) / 62)
    assert "rank 0: 8, rank 1: 24" in finding.title
    assert finding.where[0].line == 75
    assert finding.confidence == "medium"  # nothing tells how long the transfer takes


def test_the_transfer_does_not_shrink_with_the_batch() -> None:
    ref = SpanRef("rank-1", 1, 1, "rank-1", "trace-0.json")
    share = WorkerShare(ref, 3, 62 * MS, 0, 0, 0, 62 * MS, 5 * MS, 20 * MS)
    views = Views((), (), (), None, None, (), (), Distributed((share,), (), (), 1, 0, ()), {})
    finding = only(replace(unequal(), views=views), "communication.unbalanced_work")
    assert finding.cost_ms_per_step == pytest.approx(10 + 10 * 10 / 32)
    assert finding.confidence == "high"


def test_equal_batches_are_not_blamed() -> None:
    finding = only(two((0, 10, 50, 1, 1), (0, 30, 30, 1, 1)), "communication.straggler")
    assert finding.ranks == (1,)


def test_the_remainder_of_a_data_set_is_no_imbalance() -> None:
    first, second = rank_rows(0, (0, 20, 40, 1, 1), samples=8), rank_rows(1, (0, 20, 40, 1, 1), samples=8)
    second[-1]["samples"] = 3
    assert of_category(diagnose(analysis_of(first, second))) == []


def test_unknown_samples_abstain_by_name() -> None:
    first, second = rank_rows(0, (0, 20, 40, 1, 1), samples=None), rank_rows(1, (0, 20, 40, 1, 1), samples=None)
    abstained = {one.rule: one.needs for one in diagnose(analysis_of(first, second)).abstained}
    assert "samples" in abstained["communication.unbalanced_work"]


# --------------------------------------------------------------------------------------------------- collectives


def ref(rank: int, run: str = "") -> SpanRef:
    return SpanRef(f"rank-{rank}", 1, rank, f"rank-{rank}", "trace-0.json", run)


def row(
    rank: int, size: int | None, calls: int, each_ns: int, *, name: str = "all_reduce", **more: Any
) -> CollectiveRow:
    values: dict[str, Any] = {
        "span": ref(rank),
        "name": name,
        "library": "gloo",
        "group": None,
        "group_size": 2,
        "dtype": "float32",
        "message_bytes": size,
        "calls": calls,
        "total_bytes": None if size is None else size * calls,
        "total_ns": calls * each_ns,
        "mean_ns": float(each_ns),
        "min_ns": each_ns,
        "max_ns": each_ns,
        "overlapped_ns": 0,
        "exposed_ns": calls * each_ns,
        "algorithm_bytes_per_s": None,
        "bus_bytes_per_s": None,
    }
    return CollectiveRow(**{**values, **more})


def overview(span: SpanRef, step_ns: int, basis: str, parts: dict[str, int], steps: int = 3) -> Overview:
    def summary(ns: int) -> Summary:
        return Summary(float(ns), float(ns), float(ns), ns / step_ns)

    one = StepBreakdown("1", 0, step_ns, {}, parts)
    named = {name: summary(ns) for name, ns in parts.items()}
    return Overview(span, (one,) * steps, summary(step_ns), {}, named, 0, True, basis)


def views(
    rows: Sequence[CollectiveRow],
    *,
    step_ns: int = 100 * MS,
    basis: str = "host",
    parts: dict[str, int] | None = None,
    distributed: Distributed | None = None,
) -> Views:
    spans = dict.fromkeys(one.span for one in rows)
    seen = tuple(SpanViews(span, overview(span, step_ns, basis, parts or {}), (), (), ()) for span in spans)
    return Views(seen, (), (), None, None, (), tuple(rows), distributed, {})


def healthy(**more: Any) -> Analysis:
    return two((0, 10, 80, 5, 5), (0, 10, 80, 5, 5), **more)


def many(rank: int) -> list[CollectiveRow]:
    return [row(rank, 400, 3 * 100, 300_000), row(rank, 40_000, 3 * 20, 500_000)]


def test_many_small_collectives() -> None:
    """40 ms in 120 calls; their 840 kB at the best rate seen (40 kB in 0.5 ms) take 10.5 ms in one."""
    analysis = replace(healthy(), views=views([*many(0), *many(1)]))
    finding = only(analysis, "communication.many_small_collectives")
    assert finding.title.startswith("120 small collectives per step, 6.8 KiB each")
    assert finding.share == pytest.approx(0.4 - 0.105 - 0.003)
    assert finding.gain_ceiling == pytest.approx(0.4)
    assert finding.ranks == (0, 1)


def with_line(analysis: Analysis) -> Analysis:
    place = Place(TRAIN, 31, "average")
    operator = OperatorFacts("c10d::allreduce_", 120.0, 30.0, 30.0, place)
    leaf = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:all_reduce"
    hot = HotLine(TRAIN, 31, "average", "rank", "other", 100, 0.5, 50.0, None, leaf)
    stacks = StackFacts("py-spy", 20.0, 200, 0, 200, {}, (hot,))
    loop = LoopFacts("wrapper", 120.0, 55.0, 2.0, place, None, "trace")
    return replace(analysis, operators=(operator,), stacks=stacks, loops=(loop,))


def test_the_line_of_the_calls_is_named_and_its_sampled_time_counts() -> None:
    analysis = with_line(replace(healthy(), views=views([*many(0), *many(1)])))
    diagnosis = diagnose(analysis)
    (finding,) = of_category(diagnosis)
    assert (finding.where[0].file, finding.where[0].line) == (TRAIN, 31)
    assert finding.gain_ceiling == pytest.approx(0.55)  # the loop around it goes as well
    assert finding.cost_ms_per_step == pytest.approx(50 * (1 - 10.8 / 40))
    assert finding.confidence == "high"


def test_the_loop_around_collectives_is_told_once() -> None:
    analysis = with_line(replace(healthy(), views=views([*many(0), *many(1)])))
    assert "host.per_item_loop" not in {finding.rule for finding in diagnose(analysis).findings}
    without = replace(analysis, views=views([row(0, 400, 3, 300_000)]))
    assert "host.per_item_loop" in {finding.rule for finding in diagnose(without).findings}


@pytest.mark.parametrize(
    "rows",
    [
        [row(0, 400, 3 * (COLLECTIVES.calls - 1), 3_000_000)],  # few calls, however long
        [row(0, 400, 3 * 100, 10_000)],  # many, of a hundredth of the step
        [row(0, 2 << 20, 3 * 100, 500_000)],  # as many large ones
        [row(0, None, 3 * 100, 500_000)],  # of unknown size
        [row(0, 400, 3 * 100, 500_000, exposed_ns=0)],  # hidden behind computation
    ],
)
def test_other_collectives_are_left_alone(rows: list[CollectiveRow]) -> None:
    assert of_category(diagnose(replace(healthy(), views=views(rows)))) == []


def test_what_a_slow_rank_keeps_the_calls_waiting_is_not_their_own() -> None:
    slow = two((0, 30, 60, 5, 5), (0, 10, 80, 5, 5))
    found = {one.rule: one for one in of_category(diagnose(replace(slow, views=views([*many(0), *many(1)]))))}
    assert found["communication.straggler"].share == pytest.approx(0.2)
    assert found["communication.many_small_collectives"].gain_ceiling == pytest.approx(0.2)


# ---------------------------------------------------------------------------------------------------- on a device


def judged(analysis: Analysis, rule: str) -> list[Finding]:
    return next(one for one in RULES if one.name == rule).judge(analysis)


def shares(waiting: int, transfer: int) -> Distributed:
    workers = tuple(
        WorkerShare(ref(rank), 3, 100 * MS, 60 * MS, 0, 30 * MS, 10 * MS, waiting * MS, transfer * MS)
        for rank in (0, 1)
    )
    collective = CollectiveOverWorkers("all_reduce", None, 6, 2, None, 10.0, 4.0, 6.0, 1)
    return Distributed(workers, (collective,), (), 6, 0, ())


def exposed_views(share: float, distributed: Distributed | None = None) -> Views:
    rows = [row(rank, 25 << 20, 3, 30 * MS, library="nccl") for rank in (0, 1)]
    parts = {"exposed_communication": round(share * 100 * MS)}
    return views(rows, basis="device", parts=parts, distributed=distributed)


def test_exposed_communication() -> None:
    (finding,) = judged(replace(healthy(), views=exposed_views(0.3)), "communication.exposed")
    assert finding.share == finding.gain_ceiling == pytest.approx(0.3)
    assert "(all_reduce)" in finding.title
    assert finding.confidence == "medium"
    assert "does not tell a transfer from waiting" in finding.caveat


def test_waiting_and_transfer_ask_for_different_fixes() -> None:
    (waiting,) = judged(replace(healthy(), views=exposed_views(0.3, shares(20, 10))), "communication.exposed")
    (moving,) = judged(replace(healthy(), views=exposed_views(0.3, shares(5, 25))), "communication.exposed")
    assert waiting.fix.startswith("Most of it is waiting")
    assert moving.fix.startswith("Overlap")
    assert waiting.confidence == moving.confidence == "high"
    assert any(one.value == 1 and "last" in one.metric for one in waiting.evidence)
    assert not any("last" in one.metric for one in moving.evidence)


def test_hidden_communication_is_free() -> None:
    assert judged(replace(healthy(), views=exposed_views(0.09)), "communication.exposed") == []


def test_two_runs_in_one_folder_are_told_apart() -> None:
    both = exposed_views(0.3)
    moved = [replace(one, span=replace(one.span, run=f"run{one.span.rank}")) for one in both.communication]
    found = judged(
        replace(healthy(), views=views(moved, basis="device", parts={"exposed_communication": 30 * MS})),
        "communication.exposed",
    )
    assert [one.title.rsplit(" ", 1)[1] for one in found] == ["run0", "run1"]
    assert len({one.id for one in found}) == 2


def test_gloo_beside_a_device() -> None:
    rows = [row(rank, 25 << 20, 3, 30 * MS) for rank in (0, 1)]
    (finding,) = judged(replace(healthy(), views=views(rows, basis="device")), "communication.gloo_on_gpu")
    assert finding.share == pytest.approx(0.3)
    assert "nccl" in finding.fix
    assert judged(replace(healthy(), views=views(rows)), "communication.gloo_on_gpu") == []
    nccl = [replace(one, library="nccl") for one in rows]
    assert judged(replace(healthy(), views=views(nccl, basis="device")), "communication.gloo_on_gpu") == []


def test_the_order_of_the_ranks_changes_nothing() -> None:
    first, second = rank_rows(0, (0, 10, 50, 1, 1), samples=8), rank_rows(1, (0, 30, 30, 1, 1), samples=24)
    found = [
        diagnose(replace(analysis_of(*ranks), views=views([*many(1 - swapped), *many(swapped)]))).findings
        for swapped, ranks in enumerate(([first, second], [second, first]))
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 2
