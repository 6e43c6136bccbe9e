"""Pairs to an effect with an interval, the words for effects, each where it may stand, and `--fail-on slower=X%`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.comparison.thresholds import Limits
from stepscope.comparison.verdicts import (
    effect_of,
    half_width,
    holm,
    p_value,
    pairs_needed,
    percent,
    slower_by,
    step_verdict,
    verdict,
)
from stepscope.model.comparison import (
    FASTER,
    NO_DIFFERENCE,
    SLOWER,
    UNDECIDED,
    VOID,
    Comparison,
    Effect,
    Outcome,
    SideFacts,
    Verdict,
)
from tests.records import some

LIMITS = Limits(threshold=0.01, width=0.02)
figures = st.floats(min_value=1e-6, max_value=1e9)
anything = st.floats(allow_nan=True, allow_infinity=True)
logs = st.lists(st.floats(min_value=-1, max_value=1), min_size=1, max_size=10)


def effect(*ratios: float) -> Effect:
    return some(effect_of([(100.0, 100.0 * ratio) for ratio in ratios]))


def interval(found: Effect) -> tuple[float, float]:
    return some(found.low), some(found.high)


def test_student_by_hand() -> None:
    """Logs 0, 0.02, 0.04: mean 0.02, deviation 0.02, two degrees of freedom: 4.3027."""
    found = effect(*(math.exp(value) for value in (0.0, 0.02, 0.04)))
    half = 4.302653 * 0.02 / math.sqrt(3)
    assert found.ratio == pytest.approx(math.exp(0.02))
    assert interval(found) == pytest.approx((math.exp(0.02 - half), math.exp(0.02 + half)))
    assert found.spread == pytest.approx(0.02)
    assert half_width(found) == pytest.approx(half)
    # t = 0.02 / (0.02 / sqrt 3) = 1.732 with two degrees: p = 1 - t / sqrt(t^2 + 2)
    assert found.p_value == pytest.approx(1 - math.sqrt(3) / math.sqrt(5))


def test_a_pair_or_two_have_no_interval_and_pairs_that_agree_to_the_bit_have_none_to_speak_of() -> None:
    one, two = effect(0.9), effect(0.9, 0.92)
    assert (one.ratio, one.low, one.high, one.spread, one.p_value, one.pairs) == (pytest.approx(0.9), *[None] * 4, 1)
    assert (two.low, two.high, two.p_value) == (None, None, None)
    same, half = effect(*[1.0] * 4), effect(*[0.5] * 4)
    assert (same.ratio, same.low, same.high, same.spread, same.p_value) == (1, 1, 1, 0, 1)
    assert half.low == half.high == pytest.approx(0.5)
    assert half.p_value == 0


@pytest.mark.parametrize("odd", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_figure_without_a_logarithm_gives_no_effect(odd: float) -> None:
    assert effect_of([(1.0, 1.0), (1.0, odd), (1.0, 1.0)]) is effect_of([(odd, 1.0)]) is effect_of([]) is None


@given(st.lists(st.tuples(anything, anything), max_size=8))
def test_odd_numbers_never_raise(pairs: list[tuple[float, float]]) -> None:
    found = effect_of(pairs)
    assert found is None or (found.pairs == len(pairs) and found.ratio >= 0)


@given(st.lists(st.tuples(figures, figures), min_size=3, max_size=10), st.floats(0.01, 1e4))
def test_swapped_sides_give_the_inverse_and_the_unit_does_not_matter(
    pairs: list[tuple[float, float]], unit: float
) -> None:
    one, other = effect_of(pairs), effect_of([(after, before) for before, after in pairs])
    scaled = some(effect_of([(unit * before, unit * after) for before, after in pairs]))
    assert one is not None
    assert other is not None
    assert interval(one)[0] <= one.ratio <= interval(one)[1]
    assert math.log(other.ratio) == pytest.approx(-math.log(one.ratio), abs=1e-9)
    assert other.p_value == pytest.approx(one.p_value, abs=1e-6)
    assert scaled.ratio == pytest.approx(one.ratio)


def test_the_interval_excludes_one_exactly_when_p_is_below_5_percent() -> None:
    for shift in (0.0, 0.01, 0.015, 0.02, 0.03, 0.1):
        found = effect(*(math.exp(value + shift) for value in (-0.02, 0.0, 0.005, 0.02)))
        assert found.p_value is not None
        assert (interval(found)[0] > 1) == (found.p_value < 0.05)
        assert found.p_value == p_value(found)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([None, 0.02]) == [None, pytest.approx(0.02)]


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=8))
def test_holm_only_raises_and_keeps_the_order(values: list[float | None]) -> None:
    after = holm(values)
    pairs = [(before, late) for before, late in zip(values, after, strict=True) if before is not None]
    assert [late is None for late in after] == [before is None for before in values]
    assert all(late is not None and before <= late <= 1 for before, late in pairs)
    ordered = [late for _, late in sorted(pairs)]
    assert ordered == sorted(ordered)


def test_as_many_pairs_as_are_needed_are_narrow_enough() -> None:
    assert pairs_needed(0.0, 0.02) == 3
    assert pairs_needed(0.02, 0.02) == 7
    assert pairs_needed(1.0, 0.0) == pairs_needed(1e9, 0.02) == 1000
    for spread in (0.001, 0.01, 0.02, 0.05):
        count = pairs_needed(spread, 0.02)
        assert (half_width(Effect(1.0, None, None, count, spread)) or 1) <= 0.02
        assert count == 3 or (half_width(Effect(1.0, None, None, count - 1, spread)) or 0) > 0.02


def judge(*ratios: float, limits: Limits = LIMITS, more_is_better: bool = False) -> Verdict:
    return verdict(effect(*ratios), limits, more_is_better=more_is_better)


CERTAIN = (0.70, 0.72, 0.73, 0.71, 0.74)
SMALL = (0.994, 0.9945, 0.9935, 0.994)


@pytest.mark.parametrize(
    ("ratios", "more_is_better", "word", "text"),
    [
        (CERTAIN, False, FASTER, "faster by 28 % (95 %: 26 to 30 %), 5 pairs"),
        ((1.030, 1.034, 1.028, 1.031), False, SLOWER, "slower by 3.1 % (95 %: 2.7 to 3.5 %), 4 pairs"),
        ((1.01, 0.99, 1.005, 0.995, 1.0), False, NO_DIFFERENCE, "no difference larger than 1 %, 5 pairs"),
        (SMALL, False, NO_DIFFERENCE, "no difference larger than 0.7 %, 4 pairs"),  # certain, but it does not matter
        ((0.95, 1.04, 0.98, 1.03, 0.99), False, UNDECIDED, "undecided: -0.3 % (95 %: -4.8 to +4.5 %), 5 pairs; about "),
        (
            (0.5,),
            False,
            UNDECIDED,
            "undecided: -50 % in one run each; how much runs of the same program differ is not known",
        ),
        ((0.5, 0.5), False, UNDECIDED, "undecided: -50 % in 2 pairs; an interval needs 3"),
        (
            (1.40, 1.41, 1.39),
            True,
            FASTER,
            "faster: 40 % more samples per second (95 %: 38 to 43 %), 3 pairs",
        ),
        (
            (0.90, 0.905, 0.895),
            True,
            SLOWER,
            "slower: 10 % fewer samples per second (95 %: 8.8 to 11 %), 3 pairs",
        ),
    ],
)
def test_the_word_and_the_sentence(ratios: tuple[float, ...], more_is_better: bool, word: str, text: str) -> None:
    said = judge(*ratios, more_is_better=more_is_better)
    assert said.word == word
    assert said.text.startswith(text)
    assert (said.pairs_needed is not None) == (word == UNDECIDED)


def test_what_decides_the_word_and_that_among_many_candidates_a_doubtful_effect_is_undecided() -> None:
    assert judge(*SMALL, limits=Limits(threshold=0.005, width=0.02)).word == FASTER
    assert "over 100 more pairs" in judge(0.5, 2.0, 0.6, 1.9).text  # hopeless noise names no number
    assert verdict(None, LIMITS).word == UNDECIDED
    alone = effect(0.96, 0.99, 0.97, 0.985)
    assert verdict(alone, LIMITS, alpha=0.05).word == FASTER
    among = Effect(alone.ratio, alone.low, alone.high, alone.pairs, alone.spread, some(alone.p_value) * 8)
    said = verdict(among, LIMITS, candidates=8)
    assert said.word == UNDECIDED
    assert "by itself, but one of 8 candidates may show that by chance" in said.text


NOISY = (0.90, 1.04, 0.93, 1.01, 0.97)
STEADY = (0.969, 0.971, 0.965, 0.974, 0.968)
NARROW_MEAN = (1.001, 0.999, 1.0, 1.002, 0.998)


def inverse(ratios: tuple[float, ...], by: float = 1.0) -> tuple[float, ...]:
    return tuple(by / ratio for ratio in ratios)


@pytest.mark.parametrize(
    ("means", "medians", "word", "text"),
    [
        # a certain mean needs no median
        *((CERTAIN, medians, FASTER, judge(*CERTAIN).text) for medians in (STEADY, (1.0,) * 5, NOISY)),
        # the median decides where stalls blur the mean, in both directions
        (
            NOISY,
            STEADY,
            FASTER,
            "faster by 3.1 % by the median step (95 %: 2.6 to 3.5 %), 5 pairs; "
            "the mean, which stalls blur, says 3.1 % (-4.2 to 10 %)",
        ),
        (
            inverse(NOISY),
            inverse(STEADY),
            SLOWER,
            "slower by 3.2 % by the median step (95 %: 2.7 to 3.6 %), 5 pairs; "
            "the mean, which stalls blur, says 3.2 % (-4 to 11 %)",
        ),
        # where both are certain and contradict each other, the mean decides: shorter steps, but stalls cost more
        (
            (1.05, 1.052, 1.049, 1.051, 1.05),
            STEADY,
            SLOWER,
            "slower by 5 % (95 %: 4.9 to 5.2 %), 5 pairs; the typical step went the other way: "
            "the median step is faster by 3.1 % (95 %: 2.6 to 3.5 %), 5 pairs",
        ),
        # a narrow mean says no difference whatever a median shows that it does not share
        (NARROW_MEAN, STEADY, NO_DIFFERENCE, judge(*NARROW_MEAN).text),
    ],
)
def test_the_mean_and_the_median(means: tuple[float, ...], medians: tuple[float, ...], word: str, text: str) -> None:
    said = step_verdict(effect(*means), effect(*medians), LIMITS)
    assert (said.word, said.text) == (word, text)


@pytest.mark.parametrize("shift", [1.031, 1.05])
def test_the_median_decides_nothing_that_the_mean_does_not_share(shift: float) -> None:
    """The mean points nowhere (0.1 %), or the other way."""
    said = step_verdict(effect(*(ratio * shift for ratio in NOISY)), effect(*STEADY), LIMITS)
    assert said.word == UNDECIDED
    assert said.text.endswith(
        "; the median step is faster by 3.1 % (95 %: 2.6 to 3.5 %), 5 pairs, which the mean does not bear out"
    )


def test_a_median_that_is_certain_or_missing() -> None:
    means = effect(0.986, 0.999, 0.976, 0.997, 0.985)
    assert [step_verdict(means, effect(*one), LIMITS).word for one in ((1.0,) * 5, STEADY)] == [NO_DIFFERENCE, FASTER]
    assert step_verdict(effect(*STEADY), None, LIMITS).word == FASTER
    assert step_verdict(None, effect(*STEADY), LIMITS).word == UNDECIDED
    few = (0.90, 1.04, 0.93, 1.01)  # fewer pairs are asked for where the median will decide
    asked = step_verdict(effect(*few), effect(0.93, 0.98, 1.0, 0.95), LIMITS).pairs_needed
    assert (asked or 1000) < (judge(*few).pairs_needed or 0)


@given(logs, logs)
def test_the_median_decides_only_with_the_mean(means: list[float], medians: list[float]) -> None:
    mean, median = (effect(*map(math.exp, values)) for values in (means, medians))
    alone, said = verdict(mean, LIMITS), step_verdict(mean, median, LIMITS)
    if alone.word in {FASTER, SLOWER}:
        assert said.word == alone.word
        assert said.text.startswith(alone.text)
    elif said.word in {FASTER, SLOWER}:
        assert (mean.ratio > 1) == (said.word == SLOWER)
        assert abs(mean.ratio - 1) >= 0.01
    assert (said.word == UNDECIDED) == (said.pairs_needed is not None)


@given(logs, st.floats(0, 0.1), st.floats(0.001, 0.1))
def test_words_hold_what_they_say(values: list[float], threshold: float, width: float) -> None:
    found = effect(*map(math.exp, values))
    said = verdict(found, Limits(threshold=threshold, width=width))
    assert (said.word == UNDECIDED) == (said.pairs_needed is not None)
    if said.word == UNDECIDED:
        return
    low, high = interval(found)
    if said.word == NO_DIFFERENCE:
        assert said.resolution is not None
        assert 1 - said.resolution <= low + 1e-12
        assert high <= 1 + said.resolution + 1e-12
        assert said.resolution <= width + threshold
    else:
        assert high < 1 if said.word == FASTER else low > 1
        assert abs(found.ratio - 1) >= threshold


@given(st.lists(st.floats(-0.05, 0.05), min_size=3, max_size=8))
def test_the_pairs_asked_for_suffice_if_the_spread_stays(values: list[float]) -> None:
    """Repeating what was seen, until there are as many pairs as were asked for, decides."""
    found = effect(*map(math.exp, values))
    said = verdict(found, LIMITS)
    if said.pairs_needed is None or said.pairs_needed > 500 or not found.spread:
        return
    half = some(half_width(Effect(found.ratio, None, None, found.pairs + said.pairs_needed, found.spread)))
    size = abs(math.log(found.ratio))
    assert half <= max(0.03 - size, size) + 1e-9


@pytest.mark.parametrize(
    ("fraction", "text", "signed"),
    [
        (0.28, "28", "+28"),
        (0.023, "2.3", "+2.3"),
        (-0.03, "-3", "-3"),
        (0.0004, "0.04", "+0.04"),
        (-1e-9, "0", "0"),
        (0.0996, "10", "+10"),
        (2, "200", "+200"),
    ],
)
def test_figures_in_percent(fraction: float, text: str, signed: str) -> None:
    assert (percent(fraction), percent(fraction, sign=True)) == (text, signed)


NARROW, WIDE = (0.999, 1.0, 1.001, 1.0), (0.9, 1.1, 1.05, 0.95)


def holding(outcome: Outcome | None, **absent: str) -> Comparison:
    side = SideFacts("a", (), ())
    return Comparison(side, side, outcome, (), {name.replace("_", " "): why for name, why in absent.items()})


def check(
    ratio: float, noise: tuple[float, ...], by: float = 0.03, headline: str = "mean_ms"
) -> tuple[bool | None, str]:
    found = effect(*(ratio * factor for factor in noise))
    said = verdict(found, LIMITS, more_is_better=headline == "samples_per_second")
    return slower_by(holding(Outcome((), said, {headline: found}, (), (), headline=headline)), by)


@pytest.mark.parametrize(
    ("ratio", "noise", "slower"),
    [
        (1.10, NARROW, True),
        (1.00, NARROW, False),
        (0.80, NARROW, False),
        (0.80, WIDE, False),  # surely faster, however wide the interval is
        (1.02, NARROW, False),  # slower, but by less
        (1.03, (1.004, 0.997, 1.003, 0.999), True),
        (1.029, (1.004, 0.997, 1.003, 0.995), None),
        (1.04, WIDE, None),
        (1.20, (1.0, 1.0), None),
    ],
)
def test_the_check(ratio: float, noise: tuple[float, ...], slower: bool | None) -> None:
    assert check(ratio, noise)[0] is slower


def test_the_check_says_what_it_saw_and_what_it_lacks() -> None:
    assert check(1.2, (1.0,))[1] == "+20 %, but 1 pair gives no interval; about 2 more pairs needed"
    assert "1 % lies in the interval; about " in check(1.04, WIDE, 0.01)[1]
    fewer, more = (check(ratio, NARROW, headline="samples_per_second") for ratio in (0.8, 1.2))
    assert (fewer[0], more[0]) == (True, False)
    void = Outcome((), Verdict(VOID, "void: a run failed"), {}, (), ())
    assert slower_by(holding(void), 0.03) == (None, "void: a run failed")
    assert slower_by(holding(None, step_time="b: no steps"), 0.03) == (None, "b: no steps")


def test_a_noisy_mean_beside_a_median_that_is_surely_slower_by_less_decides_nothing() -> None:
    mean = effect(1.15, 0.94, 1.12, 0.96, 1.03)
    assert interval(mean)[0] < 1 < 1.03 < mean.ratio
    for by, slower in ((1.012, None), (1.04, True)):
        median = effect(*(by * factor for factor in NARROW))
        found = Outcome((), Verdict(SLOWER, ""), {"mean_ms": mean, "median_ms": median}, (), ())
        assert slower_by(holding(found), 0.03)[0] is slower
