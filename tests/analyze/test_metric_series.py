"""Series by themselves: healthy ones give no alarm, and what is planted is found at its place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from stepscope.analyze.metrics import SLOW_SCALES, levels, spikes
from stepscope.tables.arrays import Floats

COUNT = 1_000


def falling(random: np.random.Generator, count: int = COUNT) -> Floats:
    """What a loss looks like without its noise: it decays, by an exponential or a power, slowly or fast, or is flat."""
    at = np.arange(count)
    shapes = (
        0.4 + 2 * np.exp(-at / (count / random.uniform(3, 30))),
        0.2 + 8 * (at + random.uniform(1, 20)) ** -random.uniform(0.3, 0.8),
        3 - 2.5 * at / count,
        np.full(count, 1.7),
    )
    return shapes[int(random.integers(len(shapes)))]


def healthy(random: np.random.Generator) -> Iterator[Floats]:
    """Losses with noise of several kinds, some heavy-tailed, some that remembers."""
    for number in range(300):
        count = int(random.choice([60, 200, 1_000]))
        base, scale = falling(random, count), random.uniform(0.005, 0.2)
        if number % 4 == 0:
            yield base * (1 + scale * random.standard_normal(count))
        elif number % 4 == 1:
            yield base * np.exp(3 * scale * random.standard_normal(count))
        elif number % 4 == 2:
            yield base * random.exponential(1, count)
        else:
            noise = random.standard_normal(count)
            for index in range(1, count):
                noise[index] = 0.9 * noise[index - 1] + np.sqrt(1 - 0.9**2) * noise[index]
            yield base * (1 + scale * noise)


def test_healthy_losses_give_no_alarm() -> None:
    alarms = [(spikes(values), levels(values)) for values in healthy(np.random.default_rng(1))]
    assert sum(bool(found or changed) for found, changed in alarms) <= 2


@pytest.mark.parametrize("lasts", [1, 3])
def test_planted_spikes_are_found_at_their_step(lasts: int) -> None:
    random = np.random.default_rng(lasts)
    for _ in range(60):
        values = falling(random) * (1 + 0.05 * random.standard_normal(COUNT))
        at = int(random.integers(250, COUNT - 10))  # before, the fall at the start is as wide
        values[at : at + lasts] *= 4
        found = [(leap.at, leap.lasts) for leap in spikes(values)]
        assert found == [(at, lasts)]
        assert levels(values) == []


def converged(seed: int) -> Floats:
    """A loss that falls to a thousandth, with a hard sample now and then, whose loss does not fall."""
    random = np.random.default_rng(seed)
    values = (2 * np.exp(-np.arange(3_000) / 150) + 1e-3) * np.exp(random.standard_normal(3_000))
    hard = np.flatnonzero(random.random(3_000) < 1 / 120)
    values[hard] += random.uniform(0.2, 0.5, len(hard))
    return values


def test_a_converged_loss_leaps_now_and_then() -> None:
    found = [spikes(converged(seed)) for seed in range(20)]
    assert sum(map(len, found)) <= 1
    values = converged(0)
    values[2_000] = 4
    assert [leap.at for leap in spikes(values)] == [2_000]


def test_a_series_that_is_read_once_a_second_may_be_short() -> None:
    held = np.array([230 + at / 10 for at in range(12)] + [470 + at / 10 for at in range(11)])
    assert levels(held) == []
    assert [level.at for level in levels(held, SLOW_SCALES)] == [12]
    assert levels(np.linspace(200, 400, 25), SLOW_SCALES) == []
    assert levels(np.minimum(np.arange(25.0), 6) + 100, SLOW_SCALES) == []


def test_planted_levels_are_found_at_their_step() -> None:
    random = np.random.default_rng(3)
    for number in range(60):
        values = 10 * (1 + 0.03 * random.standard_normal(COUNT))
        slow = random.integers(0, COUNT, 20)
        values[slow] *= 3  # as steps do that collect or save
        at = int(random.integers(40, COUNT - 40))
        values[at - 2 : at + 2] = 10
        factor = (1.4, 0.7, 1.15)[number % 3]
        values[at:] *= factor
        (level,) = levels(values)
        assert abs(level.at - at) <= (0 if factor != 1.15 else 3)  # half of the noise's width: not known to the step
        assert level.after / level.before == pytest.approx(factor, rel=0.03)
    assert spikes(values) == []  # nor does a level that is high for good count as a spike


def test_both_ends_of_a_slow_stretch() -> None:
    values = np.full(400, 10.0) + 0.2 * np.random.default_rng(4).standard_normal(400)
    values[200:260] += 5
    assert [level.at for level in levels(values)] == [200, 260]


def test_what_is_not_finite_is_passed_over() -> None:
    values = 1 + 0.01 * np.random.default_rng(5).standard_normal(300)
    values[[100, 101, 250]] = np.nan, np.inf, -np.inf
    values[200] = 3
    assert [leap.at for leap in spikes(values)] == [200]
    assert levels(values) == []


@pytest.mark.parametrize("values", [[], [1.0], [np.nan] * 50, [0.0] * 500, [2.5] * 500])
def test_series_with_nothing_in_them(values: list[float]) -> None:
    assert spikes(np.array(values)) == []
    assert levels(np.array(values)) == []


def test_a_long_series_is_exact_to_the_value() -> None:
    values = 10 + 0.3 * np.random.default_rng(6).standard_normal(200_000)
    values[123_457:] += 4
    assert [level.at for level in levels(values)] == [123_457]
