"""Ranks that wait for one of them, of few or of many, and what they exchange: found, kept quiet about, abstained."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope import api
from stepscope.analyze import analyze
from stepscope.dashboard import single
from stepscope.diagnose.communication import COLLECTIVES, gloo_on_gpu
from stepscope.errors import UnreadableInputError
from stepscope.model import Analysis, Finding, Place, Report
from stepscope.model.metrics import Accumulation, MetricFacts
from stepscope.model.run_facts import HotLine, LoopFacts, StackFacts
from stepscope.model.sampled import RankLine, RankLines, SampledViews
from stepscope.model.trace import SpanRef
from stepscope.model.views import (
    CollectiveOverWorkers,
    CollectiveRow,
    Distributed,
    OperatorRow,
    Overview,
    SpanViews,
    StepBreakdown,
    Summary,
    Views,
    WorkerShare,
)
from stepscope.report.document import report_bytes
from tests.analyze.scenes import TRAIN
from tests.analyze.test_ranks import rank_rows, sites
from tests.builders import MS, make_tables, rank_info
from tests.cli.calls import call, json_of
from tests.diagnose.judged import judged, needs, only, told
from tests.on_terminal import joined
from tests.records import blank, replace, some
from tests.reduced_runs import LINE, Made, reduced_run
from tests.run_folders import make_run_folder

Phases = Sequence[float]


def analysis_of(*ranks: list[dict[str, Any]], ddp: bool = True, **more: Any) -> Analysis:
    journal = [*(sites(len(ranks)) if ddp else []), *more.pop("journal", [])]
    return analyze(make_tables(steps=[row for rows in ranks for row in rows], journal=journal, **more))


def two(first: Phases, second: Phases, **more: Any) -> Analysis:
    return analysis_of(rank_rows(0, first), rank_rows(1, second), **more)


def of_category(given: Analysis) -> list[Finding]:
    return [finding for finding in judged(given).findings if finding.category == "communication"]


def alone(given: Analysis, rule: str) -> Finding:
    """The only finding on communication."""
    assert [finding.rule for finding in of_category(given)] == [rule]
    return only(given, rule)


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


def test_a_rank_with_a_slower_input() -> None:
    item = Place(TRAIN, 30, "__getitem__")
    analysis = two((1, 10, 40, 1, 1), (21, 10, 20, 1, 1), journal=loader_sites())
    finding = alone(with_lines(analysis, [line(item, "data_wait", {0: 0.0, 1: 20.0})]), "communication.straggler")
    assert finding.cost_ms_per_step == pytest.approx(20)
    assert finding.share == finding.gain_ceiling == pytest.approx(20 / 53)
    assert finding.ranks == (1,)
    assert "loads its batches 20.0 ms longer" in finding.title
    assert [place.line for place in finding.where] == [30, 75]
    assert finding.confidence == "high"
    assert finding.severity == "critical"


def test_ranks_on_a_device_are_judged_with_less_confidence() -> None:
    ranks = [rank_info(rank, device="cuda") for rank in (0, 1)]
    finding = alone(two((0, 30, 20, 1, 1), (0, 10, 40, 1, 1), ranks=ranks), "communication.straggler")
    assert finding.confidence == "medium"
    assert "host" in finding.caveat


def test_sampled_lines_tell_of_work_inside_the_exchange() -> None:
    """The work lies in the phase in which the other rank waits: the steps are alike on both."""
    work, wait = Place(TRAIN, 50, "hook"), Place(TRAIN, 60, "main")
    lines = [line(work, "backward", {0: 20.0, 1: 1.0}), line(wait, "backward", {0: 20.0, 1: 39.0}, waiting=True)]
    analysis = two((0, 10, 40, 1, 1), (0, 10, 40, 1, 1))
    finding = alone(with_lines(analysis, lines, straggler=0), "communication.straggler")
    assert finding.cost_ms_per_step == pytest.approx(19)
    assert finding.where[0].line == 50
    assert finding.confidence in ("low", "medium")
    assert of_category(with_lines(analysis, lines)) == []


@pytest.mark.parametrize(("others", "advice"), [(10.0, "All ranks do that work"), (0.0, "out of the step")])
def test_a_longer_time_at_work_of_all_ranks_is_no_work_of_one(others: float, advice: str) -> None:
    analysis = two((0, 30, 20, 1, 1), (0, 10, 40, 1, 1))
    lines = [line(Place(TRAIN, 50, "main"), "forward", {0: others + 20.0, 1: others})]
    assert advice in alone(with_lines(analysis, lines), "communication.straggler").fix


def test_a_gap_before_the_forward_pass_that_no_sample_tells_of_blames_nobody() -> None:
    phases = (21, 10, 20, 1, 1), (1, 10, 40, 1, 1)
    steps = [rank_rows(rank, each) for rank, each in enumerate(phases)]
    gap = analysis_of(*([row | {"before_forward_ns": row.pop("data_wait_ns")} for row in rows] for rows in steps))
    assert of_category(gap) == []
    assert of_category(with_lines(gap, [line(Place(TRAIN, 50, "augment"), "other", {0: 20.0, 1: 0.0})]))


@pytest.mark.parametrize("seed", range(2))
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
    assert of_category(analysis_of(first, second)) == []


def test_a_slow_quarter_and_ranks_that_do_not_wait_for_each_other_are_no_straggler() -> None:
    first, second = rank_rows(0, (1, 20, 60, 1, 1)), rank_rows(1, (1, 50, 30, 1, 1))
    for row in second[:11]:
        row["forward_ns"], row["backward_ns"] = 20 * MS, 60 * MS
    assert of_category(analysis_of(first, second)) == []
    assert of_category(two((0, 30, 20, 1, 1), (0, 10, 20, 1, 1))) == []


def test_ranks_without_phases_abstain_by_name() -> None:
    rows = [{"rank": rank, "process": f"rank-{rank}", "step": n} for rank in (0, 1) for n in range(40)]
    abstained = needs(analysis_of(rows))
    assert "phases" in abstained["communication.straggler"][0]
    assert not abstained["communication.straggler"][1]
    assert "collectives" in abstained["communication.many_small_collectives"][0]


def unequal(**more: Any) -> Analysis:
    first, second = rank_rows(0, (0, 10, 50, 1, 1), samples=8), rank_rows(1, (0, 30, 30, 1, 1), samples=24)
    return analysis_of(first, second, journal=loader_sites(), **more)


def test_unequal_batches_speak_instead_of_the_straggler() -> None:
    finding = alone(unequal(), "communication.unbalanced_work")
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
    finding = alone(replace(unequal(), views=views), "communication.unbalanced_work")
    assert finding.cost_ms_per_step == pytest.approx(10 + 10 * 10 / 32)
    assert finding.confidence == "high"


def ref(rank: int, run: str = "") -> SpanRef:
    return SpanRef(f"rank-{rank}", 1, rank, f"rank-{rank}", "trace-0.json", run)


def row(
    rank: int, size: int | None, calls: int, each_ns: int, *, name: str = "all_reduce", **more: Any
) -> CollectiveRow:
    times = {"total_ns": calls * each_ns, "mean_ns": float(each_ns), "min_ns": each_ns, "max_ns": each_ns}
    times |= {"overlapped_ns": 0, "exposed_ns": calls * each_ns}
    known = {"span": ref(rank), "name": name, "library": "gloo", "group_size": 2, "dtype": "float32", "calls": calls}
    sizes = {"message_bytes": size, "total_bytes": None if size is None else size * calls}
    return blank(CollectiveRow, **{**times, **known, **sizes, **more})


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
    operators: tuple[OperatorRow, ...] = (),
) -> Views:
    spans = dict.fromkeys(one.span for one in rows)
    seen = tuple(SpanViews(span, overview(span, step_ns, basis, parts or {}), (), (), ()) for span in spans)
    return Views(seen, operators, (), None, None, (), tuple(rows), distributed, {})


def healthy(**more: Any) -> Analysis:
    return two((0, 10, 80, 5, 5), (0, 10, 80, 5, 5), **more)


def many(rank: int) -> list[CollectiveRow]:
    return [row(rank, 400, 3 * 100, 300_000), row(rank, 40_000, 3 * 20, 500_000)]


def with_line(analysis: Analysis, *, known: bool = True) -> Analysis:
    """Collectives from a loop at line 31; without `known` the trace only tells the function, which begins at 28."""
    place = Place(TRAIN, 31, "average")
    told = {"place": place if known else replace(place, line=28), "place_exact": known}
    operator = blank(OperatorRow, name="c10d::allreduce_", calls=360, calls_per_step=120.0, **told)
    leaf = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:all_reduce"
    hot = HotLine(TRAIN, 31, "Trainer.average", "rank", "other", 100, 0.5, 50.0, None, leaf)
    stacks = StackFacts("py-spy", 20.0, 200, 0, 200, {}, (hot,))
    loop = LoopFacts("wrapper", 120.0, 55.0, 2.0, place, None, "trace")
    seen = replace(some(analysis.views), operators=(operator,))
    return replace(analysis, views=seen, stacks=stacks, loops=(loop,))


@pytest.mark.parametrize("known", [True, False])
def test_the_line_of_the_calls_is_named_and_its_sampled_time_counts_once(known: bool) -> None:
    analysis = with_line(replace(healthy(), views=views([*many(0), *many(1)])), known=known)
    (finding,) = of_category(analysis)
    assert (finding.where[0].file, finding.where[0].line) == (TRAIN, 31)
    assert finding.gain_ceiling == pytest.approx(0.55)  # the loop around it goes as well
    assert finding.cost_ms_per_step == pytest.approx(50 * (1 - 10.8 / 40))
    assert finding.confidence == "high"
    assert told(analysis, "host.per_item_loop") is None
    assert told(with_line(replace(healthy(), views=views([row(0, 400, 3, 300_000)]))), "host.per_item_loop")


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
    assert of_category(replace(healthy(), views=views(rows))) == []


def test_what_a_slow_rank_keeps_the_calls_waiting_is_not_their_own() -> None:
    slow = two((0, 30, 60, 5, 5), (0, 10, 80, 5, 5))
    found = {one.rule: one for one in of_category(replace(slow, views=views([*many(0), *many(1)])))}
    assert found["communication.straggler"].share == pytest.approx(0.2)
    assert found["communication.many_small_collectives"].gain_ceiling == pytest.approx(0.2)


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


def on_processors(share: float, **more: Any) -> Analysis:
    rows = [row(rank, 25 << 20, 3, 30 * MS) for rank in (0, 1)]
    return replace(healthy(), views=views(rows, parts={"host_communication": round(share * 100 * MS)}, **more))


def test_exposed_communication_of_ranks_on_processors() -> None:
    """Gloo runs beside the training thread: where nothing computes meanwhile it costs what it takes on any device."""
    place = Place(TRAIN, 14, "train")
    operator = blank(OperatorRow, name="c10d::_allgather_base_", calls=18, calls_per_step=6.0, place=place)
    finding = alone(on_processors(0.3, distributed=shares(5, 25), operators=(operator,)), "communication.exposed")
    assert finding.share == pytest.approx(0.3 * 50 / 60)  # without what is waiting for the other rank
    assert finding.gain_ceiling == pytest.approx(0.3)
    assert [place.line for place in finding.where] == [14]
    assert finding.fix.startswith("Overlap")
    assert "not in the cost" in finding.caveat
    assert of_category(on_processors(0.3, distributed=shares(25, 5))) == []  # they wait by turns


@pytest.mark.parametrize(("sent", "passes"), [(384, 8), (48, None)])
def test_gradients_that_every_pass_of_an_update_exchanges(sent: int, passes: int | None) -> None:
    """Under `no_sync` one of eight passes sends what all add up."""
    counts = {"torch::autograd::AccumulateGrad": 384, "torch.distributed.ddp.reducer::copy_bucket_to_grad": sent}
    operators = tuple(blank(OperatorRow, name=name, calls=calls) for name, calls in counts.items())
    several = blank(
        Accumulation, name="train/loss", passes=8, updates=50, share=0.98, divided=True, node="DivBackward0"
    )
    metrics = blank(MetricFacts, accumulation=(several,))
    analysis = replace(on_processors(0.3, distributed=shares(5, 25), operators=operators), metrics=metrics)
    finding = only(analysis, "communication.exposed")
    assert (f"in all {passes} backward passes" in finding.title, "no_sync()" in finding.fix) == (bool(passes),) * 2


def test_waiting_and_transfer_ask_for_different_fixes() -> None:
    given = (replace(healthy(), views=exposed_views(0.3, shares(*each))) for each in ((20, 10), (5, 25)))
    waiting, moving = (only(each, "communication.exposed") for each in given)
    assert waiting.fix.startswith("Most of it is waiting")
    assert moving.fix.startswith("Overlap")
    assert waiting.confidence == moving.confidence == "high"
    assert [[one.value for one in each.evidence if "last" in one.metric] for each in (waiting, moving)] == [[1], []]


@pytest.mark.parametrize(
    ("library", "basis", "share"), [("gloo", "device", 0.3), ("gloo", "host", 0), ("nccl", "device", 0)]
)
def test_gloo_beside_a_device(library: str, basis: str, share: float) -> None:
    rows = [row(rank, 25 << 20, 3, 30 * MS, library=library) for rank in (0, 1)]
    found = gloo_on_gpu.findings(replace(healthy(), views=views(rows, basis=basis)))
    assert sum(finding.share for finding in found) == pytest.approx(share)
    assert all("nccl" in finding.fix for finding in found)


def test_the_order_of_the_ranks_changes_nothing() -> None:
    first, second = rank_rows(0, (0, 10, 50, 1, 1), samples=8), rank_rows(1, (0, 30, 30, 1, 1), samples=24)
    found = [
        judged(replace(analysis_of(*ranks), views=views([*many(1 - swapped), *many(swapped)]))).findings
        for swapped, ranks in enumerate(([first, second], [second, first]))
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 2


# --- many ranks, judged by reduced tables

RULE = "communication.late_ranks"


def opened(run: Path, **more: Any) -> api.Run:
    return api.open_run(run, options=api.ReadOptions(cache=False, keep=False, **more))


def late(report: Report) -> list[dict[str, Any]]:
    return [row for row in report.findings if row["rule"] == RULE]


def with_raw(run: Path, ranks: range) -> Path:
    """The recordings of these ranks beside the run's reduced tables."""
    for rank in ranks:
        make_run_folder(run.parent, name=run.name, rank=rank, pid=1000 + rank, host=f"node{rank // 8 + 1}")
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """32 ranks on four hosts, of which rank 13 is late for its data."""
    return reduced_run(tmp_path / "run")


