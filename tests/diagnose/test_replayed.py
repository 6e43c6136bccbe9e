"""Ceilings: from replays where there are any, never below the cost, and honest about where they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope import api
from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.diagnose.gains import BY_SUBTRACTION, replayed
from stepscope.model import Analysis, Finding
from stepscope.model.device_losses import ALLOCATOR, COPY_IN, LOADER, POINTWISE, SYNC, Replay, WhatIf
from tests.analyze import shared_traces
from tests.analyze.device_scenes import V100, allocations, pointwise_run, products, reads_value, repeated
from tests.analyze.scenes import loader_tables
from tests.builders import rank_info
from tests.gpu_traces import write
from tests.records import replace

MS = 1e6
PAIR = "kineto_tb_plugin/resnet50_num_workers_"


def only(analysis: Analysis, rule: str) -> Finding:
    (finding,) = [one for one in diagnose(analysis).findings if one.rule == rule]
    return finding


def values(finding: Finding) -> dict[str, object]:
    return {evidence.metric: evidence.value for evidence in finding.evidence}


def made(what_if: WhatIf, *, step: float = 100 * MS, never_late: float = 80 * MS, run: str = "") -> Replay:
    return Replay(
        run=run,
        traces=("worker0/span1",),
        left_out=(),
        steps=3,
        recorded_mean_ns=step,
        recorded_median_ns=step,
        unchanged_mean_ns=step,
        unchanged_median_ns=step,
        never_late_mean_ns=never_late,
        never_late_median_ns=never_late,
        residual=0.0,
        unexplained_ns=0.0,
        what_ifs=(what_if,),
    )


@pytest.fixture
def analysis() -> Analysis:
    return analyze(repeated(6, 400, reads_value).tables(V100))


# ------------------------------------------------------------------------------------------------------ findings


def test_the_ceiling_is_what_the_replay_saves(analysis: Analysis) -> None:
    finding = only(analysis, "sync.host_waits")
    assert finding.share == pytest.approx(105 / 400)
    assert finding.gain_ceiling == pytest.approx(115 / 400)  # then the device is the limit, with 285
    assert values(finding)["replayed step without these waits"] == 0.285
    assert values(finding)["the same steps as recorded"] == 0.4
    assert BY_SUBTRACTION not in finding.caveat


def test_without_a_replay_the_ceiling_is_by_subtraction_and_says_so(analysis: Analysis) -> None:
    finding = only(replace(analysis, replays=()), "sync.host_waits")
    assert finding.gain_ceiling == finding.share == pytest.approx(105 / 400)
    assert BY_SUBTRACTION in finding.caveat
    assert not [metric for metric in values(finding) if "replayed" in metric]


def test_a_replay_of_another_run_says_nothing(analysis: Analysis) -> None:
    other = replace(analysis, replays=tuple(replace(one, run="other") for one in analysis.replays))
    assert only(other, "sync.host_waits").gain_ceiling == pytest.approx(105 / 400)


def test_no_ceiling_is_below_the_cost(analysis: Analysis) -> None:
    kept = made(WhatIf(SYNC, 100 * MS, 100 * MS, None, None))
    finding = only(replace(analysis, replays=(kept,)), "sync.host_waits")
    assert finding.gain_ceiling == finding.share


def test_tensor_cores_at_the_peak_rate_bound_mixed_precision() -> None:
    """A device that works for 950 of 1000: 800 become 100, and 150 become 75; the host, never late, hides nothing."""
    finding = only(analyze(repeated(6, 1000, products).tables(V100)), "compute.no_tensor_cores")
    assert finding.share == pytest.approx(0.4)
    assert finding.gain_ceiling == pytest.approx(0.775)
    found = values(finding)
    assert found["the same in 16 bits at the peak rate, the host never late"] == 0.175
    assert found["the same with all work, the host never late"] == 0.95


def test_work_behind_a_late_host_is_told_to_be() -> None:
    """Kernels that are launched right before they start: as recorded, shorter ones gain nothing."""
    finding = only(analyze(repeated(6, 1000, pointwise_run).tables(V100)), "compute.unfused_pointwise")
    assert "The recorded host was late as well: with it 0% of the step would be saved" in finding.caveat
    assert finding.gain_ceiling >= finding.share == pytest.approx(0.4)


def test_calls_of_the_allocator_are_host_time_and_need_no_such_word() -> None:
    finding = only(analyze(repeated(6, 1000, allocations).tables(V100)), "memory.allocator_in_steps")
    assert "The recorded host" not in finding.caveat
    assert finding.gain_ceiling == pytest.approx(0.2)


# ------------------------------------------------------------------------------------------------------- figures


def test_of_two_replays_of_work_the_larger_saving_counts(analysis: Analysis) -> None:
    late = made(WhatIf(POINTWISE, 98 * MS, 98 * MS, 50 * MS, 50 * MS))
    gain = replayed(replace(analysis, replays=(late,)), "", POINTWISE)
    assert gain is not None
    assert gain.share == pytest.approx(0.3)
    assert gain.as_recorded == pytest.approx(0.02)
    early = made(WhatIf(COPY_IN, 60 * MS, 60 * MS, 70 * MS, 70 * MS))
    gain = replayed(replace(analysis, replays=(early,)), "", COPY_IN)
    assert gain is not None
    assert gain.share == gain.as_recorded == pytest.approx(0.4)
    assert len(gain.evidence) == 2


def test_a_loss_of_few_steps_counts_by_the_median(analysis: Analysis) -> None:
    one = made(WhatIf(ALLOCATOR, 70 * MS, 100 * MS, None, None))
    found = replace(analysis, replays=(one,))
    mean, median = (replayed(found, "", ALLOCATOR, use_median=each) for each in (False, True))
    assert mean is not None
    assert median is not None
    assert mean.share == pytest.approx(0.3)
    assert median.share == 0


def test_idle_time_that_no_trace_explains_is_told(analysis: Analysis) -> None:
    sound = only(analysis, "sync.host_waits").caveat
    odd = replace(analysis, replays=tuple(replace(one, unexplained_ns=0.2 * 400_000) for one in analysis.replays))
    assert "For 20% of the step the device idles" in only(odd, "sync.host_waits").caveat
    assert "the device idles with work launched" not in sound


def test_a_longer_replay_saves_nothing(analysis: Analysis) -> None:
    """Steps between which work moved: the first and the last one, which do not count, became shorter."""
    gain = replayed(replace(analysis, replays=(made(WhatIf(LOADER, 101 * MS, 101 * MS, None, None)),)), "", LOADER)
    assert gain is not None
    assert gain.share == 0


def test_the_loader_of_a_recorded_run_has_the_ceiling_of_its_windows(tmp_path: Path) -> None:
    path = write(tmp_path / "worker0.pt.trace.json", steps=4)
    traced = api.open_run(path, options=api.ReadOptions(cache=False)).analysis
    recorded = analyze(loader_tables(ranks=[rank_info(device="cuda")]))
    finding = only(replace(recorded, views=traced.views, replays=traced.replays), "input.loader_bound")
    gain = replayed(traced, "", LOADER)
    assert gain is not None
    assert finding.gain_ceiling == max(finding.share, gain.share) > 0
    assert "replayed step without the loader" in values(finding)


# ------------------------------------------------------------------------------------------------- a real pair


def interior_median_ns(analysis: Analysis) -> float:
    (found,) = analysis.replays
    return found.recorded_median_ns


@shared_traces.needs_traces
def test_the_loaders_ceiling_bounds_what_four_workers_gained() -> None:
    none, four = (shared_traces.run_of(f"{PAIR}{workers}") for workers in (0, 4))
    measured = 1 - interior_median_ns(four.analysis) / interior_median_ns(none.analysis)
    first = none.diagnosis.findings[0]
    assert first.rule == "input.loader_bound"
    assert measured <= first.gain_ceiling <= measured + 0.15
    (found,) = none.analysis.replays
    what_if = found.of(LOADER)
    assert what_if is not None
    assert measured <= 1 - what_if.median_ns / found.unchanged_median_ns <= measured + 0.15
    assert values(first)["replayed step without the loader"] == pytest.approx(what_if.mean_ns / MS, abs=0.001)
    assert four.diagnosis.findings[0].rule != "input.loader_bound"


@shared_traces.needs_traces
def test_mixed_precision_is_found_in_both_and_a_loader_behind_it_bounds_what_it_gains() -> None:
    """On tensor cores the steps would still take as long as the loader does: four workers leave more to gain."""
    none, four = (only(shared_traces.analysis_of(f"{PAIR}{each}"), "compute.no_tensor_cores") for each in (0, 4))
    for finding in (none, four):
        assert finding.share < finding.gain_ceiling < 1
    assert none.gain_ceiling < four.gain_ceiling
