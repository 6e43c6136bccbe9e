"""Flags that only the other runs of a comparison make visible."""

from __future__ import annotations

from typing import Any

from stepscope.comparison import conditions
from stepscope.comparison.flags import flagged_pairs, flags_of_set, with_flags_of_set
from stepscope.model.comparison import Flag, Measure
from tests.builders import MS, T0, step_rows
from tests.records import replace

S = 1000 * MS
STEPS = step_rows(400)  # 10 ms each; four seconds
END = T0 + 4 * S


# ------------------------------------------------------------------------------------------------ runs of one kind


def run(**changes: Any) -> Measure:
    usual = Measure(
        label="a",
        path="a",
        steps=100,
        dropped=5,
        mean_ms=100,
        median_ms=100,
        p95_ms=100,
        samples_per_step=8,
        samples_per_second=80,
        fixed_cost_s=1.0,
        phases=(),
        signal="optimizer",
    )
    return replace(usual, **changes)


def figures(**values: float) -> Measure:
    return run(conditions={conditions.CORES: 2.0, **values})


def of_set(*sides: list[Measure]) -> list[list[dict[str, bool]]]:
    return [[{flag.name: flag.withholds for flag in each} for each in side] for side in flags_of_set(*sides)]


def test_alike_runs_raise_nothing() -> None:
    alike = figures(read_bytes_per_step=4e6, others_cores=0.1, cpu_frequency_mhz=3000, gpu_clock_mhz=1900)

    assert of_set([alike] * 3, [alike] * 3) == [[{}] * 3] * 2
    assert of_set([alike]) == [[{}]]
    assert of_set() == []


def test_the_first_run_that_fills_the_cache_is_withheld() -> None:
    cold, warm = figures(read_bytes_per_step=30e6), figures(read_bytes_per_step=1e4)

    assert of_set([cold, warm, warm], [warm, warm]) == [[{"cold_cache": True}, {}, {}], [{}, {}]]
    assert of_set([cold], [warm]) == [[{"cold_cache": True}], [{}]]
    assert of_set([cold, cold], [cold]) == [[{}, {}], [{}]]  # data that never fits
    assert of_set([figures(read_bytes_per_step=2e5), warm], [warm]) == [[{}, {}], [{}]]  # a log file


def test_page_faults_of_a_cold_cache() -> None:
    cold, warm = figures(major_faults_per_step=40), figures(major_faults_per_step=0)

    assert of_set([warm, cold], [warm]) == [[{}, {"cold_cache": True}], [{}]]


def test_more_pages_mapped_in_longer_steps() -> None:
    many, few = figures(minor_faults_per_step=16_000), figures(minor_faults_per_step=9_000)
    slow = replace(many, mean_ms=110)

    assert of_set([slow], [few]) == [[{"page_faults_differ": False}], [{}]]
    (((flag,),), _) = flags_of_set([slow], [few])
    assert "16,000 page faults a step, in the other runs 9,000" in flag.text
    assert of_set([many], [few]) == [[{}], [{}]]  # no longer for it
    assert of_set([replace(few, mean_ms=110)], [many]) == [[{}], [{}]]  # longer for another reason


def test_a_run_that_shared_its_machine_more_than_the_others() -> None:
    busy, quiet = figures(others_cores=1.2), figures(others_cores=0.3)

    assert of_set([busy, quiet], [quiet, quiet]) == [[{"machine_busier": False}, {}], [{}, {}]]
    assert of_set([busy, busy], [busy, quiet]) == [[{}, {}], [{}, {}]]


def test_clocks_are_compared_within_a_side() -> None:
    slow, fast = figures(gpu_clock_mhz=1500), figures(gpu_clock_mhz=1900)

    assert of_set([slow, fast, fast], [fast]) == [[{"clocks_differ": True}, {}, {}], [{}]]
    assert of_set([slow, slow], [fast, fast]) == [[{}, {}], [{}, {}]]  # other work may have another clock


def test_the_clock_of_the_cpu_is_said_and_withholds_nothing() -> None:
    slow, fast = figures(cpu_frequency_mhz=2000), figures(cpu_frequency_mhz=3000)

    assert of_set([slow, fast, fast]) == [[{"clocks_differ": False}, {}, {}]]
    assert of_set([figures(cpu_frequency_mhz=2850), fast]) == [[{}, {}]]


def test_steps_that_were_cut_elsewhere() -> None:
    by_loader = run(signal="loader", samples_per_step=4)

    assert of_set([run()], [by_loader]) == [[{"cut_differently": True}], [{"cut_differently": True}]]
    assert of_set([run()], [run(signal="loader")]) == [[{"cut_differently": False}], [{"cut_differently": False}]]
    assert of_set([run()], [run(signal=None)]) == [[{}], [{}]]


def test_flags_are_added_once_and_keep_their_run() -> None:
    own = Flag("recompiles", "something was compiled", "rank-0/events.jsonl", True)
    cold = replace(figures(read_bytes_per_step=30e6), flags=(own,))
    warm = figures(read_bytes_per_step=1e4)
    (first, second), (third,) = with_flags_of_set([cold, warm], [warm])

    assert [flag.name for flag in first.flags] == ["recompiles", "cold_cache"]
    assert (second.flags, third.flags) == ((), ())
    assert with_flags_of_set([first, second], [third]) == ((first, second), (third,))


def test_a_baseline_in_several_pairs_counts_as_one_run() -> None:
    cold, warm = figures(read_bytes_per_step=30e6), figures(read_bytes_per_step=1e4)
    pairs = flagged_pairs([(cold, warm), (cold, replace(warm, label="b"))])

    assert [[flag.name for flag in baseline.flags] for baseline, _ in pairs] == [["cold_cache"]] * 2
    assert pairs[0][0] is pairs[1][0]
    assert flagged_pairs([]) == ()