def test_a_late_rank_is_a_finding_with_cost_place_and_falsifier(run: Path) -> None:
    report = opened(run).report()
    (finding,) = late(report)
    assert finding["ranks"] == [13]
    assert 15 < finding["cost_ms_per_step"] < 21
    (place,) = finding["where"]
    assert {key: place[key] for key in LINE} == LINE
    assert "Rank 13 (host node2) waits for its data" in finding["title"]
    assert "data.py:12" in finding["title"]
    assert finding["confidence"] == "high"
    assert "other files" in finding["fix"]
    assert finding["falsified_by"]
    assert {row["source"] for row in finding["evidence"]} >= {"reduced tables of 32 ranks, 60 steps"}
    assert report.findings[0] is finding


def test_all_surfaces_say_the_same(tmp_path: Path) -> None:
    run = opened(reduced_run(tmp_path / "run", Made(ranks=48, late=(21,), missing=range(8, 16))))
    verdict, report = some(run.many_ranks), run.report()
    assert (verdict.ranks, verdict.missing) == (40, tuple(range(8, 16)))
    pages = single.documents(run, report)
    texts = [joined(report), single.plain(report, pages)]
    for key in ("findings", "ranks"):
        blocks = pages[f"runs/this/pages/{key}"]["blocks"]
        texts.append(" ".join(block["text"] for block in blocks if block["kind"] == "text"))
    for text in texts:
        assert f"40 of 48 ranks judged by the reduced tables of 5 hosts: {verdict.reason}" in text
        assert "8 ranks" in text
        assert "8-15" in text
    written = json.loads(report_bytes(report))
    assert written["views"]["many_ranks"]["reason"] == verdict.reason
    assert written["views"]["many_ranks"]["missing"] == [*range(8, 16)]
    assert written["views"]["ranks_read"]["absent_ranks"] == "8-15"
    assert [row["confidence"] for row in late(report)] == ["medium"]


