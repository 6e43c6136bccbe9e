"""Rules on collectives: many small ones, exposed ones, gloo beside a device; the order of ranks changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stepscope.diagnose import RULES, diagnose
from stepscope.diagnose.communication import COLLECTIVES
from stepscope.model import Analysis, Finding, Place
from stepscope.model.run_facts import HotLine, LoopFacts, StackFacts
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
from tests.analyze.scenes import TRAIN
from tests.analyze.test_ranks import rank_rows
from tests.builders import MS
from tests.diagnose.rank_scenes import analysis_of, of_category, only, two
from tests.records import blank, replace


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
    assert analysis.views is not None
    seen = replace(analysis.views, operators=(operator,))
    return replace(analysis, views=seen, stacks=stacks, loops=(loop,))


@pytest.mark.parametrize("known", [True, False])
def test_the_line_of_the_calls_is_named_and_its_sampled_time_counts(known: bool) -> None:
    analysis = with_line(replace(healthy(), views=views([*many(0), *many(1)])), known=known)
    diagnosis = diagnose(analysis)
    (finding,) = of_category(diagnosis)
    assert (finding.where[0].file, finding.where[0].line) == (TRAIN, 31)
    assert finding.gain_ceiling == pytest.approx(0.55)  # the loop around it goes as well
    assert finding.cost_ms_per_step == pytest.approx(50 * (1 - 10.8 / 40))
    assert finding.confidence == "high"


def test_the_loop_around_collectives_is_told_once() -> None:
    analysis = with_line(replace(healthy(), views=views([*many(0), *many(1)])))
    assert "host.per_item_loop" not in {finding.rule for finding in diagnose(analysis).findings}
    without = with_line(replace(healthy(), views=views([row(0, 400, 3, 300_000)])))
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


def judged(analysis: Analysis, rule: str) -> list[Finding]:
    return next(one for one in RULES if one.name == rule).findings(analysis)


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
    finding = only(on_processors(0.3, distributed=shares(5, 25), operators=(operator,)), "communication.exposed")
    assert finding.share == pytest.approx(0.3 * 50 / 60)  # without what is waiting for the other rank
    assert finding.gain_ceiling == pytest.approx(0.3)
    assert [place.line for place in finding.where] == [14]
    assert finding.fix.startswith("Overlap")
    assert "not in the cost" in finding.caveat
    assert of_category(diagnose(on_processors(0.3, distributed=shares(25, 5)))) == []  # they wait by turns


def test_waiting_and_transfer_ask_for_different_fixes() -> None:
    (waiting,) = judged(replace(healthy(), views=exposed_views(0.3, shares(20, 10))), "communication.exposed")
    (moving,) = judged(replace(healthy(), views=exposed_views(0.3, shares(5, 25))), "communication.exposed")
    assert waiting.fix.startswith("Most of it is waiting")
    assert moving.fix.startswith("Overlap")
    assert waiting.confidence == moving.confidence == "high"
    assert any(one.value == 1 and "last" in one.metric for one in waiting.evidence)
    assert not any("last" in one.metric for one in moving.evidence)


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
