"""Ceilings: from replays where there are any, never below the cost, and honest about where they come from."""

from __future__ import annotations

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose
from stepscope.diagnose.gains import BY_SUBTRACTION, replayed
from stepscope.model import Analysis, Finding
from stepscope.model.device_losses import ALLOCATOR, LOADER, SYNC, Replay, WhatIf
from tests.analyze import shared_traces
from tests.analyze.device_scenes import V100, pointwise_run, reads_value, repeated
from tests.diagnose.judged import values
from tests.records import blank, replace

MS = 1e6
PAIR = "kineto_tb_plugin/resnet50_num_workers_"


def only(analysis: Analysis, rule: str) -> Finding:
    (finding,) = [one for one in diagnose(analysis).findings if one.rule == rule]
    return finding


def made(what_if: WhatIf) -> Replay:
    """Of steps of 100 ms, of 80 where the host is never late."""
    steps = dict.fromkeys(("recorded_mean_ns", "recorded_median_ns", "unchanged_mean_ns", "unchanged_median_ns"), 1e8)
    never_late = dict.fromkeys(("never_late_mean_ns", "never_late_median_ns"), 8e7)
    known = {"run": "", "traces": ("worker0/span1",), "steps": 3, "unexplained_ns": 0.0, "what_ifs": (what_if,)}
    return blank(Replay, **{**steps, **never_late, **known})


@pytest.fixture
def analysis() -> Analysis:
    return analyze(repeated(6, 400, reads_value).tables(V100))


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


def test_no_ceiling_is_below_the_cost(analysis: Analysis) -> None:
    kept = made(WhatIf(SYNC, 100 * MS, 100 * MS, None, None))
    finding = only(replace(analysis, replays=(kept,)), "sync.host_waits")
    assert finding.gain_ceiling == finding.share


def test_work_behind_a_late_host_is_told_to_be() -> None:
    """Kernels that are launched right before they start: as recorded, shorter ones gain nothing."""
    finding = only(analyze(repeated(6, 1000, pointwise_run).tables(V100)), "compute.unfused_pointwise")
    assert "The recorded host was late as well: with it 0% of the step would be saved" in finding.caveat
    assert finding.gain_ceiling >= finding.share == pytest.approx(0.4)


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