def test_a_healthy_run_has_no_finding_and_a_short_one_abstains_by_name(tmp_path: Path) -> None:
    healthy = opened(reduced_run(tmp_path / "healthy", Made(late=()))).report()
    assert late(healthy) == []
    assert RULE not in {row["rule"] for row in healthy.abstained}
    assert "no rank, host or group keeps the others waiting" in joined(healthy)
    short = opened(reduced_run(tmp_path / "short", Made(steps=5))).report()
    (lacks,) = [row["needs"] for row in short.abstained if row["rule"] == RULE]
    assert lacks.startswith("enough in the reduced tables")
    assert "5 steps count, at least 20 are needed" in joined(short)


def test_a_persistent_rank_is_named_below_the_usual_floor(tmp_path: Path) -> None:
    (finding,) = late(opened(reduced_run(tmp_path / "run", Made(ranks=256, steps=300, excess_ms=3.0))).report())
    assert finding["ranks"] == [13]
    assert finding["share"] < 0.04


def test_of_many_ranks_only_suspects_and_their_peers_are_read(run: Path) -> None:
    found = opened(with_raw(run, range(32)))
    read = some(found.ranks_read)
    assert 13 in read.in_full
    assert len(read.in_full) <= 3
    assert not read.by_steps
    assert set(found.tables.steps["rank"]) == set(read.in_full)
    assert "ranks 0, 1, 13, read in full" in joined(found.report())
    assert set(opened(run, ranks=(30,)).tables.steps["rank"]) == {*read.in_full, 30}


