"""The scenarios of the simulated comparisons, and their section in RESULTS.md."""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import results
import simulation
from simulation import Change, Machine

from stepscope.comparison.thresholds import (
    FIXED_ALPHA,
    INTERVAL_PAIRS,
    LEAST_PAIRS,
    LOOKING_ALPHA,
    MOST_PAIRS,
    WIDTH,
    Limits,
)
from stepscope.comparison.verdicts import effect_of, verdict
from stepscope.experiment.schedule import alpha_after
from stepscope.model.comparison import FASTER, NO_DIFFERENCE, SLOWER, UNDECIDED

SEED = 20261121
STEPS = 300  # measured in a run
PAIRS = 6  # where their number is fixed
FALSE_LIMIT, FOUND_LIMIT = 6.0, 90.0  # percent
DEFAULT = (100.0, 300)  # (spikes in ms, measured steps): what the limits are held against
POWER = ((30.0, 300), (50.0, 300), DEFAULT, (200.0, 300), (100.0, 1000))
SPREADS = (0.003, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04)  # between pairs, for the stopping rule

SECTION = """
## Statistics of comparisons

How often a comparison says what is not so, or misses what is, on simulated training runs whose truth is known. A step
takes 100 ms with autocorrelated noise of 3 % (AR(1), 0.8), one step in 50 has an exponential spike of 100 ms in the
mean, runs differ by 1 %, the machine drifts by 4 % in the time of twelve runs, and the first steps are warm-up. Our way
is the code of `stepscope experiment` from step times to the word: warm-up dropped by detection, mean and median of each
run, pairs in ABBA order, pairs until the interval of the mean is narrow enough, the verdict by the mean or the median.
Naive ways get their warm-up cut off for them. Seeds are fixed; `benchmarks/simulation.py` is the noise. How long spikes
are is not given where that noise was measured, so several lengths are shown.
"""

Row = Sequence[str]


@dataclass(frozen=True)
class Rates:
    """Of so many simulated sessions: words of our verdicts, mean pairs used, and how often each naive way saw one."""

    sessions: int
    words: Counter[str]
    pairs: float
    naive: dict[str, int]
    figures: Counter[str]
    by_median: int

    def differ(self) -> float:
        """Percent of verdicts that say faster or slower."""
        return 100 * (self.words[FASTER] + self.words[SLOWER]) / self.sessions


def run(
    seed: int,
    sessions: int,
    *,
    machine: Machine | None = None,
    change: Change | None = None,
    pairs: int = MOST_PAIRS,
    least: int = LEAST_PAIRS,
    blocks: bool = True,
    steps: int = STEPS,
    naive: bool = False,
) -> Rates:
    """One scenario; sessions of `pairs` pairs, of which our way stops at `least` or later."""
    rng, draws = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    sides = simulation.order(pairs, blocks=blocks)
    words: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    figures: Counter[str] = Counter()
    used = by_median = 0
    for session in simulation.sessions(rng, sessions, sides, steps, machine or Machine(), change or Change()):
        found = simulation.judge(session, sides, least=min(least, pairs), most=pairs)
        words[found.verdict.word] += 1
        figures.update(name for name, effect in found.effects.items() if simulation.excludes_one(effect))
        by_median += simulation.by_median(found)
        used += len(found.pairs)
        if naive:
            baseline, candidate = simulation.without_warmup(session, sides)
            seen.update(name for name, way in simulation.NAIVE.items() if way(baseline, candidate, draws))
    return Rates(sessions, words, used / sessions, {name: seen[name] for name in simulation.NAIVE}, figures, by_median)


def stopping_rates(least: int, spread: float, sessions: int, seed: int) -> tuple[float, float]:
    """Percent of false verdicts and mean pairs of the stopping rule, on pairs that differ by chance."""
    rng = np.random.default_rng(seed)
    false, used = 0, 0
    for logs in rng.normal(0.0, spread, (sessions, MOST_PAIRS)):
        pairs = [(1.0, math.exp(value)) for value in logs]
        for count in range(INTERVAL_PAIRS, MOST_PAIRS + 1):
            effect = effect_of(pairs[:count])
            if simulation.enough(effect, least=least, most=MOST_PAIRS):
                break
        used += count
        alpha = alpha_after(least=least, most=MOST_PAIRS).mean
        false += verdict(effect, Limits(), alpha=alpha).word in {FASTER, SLOWER}
    return 100 * false / sessions, used / sessions


