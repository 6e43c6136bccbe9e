"""Clocks in the verdict over many ranks: from reduced tables, of recorded jobs and of simulated ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from stepscope import cli
from stepscope.analyze.ranks import judge
from stepscope.analyze.ranks.verdict import clocks
from stepscope.analyze.views import communication
from stepscope.model.ranks import HostClock
from stepscope.schema import REDUCED_SCHEMA
from stepscope.tables.operator_trace import read_operator_trace
from stepscope.tables.reduced import (
    SCHEMAS,
    Group,
    Index,
    Reduced,
    ReducedFrames,
    ReducedRank,
    TableFile,
    group_id,
    load,
)
from tests.analyze.planted_clocks import KINDS, Hosts
from tests.analyze.shared_traces import TRACES
from tests.analyze.views.test_communication import opened
from tests.records import some

PARAM = TRACES / "ranks" / "param_dlrm" / "dlrm_kineto"
OPERATORS = TRACES / "ranks" / "straggler_analysis"
US = 1e3


def reduced(made: Hosts, *, group: Group | None = None, **columns: Any) -> Reduced:
    """What was planted as reduced tables, all calls of `group` or of a group of all."""
    members = made.members()
    group = group or Group(group_id(made.rank.tolist()), tuple(made.rank.tolist()))
    frames, hosts = {}, []
    for number, name in enumerate(made.names):
        rows = members.at(members.host == number)
        frame = pl.DataFrame(
            {
                "rank": rows.rank, "step": rows.step, "group": group.id, "sequence": rows.call,
                "kind": [KINDS[kind] for kind in rows.kind], "start_ns": rows.start_ns, "end_ns": rows.end_ns,
                "bytes": rows.bytes, "basis": "device",
            }
        )  # fmt: skip
        frame = frame.with_columns(**columns).cast(SCHEMAS["collectives"])  # type: ignore[arg-type]
        frames[name] = {"collectives": frame.select(list(SCHEMAS["collectives"]))}
        ranks = made.rank[made.host == number].tolist()
        tables = {table: TableFile(frame.height if table == "collectives" else 0, 0, "") for table in SCHEMAS}
        hosts.append(
            Index(
                schema=REDUCED_SCHEMA, version="", host=name, world_size=len(made.rank), groups=(group,), tables=tables,
                ranks=tuple(ReducedRank(rank) for rank in ranks), source="",
            )
        )  # fmt: skip
    return ReducedFrames(folder=Path("."), hosts=tuple(hosts), problems=(), frames=frames)


def by_host(table: tuple[HostClock, ...], window: int | None = None) -> dict[str, HostClock]:
    return {clock.host: clock for clock in table if window in (None, clock.window)}


def test_each_host_has_a_row_for_each_window() -> None:
    made = Hosts(3, 4, seed=1)
    for window in range(2):
        made.window(window, at_s=200.0 * window)
    found, table = clocks(reduced(made))
    assert [(row.window, row.host) for row in table] == [
        (first, f"node{host}") for first in (0, 200) for host in range(3)
    ]
    reference, second, _ = table[:3]
    assert (reference.offset_us, reference.reason.partition(",")[0]) == (0, "the reference")
    assert second.offset_us == pytest.approx((made.offset[1] - made.offset[0]) / 1e3, abs=60 + 10 * 60)
    assert second.rate_ppm == pytest.approx(1e6 * (made.rate[1] - made.rate[0]), abs=0.5)
    assert second.calls == 40
    assert second.bound_us is not None
    # what it is ahead at a moment, as the verdict asks
    at = made.members().end_ns[:1]
    ahead, bound = found.ahead(1, at)
    true = at - 1_790_000_000_000_000_000 - made.offset[1]
    assert abs(ahead[0] - made.ahead(1, true)[0] + made.ahead(0, true)[0]) <= bound[0]


def test_a_host_that_recorded_nothing_in_a_window_is_named() -> None:
    made = Hosts(3, 4, seed=2).window(0)
    made.window(1, at_s=400.0, steps=5)
    for _ in range(20):  # a window without the last host
        made.call((800.5 + _) * 1e9, ranks=range(8))
        made.call((800.8 + _) * 1e9, "all_gather", ranks=range(8))
    rows = by_host(clocks(reduced(made))[1], 800)
    assert rows["node1"].offset_us is not None
    assert rows["node2"].offset_us is None
    assert rows["node2"].reason == "no collective with other hosts was recorded on it in this window"


def test_without_numbers_the_place_of_a_kind_in_its_step_tells_a_call() -> None:
    made = Hosts(3, 4, seed=4).window()
    told, untold = clocks(reduced(made))[1], clocks(reduced(made, sequence=pl.lit(None)))[1]
    assert [row.offset_us for row in untold] == pytest.approx([row.offset_us for row in told])


@pytest.mark.skipif(not PARAM.is_dir(), reason=f"the traces are not at {PARAM}")
def test_recorded_ranks_of_one_host_end_together_and_the_last_to_come_stays_shortest(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["reduce", str(PARAM), "--out", str(tmp_path), "--engine", "inline", "--quiet"])
    assert not ended.value.code
    run = load(tmp_path / "reduced")
    (row,) = clocks(run)[1]
    assert row.offset_us == 0
    assert 0 < some(row.bound_us) <= 10
    assert row.calls == 8
    # by hand: the n-th collective kernel of each file, its start and end in microseconds
    by_hand = []
    for path in PARAM.glob("worker*.json"):
        content = json.loads(path.read_text())
        kernels = [e for e in content["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"].lower()]
        kernels.sort(key=lambda event: event["ts"])
        by_hand.append((content["distributedInfo"]["rank"], [(e["ts"], e["ts"] + e["dur"]) for e in kernels]))
    calls = run.scan("collectives").collect().sort("rank", "start_ns")
    calls = calls.with_columns(place=pl.int_range(pl.len()).over("rank"))
    assert len(by_hand) == 8
    for place in range(8):
        times = {rank: of_rank[place] for rank, of_rank in by_hand}
        last = max(times, key=lambda rank: times[rank][0])
        assert max(end for _, end in times.values()) - min(end for _, end in times.values()) <= 7
        own = calls.filter(pl.col("place") == place).with_columns(stay=pl.col("end_ns") - pl.col("start_ns"))
        assert own.sort("stay")["rank"][0] == last
        assert own.sort("start_ns")["rank"][-1] == last
    # the traces themselves say the same to who looks at them without reducing
    view = some(communication.distributed(opened(PARAM)))
    (note,) = (note for note in view.notes if "ends of one collective lie" in note)
    assert "lie 2.5 us apart at the median, 7.0 us at most" in note


@pytest.mark.skipif(not OPERATORS.is_dir(), reason=f"the traces are not at {OPERATORS}")
def test_a_slowed_rank_of_a_recorded_job_is_not_taken_for_a_clock() -> None:
    """Rank 0 ends the clipping of gradients 9.8 ms late in many steps, its host mate does not."""
    run = read_operator_trace(OPERATORS / "trace-AR.parquet")
    found = clocks(run)[1]
    assert len(found) == 4 * 8
    for row in found:
        assert abs(some(row.offset_us)) < 1000
        assert some(row.bound_us) < 1000
    own = [row.reason for row in found if row.host == "ranks-0-7"]
    assert all("rank 0 ends all_reduce +9." in reason and "work, not its clock" in reason for reason in own)


@pytest.mark.skipif(not OPERATORS.is_dir(), reason=f"the traces are not at {OPERATORS}")
def test_halves_of_a_recorded_window_tell_the_same_clock() -> None:
    """Offsets from every other step of a window agree about as well as single ends do."""
    run = read_operator_trace(OPERATORS / "trace-AR.parquet")
    steps = run.scan("collectives").select(pl.col("step").unique()).collect()["step"].sort().to_list()
    halves = []
    for start in (0, 1):
        kept = steps[start::2]
        frames = {
            host: {name: frame.filter(pl.col("step").is_in(kept)) for name, frame in tables.items()}
            for host, tables in run.frames.items()
        }
        found = clocks(ReducedFrames(folder=run.folder, hosts=run.hosts, problems=(), frames=frames))
        halves.append({(piece.host, place): piece for place, piece in _placed(found[0].pieces)})
    apart = [
        abs(halves[0][key].offset_ns - halves[1][key].offset_ns)
        for key in halves[0].keys() & halves[1].keys()
        if halves[0][key].claimed and halves[1][key].claimed and halves[0][key].offset_ns
    ]
    assert len(apart) >= 12
    assert float(np.median(apart)) <= 40 * US


def _placed(pieces: Any) -> Any:
    """Pieces with the number of their window in the run."""
    windows = sorted({piece.window for piece in pieces})
    return [(min(windows.index(piece.window), 3), piece) for piece in pieces]


@pytest.mark.parametrize("layout", ["dp", "3d"])
def test_clocks_of_simulated_runs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from ranks_simulated import simulate
    from ranks_simulated.scenario import Clocks, Scenario

    folder = tmp_path / "run"
    folder.mkdir()
    wrong = Clocks(step_ms=5.0)
    shape: dict[str, Any] = {"tp": 4, "pp": 2} if layout == "3d" else {}
    simulate(Scenario(hosts=4, per_host=4, layout=layout, steps=300, windows=3, clocks=wrong, seed=6, **shape), folder)
    truth = {
        (row["host"], row["window"]): row for row in json.loads((tmp_path / "run.truth.json").read_text())["clocks"]
    }
    verdict = judge(load(folder / "reduced"))
    assert verdict.stragglers == ()
    assert len(verdict.clocks) == 12
    reference = {row.window: row.host for row in verdict.clocks if row.reason.startswith("the reference")}
    stepped = [key for key, row in truth.items() if row["set_us"]]
    for row in verdict.clocks:
        true = truth[row.host, row.window]["offset_us"] - truth[reference[row.window], row.window]["offset_us"]
        assert abs(some(row.offset_us) - true) <= min(some(row.bound_us), 100)
    assert any(row.reason for row in verdict.clocks if (row.host, row.window) == min(stepped, key=lambda key: key[1]))