def test_ranks_that_lie_elsewhere_are_shown_by_their_reduced_steps(run: Path) -> None:
    found = opened(with_raw(run, range(8)))
    read = some(found.ranks_read)
    assert (read.in_full, read.by_steps) == ((0, 1), (13,))
    assert {rank.rank: rank.host for rank in found.tables.ranks} == {0: "node1", 1: "node1", 13: "node2"}
    assert "of which only the reduced steps are here" in joined(found.report())


def test_ranks_that_were_not_reduced_are_no_missing_ones(run: Path) -> None:
    shutil.rmtree(with_raw(run, range(32)) / "reduced" / "host-node4")
    report = opened(run).report()
    read = report.views["ranks_read"]
    assert (read["absent"], read["not_reduced"], read["not_reduced_ranks"]) == (0, 8, "24-31")
    assert "8 recorded ranks were not judged, because their hosts were not reduced (24-31)" in joined(report)


def test_a_few_ranks_that_are_all_here_are_read_in_full(tmp_path: Path) -> None:
    found = opened(with_raw(reduced_run(tmp_path / "run", Made(ranks=8)), range(8)))
    assert found.many_ranks is None
    assert set(found.tables.steps["rank"]) == set(range(8))
    assert RULE not in {row["rule"] for row in found.report().abstained}