def equal_programs(sessions: int, naive_sessions: int) -> tuple[list[str], float]:
    """The table of false verdicts, and the worst rate of our way as it is used."""
    columns = ("ABBA", "ABBA, spikes of 30 ms", "ABBA, spikes of 200 ms", "AAABBB")
    scenarios: tuple[dict[str, Any], ...] = (
        {},
        {"machine": Machine(spike_ms=30.0)},
        {"machine": Machine(spike_ms=200.0)},
        {"blocks": False},
    )
    rule = [run(SEED + 10 * n, sessions, **options) for n, options in enumerate(scenarios)]
    fixed = [run(SEED + 500 + 10 * n, sessions, pairs=PAIRS, least=PAIRS, **o) for n, o in enumerate(scenarios)]
    naive = [run(SEED + 700 + 10 * n, naive_sessions, pairs=PAIRS, naive=True, **o) for n, o in enumerate(scenarios)]
    rows: list[Row] = [
        (f"ours, {LEAST_PAIRS} to {MOST_PAIRS} pairs until ±{WIDTH:.0%}", *(_percent(one.differ()) for one in rule)),
        (f"ours, {PAIRS} pairs", *(_percent(one.differ()) for one in fixed)),
        (f"of those, by the median, {PAIRS} pairs", *(_percent(100 * one.by_median / one.sessions) for one in fixed)),
        *(
            (f"{name}, {PAIRS} runs each", *(_percent(100 * one.naive[name] / one.sessions) for one in naive))
            for name in simulation.NAIVE
        ),
    ]
    lines = [
        "Equal programs: percent of comparisons that find a difference. "
        f"{sessions} sessions for ours, {naive_sessions} for the naive ways.",
        "",
        *_table(("way", *columns), rows),
        "",
        f"- The other verdicts of our way, ABBA: {_words(rule[0])}; {rule[0].pairs:.1f} pairs in the mean.",
        "- All baselines before all candidates (AAABBB) takes the machine's drift for a difference, whatever the test.",
    ]
    return lines, max(one.differ() for one in (*rule[:3], *fixed[:3]))


def true_effect(sessions: int) -> tuple[list[str], dict[tuple[float, int], tuple[float, float]]]:
    """The table of what is found of a slowdown by 3 %; (spikes, steps) -> found with six pairs, and until narrow."""
    rows: list[Row] = []
    rates: dict[tuple[float, int], tuple[float, float]] = {}
    for number, (spike_ms, steps) in enumerate(POWER):
        options: dict[str, Any] = {"machine": Machine(spike_ms=spike_ms), "change": Change(share=0.03), "steps": steps}
        six = run(SEED + 1000 + number, sessions, pairs=PAIRS, least=PAIRS, **options)
        rule = run(SEED + 1100 + number, sessions, **options)
        found = [100 * one.words[SLOWER] / sessions for one in (six, rule)]
        rates[spike_ms, steps] = (found[0], found[1])
        alone = [100 * six.figures[name] / sessions for name in ("mean_ms", "median_ms")]
        cells = (*map(_percent, (found[0], *alone, found[1])), f"{rule.pairs:.1f}")
        rows.append((f"{spike_ms:.0f} ms", str(steps), *cells, str(six.words[FASTER] + rule.words[FASTER])))
    columns = ("spikes", "steps", f"found, {PAIRS} pairs", "mean alone", "median alone", "found, until narrow")
    fixed, looking = FIXED_ALPHA, LOOKING_ALPHA
    lines = [
        f"A true slowdown of every step by 3 %: percent of {sessions} sessions that find it. A verdict rests on the",
        f"mean (p < {fixed.mean}; {looking.mean} where pairs end when the interval is narrow) or, where the mean",
        f"points the same way by 1 % or more, on the median (p < {fixed.median}; {looking.median}). Beside it what",
        f"either figure alone finds with {PAIRS} pairs at p < 0.05.",
        "",
        *_table((*columns, "pairs then", "said faster"), rows),
    ]
    return lines, rates


def stalls(sessions: int) -> list[str]:
    """The table of which figure sees a stall in every tenth step."""
    found = run(SEED + 2000, sessions, change=Change(stall_ms=50.0), pairs=PAIRS, least=PAIRS)
    names = ("mean_ms", "median_ms", "p95_ms")
    rates = [_percent(100 * found.figures[name] / sessions) for name in names]
    return [
        f"A stall of 50 ms in every tenth step (5 % of the time), {PAIRS} pairs: percent of {sessions} sessions in",
        "which the figure's interval excludes 1.",
        "",
        *_table(("mean", "median", "p95"), [rates]),
    ]