def test_what_was_copied_away_alone_is_read(run: Path, tmp_path: Path) -> None:
    whole = opened(with_raw(run, range(32)))
    assert opened(run / "reduced").folder == whole.folder, "beside its recordings the folder is a part of the run"
    shutil.copytree(run / "reduced", tmp_path / "elsewhere")
    assert opened(tmp_path / "elsewhere").many_ranks == whole.many_ranks
    shutil.copytree(run / "reduced" / "host-node2", tmp_path / "one" / "host-node2")
    alone = some(opened(tmp_path / "one" / "host-node2").many_ranks)
    assert (alone.ranks, alone.stragglers[0].ranks) == (8, (13,))
    inside = some(opened(run / "reduced" / "host-node2").many_ranks)
    assert inside.ranks == 8, "the one that was named, not those beside it"


def test_damaged_hosts_are_left_out_and_said(tmp_path: Path) -> None:
    run = reduced_run(tmp_path / "run", Made(left_out=("stacks-3.raw is too large",)))
    (run / "reduced" / "host-node1" / "steps.parquet").write_bytes(b"PAR1")
    (run / "reduced" / "host-node3" / "reduced.json").write_text('{"schema": "stepscope.reduced/999"}')
    report = opened(run).report()
    text = joined(report)
    assert "16 of 32 ranks judged by the reduced tables of 2 hosts" in text
    assert "host-node1: left out (steps.parquet is missing, or not as large" in text
    assert "host-node3: left out" in text
    assert "host node2: stacks-3.raw is too large" in text
    assert len(report.views["ranks_read"]["problems"]) == 4
    assert [row["ranks"] for row in late(report)] == [[13]]


def test_tables_of_others_that_fit_their_index_are_read_within_limits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that cannot be unpacked is found when its column is asked for; rows may take no byte of a file."""
    folder = reduced_run(tmp_path / "run", Made(ranks=8)) / "reduced"
    assert call("analyze", folder) == 0
    monkeypatch.setattr("stepscope.tables.reduced.MOST_STEPS", 100)
    assert call("analyze", folder) == 3
    assert "and at most 100 are read" in capfd.readouterr().err
    (host,) = folder.glob("host-*")
    table, index = host / "steps.parquet", host / "reduced.json"
    content = bytearray(table.read_bytes())
    content[4:200] = bytes(196)
    table.write_bytes(content)
    said = json.loads(index.read_text())
    said["tables"]["steps"]["sha256"] = hashlib.sha256(content).hexdigest()
    index.write_text(json.dumps(said))
    assert call("analyze", folder) == 3
    assert "a table that was given is damaged" in capfd.readouterr().err.splitlines()[-1]
    said["tables"]["steps"]["rows"] += 1
    index.write_text(json.dumps(said))
    assert call("analyze", folder) == 3
    assert "not as many as reduced.json says" in capfd.readouterr().err


def test_where_all_tables_are_damaged_recordings_are_read_or_it_is_refused(run: Path) -> None:
    for index in run.glob("reduced/host-*/reduced.json"):
        index.write_text('{"schema": "stepscope.reduced/1", "world_size": 1e400')
    with pytest.raises(UnreadableInputError, match="no host's reduced tables can be read"):
        opened(run).report()
    report = opened(with_raw(run, range(2))).report()
    assert report.run["ranks"] == [0, 1]
    assert "all ranks that lie here were read instead" in joined(report)


def test_a_number_of_ranks_that_no_machine_has_is_damage(run: Path) -> None:
    index = run / "reduced" / "host-node1" / "reduced.json"
    index.write_text(index.read_text().replace('"world_size":32', '"world_size":1000000000000'))
    assert "the number of ranks is damaged" in joined(opened(run).report())


def test_hotspots_of_a_rank_that_nobody_suspects_are_read_when_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = reduced_run(tmp_path / "run", Made(per_host=1))
    for rank in range(32):
        stack = f"MainThread;main (/home/user/project/train.py:{rank + 1}) 50"
        stacks = f'process {1000 + rank}:"python train.py";{stack}\n'
        make_run_folder(tmp_path, name="run", rank=rank, pid=1000 + rank, host=f"node{rank + 1}", stacks_raw=stacks)
    document = json_of(capfd, "hotspots", run, "--rank", "30")
    assert [row["library_function_line"] for row in document["rows"]] == [31]


def test_tables_and_comparisons_say_of_which_ranks_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runs = [reduced_run(tmp_path / name) for name in ("first", "second")]
    said = "of ranks 0, 1, 13, of which only the reduced steps are here"
    assert call("analyze", runs[0], "--table", "metrics", "--group", "curve") == 0
    assert f"this table is {said}" in " ".join(capfd.readouterr().out.split())
    assert f"first: figures are {said}" in json_of(capfd, "compare", *runs)["baseline"]["notes"]


def test_recordings_that_never_ended_are_one_note(run: Path) -> None:
    for path in run.glob("reduced/host-*/reduced.json"):
        index = json.loads(path.read_text())
        del index["run"]["ended_ns"]
        path.write_text(json.dumps(index))
    text = joined(opened(run).report())
    assert text.count("never ended") == 1
    assert "the recording on 4 hosts (node1, node2, node3 and 1 more) never ended" in text