def stopping_rule(sessions: int) -> list[str]:
    """The table of false verdicts by the pairs before the first look at the width."""
    rows: list[Row] = []
    for least in (3, 4, 5, 6):
        rates = [stopping_rates(least, spread, sessions, SEED + 3000 + n) for n, spread in enumerate(SPREADS)]
        worst = max(range(len(rates)), key=lambda index: rates[index][0])
        used = [f"{pairs:.1f}" for spread, (_, pairs) in zip(SPREADS, rates, strict=True) if spread in {0.01, 0.02}]
        rows.append((str(least), _percent(rates[worst][0]), f"{SPREADS[worst]:.2%}", *used))
    spreads = f"{SPREADS[0]:.1%} to {SPREADS[-1]:.0%}"
    return [
        f"The stopping rule and the mean alone, equal programs, normal spread between pairs of {spreads},",
        f"{sessions} sessions each:",
        f"the worst rate of false verdicts by the least number of pairs ({LEAST_PAIRS} is used).",
        "",
        *_table(("least pairs", "false, worst", "at a spread of", "pairs at 1 %", "pairs at 2 %"), rows),
    ]


def text(scale: float = 1.0) -> str:
    """The whole section; `scale` shrinks the number of sessions."""
    many, some, few = (max(20, round(count * scale)) for count in (2000, 1000, 200))
    null, false = equal_programs(many, few)
    power, rates = true_effect(some)
    parts = (null, power, stalls(few), stopping_rule(many), _against_limits(false, rates))
    return "\n".join(line for part in parts for line in (*part, "")).rstrip()


def _against_limits(false: float, rates: dict[tuple[float, int], tuple[float, float]]) -> list[str]:
    """Plainly: what holds on the default machine, and where else it does not."""
    holds = "holds" if false <= FALSE_LIMIT else "exceeds the limit"
    worst = f"at most {_percent(false)}; limit {FALSE_LIMIT:.0f} %: {holds}."
    lines = [
        f"- False verdicts on equal programs, ABBA, spikes of 30, 100 and 200 ms, both ways of ending pairs: {worst}"
    ]
    spikes, steps = DEFAULT
    machine = f"spikes of {spikes:.0f} ms, {steps} steps"
    for index, name in enumerate((f"with {PAIRS} pairs", "with pairs until narrow")):
        found = rates[DEFAULT][index]
        word = "holds" if found >= FOUND_LIMIT else "misses"
        missed = [case for case, rate in rates.items() if case != DEFAULT and rate[index] < FOUND_LIMIT]
        elsewhere = "; ".join(
            f"{_percent(rates[case][index])} at {case[0]:.0f} ms and {case[1]} steps" for case in missed
        )
        lines.append(
            f"- A true 3 % found {name}, {machine}: {_percent(found)}; limit {FOUND_LIMIT:.0f} %: {word}. "
            + (f"It does not hold elsewhere: {elsewhere}." if missed else "It holds for all lengths above.")
        )
    lines.append("- How long spikes are is not given where the noise was measured; the longer, the less can be found.")
    return lines


def _words(rates: Rates) -> str:
    said = ((NO_DIFFERENCE, "no difference larger than X"), (UNDECIDED, "undecided"))
    return ", ".join(f"{label} {_percent(100 * rates.words[word] / rates.sessions)}" for word, label in said)


def _percent(value: float) -> str:
    return f"{value:.1f} %"


def _table(head: Row, rows: Iterable[Row]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Simulates comparisons and counts the wrong ones.")
    parser.add_argument("--print", action="store_true", dest="only_print", help="do not write benchmarks/RESULTS.md")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of sessions (default 1)")
    options = parser.parse_args(arguments)
    started = time.process_time()
    section = text(options.scale)
    print(section)
    print(f"\n{time.process_time() - started:.0f} s of processor time")
    if options.only_print:
        return
    if "<!-- statistics:begin -->" not in results.RESULTS.read_text():
        results.RESULTS.write_text(results.RESULTS.read_text().rstrip() + "\n" + SECTION)
    how = f"Made with `python benchmarks/statistics.py`, seed {SEED}."
    results.put_between_markers(results.RESULTS, "statistics", f"{how}\n\n{section}")
