"""Scores the verdict over many ranks on simulated runs whose truth is known, and writes its sections of RESULTS.md.

    python benchmarks/ranks.py [scale] [accuracy] [healthy] [large] [clocks] [--quick] [--only NAME...] [--keep DIR]

`scale` judges 250 and 1,000 ranks of 10,000 steps, each in a process of its own. `accuracy` counts who is blamed, for
what, and at which cost, in runs with each planted cause, `healthy` who is where nothing is planted; `large` both at
1,000 ranks. `clocks` compares offsets, rates and bounds of hosts' clocks. What is judged comes from the public call
alone; `ranks_simulated` shares nothing with it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import results
from ranks_simulated import simulate
from ranks_simulated.scenario import PLANTS, Clocks, Plant, Scenario
from ranks_simulated.tables import truth_file

from stepscope.analyze.ranks import judge
from stepscope.model.ranks import NOT_ENOUGH, HostClock, RanksVerdict, Straggler
from stepscope.tables.reduced import load, reduced_folder

LAYOUTS = ("dp", "fsdp", "hsdp", "3d")
LEAST_SHARE = 0.05  # of the step that a cause must cost to be held against the limits
ON_A_NODE = ("rank", "host", "link")
_ON_ONE = ("slow_gpu", "slow_host", "thermal", "slow_data", "python_line", "other_processes", "allocator_retries")
# Layouts of causes that the others cannot have, or do not show: a group of all ranks has no other to compare it with.
_ELSEWHERE = {"heavy_stage": ("3d",), "slow_link": ("hsdp", "3d")}
_SCALE = """
import resource, sys, time
begun = time.perf_counter(), time.process_time()
from pathlib import Path
from stepscope.analyze.ranks import judge
from stepscope.tables.reduced import load
verdict = judge(load(Path(sys.argv[1])))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(time.perf_counter() - begun[0], time.process_time() - begun[1], peak, verdict.verdict, verdict.ranks)
"""


@dataclass(frozen=True)
class Judged:
    """A run's scenario, its truth and what was said of it."""

    scenario: Scenario
    truth: dict[str, Any]
    verdict: RanksVerdict

    @property
    def first(self) -> Straggler | None:
        return self.verdict.stragglers[0] if self.verdict.stragglers else None

    @property
    def planted(self) -> dict[str, Any]:
        return self.truth["plants"][0]

    def found(self) -> bool:
        """Whether the first straggler is the planted one."""
        first, planted = self.first, self.planted
        kind = "none" if first is None else first.kind
        if kind not in planted["kinds"] or first is None:
            return kind in planted["kinds"]
        same = {
            "rank": list(first.ranks) == planted["ranks"],
            "host": list(first.hosts) == planted["hosts"],
            "link": first.group in planted["groups"] or bool(set(first.hosts) & set(planted["hosts"])),
            "stage": first.stage == planted["stage"],
        }
        return same.get(kind, True)

    def explained(self) -> bool:
        if self.first is None:
            return "none" in self.planted["kinds"]
        return self.first.cause in self.planted["causes"]

    def wrong(self) -> bool:
        if not self.truth["plants"]:
            return bool(self.verdict.stragglers)
        return self.planted["loss_share"] >= LEAST_SHARE and not (self.found() and self.explained())

    def cost_error(self) -> float | None:
        """Relative to the loss by playing the run without its cause."""
        return None if self.first is None else self.first.cost_ms / self.planted["loss_ms"] - 1


def judged(scenario: Scenario, keep: Path | None = None) -> Judged:
    """Simulate a run, judge it, and remove it; `keep`: but for one that is judged wrongly."""
    with tempfile.TemporaryDirectory(prefix="stepscope-ranks-") as folder:
        run = Path(folder) / "run"
        run.mkdir()
        simulate(scenario, run)
        each = Judged(scenario, json.loads(truth_file(run).read_text()), judge(load(run / "reduced")))
        if keep is not None and each.wrong():
            kept = keep / f"{scenario.layout}-{scenario.seed}"
            shutil.copytree(run, kept, dirs_exist_ok=True)
            shutil.copy(truth_file(run), truth_file(kept))
        return each


def _all(scenarios: Sequence[Scenario], args: argparse.Namespace) -> Iterator[Judged]:
    one = functools.partial(judged, keep=args.keep)
    if args.workers == 1:
        yield from map(one, scenarios)
        return
    with ProcessPoolExecutor(args.workers) as pool:
        yield from pool.map(one, scenarios, chunksize=4)


def _hard_clocks(seed: int) -> Clocks:
    """Of any jitter that was measured on real clusters."""
    rng = np.random.default_rng([seed, 11])
    return Clocks(
        slews=float(rng.choice([0.0, 0.3, 0.6])),
        step_ms=float(rng.choice([0.0, 5.0])),
        rank_jitter_us=float(rng.uniform(5, 15)),
        host_jitter_us=float(rng.uniform(20, 60)),
        wave_ms=float(rng.uniform(0.3, 3)),
    )


def planted_scenarios(sizes: Sequence[float], seeds: int, missing: Sequence[float], **settings: Any) -> list[Scenario]:
    """Each cause in each layout that can have it, recorded and not, with all ranks there and with some missing."""
    found = []
    cases = [(name, layout) for name in PLANTS for layout in _ELSEWHERE.get(name, LAYOUTS)]
    for (name, layout), size, _ in itertools.product(cases, sizes, range(seeds)):
        seed = len(found) + 1
        share = missing[(len(found) + len(found) // len(sizes)) % len(missing)]
        rng = np.random.default_rng(seed)
        plant = Plant(name, size, recorded=bool(rng.random() < 0.75))
        if name == "slow_link" and rng.random() < 0.5:
            plant = replace(plant, host=int(rng.integers(8)))
        given = {
            "layout": layout,
            "steps": 600,
            "plants": (plant,),
            "missing": share,
            "whole_hosts": bool(rng.random() < 0.5),
            "clocks": _hard_clocks(seed),
            "places_told": bool(rng.random() < 0.5),
            "tp": int(rng.choice([4, 8])),
            "pp": int(rng.choice([2, 4])),
            "seed": seed,
        }
        found.append(Scenario(**{**given, **settings}))
    return found


def healthy_scenarios(runs: int) -> list[Scenario]:
    return [
        Scenario(
            layout=LAYOUTS[number % 4],
            steps=600,
            missing=(0.0, 0.01, 0.1)[number // 4 % 3],
            whole_hosts=number % 2 == 0,
            clocks=_hard_clocks(number),
            places_told=number % 3 > 0,
            tp=8 if number % 8 < 4 else 4,
            pp=4 if number % 16 < 8 else 2,
            seed=900_000 + number,
        )
        for number in range(runs)
    ]


HEAD = (
    "| planted | runs | costs >= 5 % of the step | found | cause, recorded | else unknown | blamed on a node "
    "| cost: median error | within 10 % |",
    "|---|---|---|---|---|---|---|---|---|",
)


def accuracy(args: argparse.Namespace) -> str:
    sizes, seeds, missing = ((0.1,), 1, (0.0, 0.1)) if args.quick else ((0.06, 0.12, 0.3), args.runs, (0.0, 0.01, 0.1))

    def rows_of(wanted: list[Scenario]) -> list[Judged]:
        wanted = [scenario for scenario in wanted if not args.only or scenario.plants[0].name in args.only]
        return list(_watched(_all(wanted, args), len(wanted)))

    rows = rows_of(planted_scenarios(sizes, seeds, missing))
    lines = [*HEAD, *(_row(name, [each for each in rows if name in (each.planted["name"], "all")]) for name in
                      (*PLANTS, "all"))]  # fmt: skip
    lines += [_row(f"all, {share:.0%} missing", [each for each in rows if each.scenario.missing == share])
              for share in missing]  # fmt: skip
    lines.append(_row("all, hosts launch ahead", rows_of(planted_scenarios((0.1,), 1, (0.0,), ahead=True))))
    elsewhere = [
        each for each in rows
        if each.planted["name"] in ("heavy_stage", "sequence_length") and each.planted["loss_share"] >= LEAST_SHARE
    ]  # fmt: skip
    lines += ["", *_of_all(rows)]
    lines += [f"Stage imbalance and sequence length blamed on a node: {sum(map(_on_node, elsewhere))} of "
              f"{len(elsewhere)} (limit 1 %)."]  # fmt: skip
    return "\n".join(lines)


def _of_all(rows: list[Judged]) -> list[str]:
    """Who is found, by whether what tells the cause was recorded, and what is said where nobody is."""
    large = [each for each in rows if each.planted["loss_share"] >= LEAST_SHARE]
    missed = [each for each in large if not each.found()]
    unsaid = sum(each.verdict.verdict == NOT_ENOUGH for each in missed)
    return [
        f"Found where what tells the cause was recorded: {_share(each.found() for each in large if _told(each))}, "
        f"where it was not: {_share(each.found() for each in large if not _told(each))} (limit 95 % of all). Of the "
        f"{len(missed)} that were not found, {unsaid} were said to be not enough data.",
        "",
    ]


def _told(each: Judged) -> bool:
    return bool(each.planted["recorded"])


def healthy(args: argparse.Namespace) -> str:
    """Nobody is to blame: in runs where nothing is planted, and in those where whoever is was not recorded."""
    wanted = healthy_scenarios(20 if args.quick else 200)
    blamed = [each for each in _all(wanted, args) if each.verdict.stragglers]
    absent = [scenario for scenario in planted_scenarios((0.2,), 1, (0.05,), culprit_missing=True)
              if scenario.plants[0].name in _ON_ONE]  # fmt: skip
    lost = list(_all(absent, args))
    others = [each for each in lost if _on_node(each)]
    unsaid = sum(each.verdict.verdict == NOT_ENOUGH for each in lost)
    for each in (*blamed, *others):
        print("  blamed:", _words(each), file=sys.stderr)
    return (
        f"Healthy runs in which somebody is blamed: {len(blamed)} of {len(wanted)} (limit 1 %). Where the planted rank "
        f"or host itself is missing, another one is blamed in {len(others)} of {len(absent)}; {unsaid} are said to be "
        f"not enough data, in the others no group tells that it waits for one that is not there."
    )


def large(args: argparse.Namespace) -> str:
    """1,000 ranks, 400 steps."""
    wanted = [
        replace(scenario, hosts=125, tp=8, pp=5, steps=400, windows=2)
        for scenario in planted_scenarios((0.15,), 1, (0.01,))
        if scenario.layout == "3d" or (scenario.layout == "fsdp" and not args.quick)
    ]
    wanted = [scenario for scenario in wanted if not args.only or scenario.plants[0].name in args.only]
    rows = list(_watched(_all(wanted, args), len(wanted)))
    sound = [replace(scenario, hosts=125, tp=8, pp=5, steps=400, windows=2)
             for scenario in healthy_scenarios(2 if args.quick else 8)]  # fmt: skip
    blamed = [each for each in _all(sound, args) if each.verdict.stragglers]
    lines = [*HEAD, *(_row(f"1,000 ranks, {layout}", [each for each in rows if each.scenario.layout == layout])
                      for layout in LAYOUTS), _row("1,000 ranks", rows)]  # fmt: skip
    return "\n".join([*lines, "", f"Healthy runs in which somebody is blamed: {len(blamed)} of {len(sound)}."])


def _watched(found: Iterable[Judged], count: int) -> Iterator[Judged]:
    for number, each in enumerate(found):
        if each.wrong():
            print("  wrong:", _words(each), file=sys.stderr)
        if number % 50 == 49:
            print(f"{number + 1} of {count}", file=sys.stderr)
        yield each


def _words(each: Judged) -> str:
    scenario, first = each.scenario, each.first
    said = each.verdict.verdict if first is None else f"{first.kind} {first.ranks[:4]} {first.hosts[:2]} {first.cause}"
    cost = 0.0 if first is None else first.cost_ms
    planted = each.truth["plants"]
    true = "healthy" if not planted else (
        f"{planted[0]['name']}:{planted[0]['size']} {planted[0]['ranks'][:1]} {planted[0]['hosts'][:1]} "
        f"loses {planted[0]['loss_ms']:.1f} recorded {planted[0]['recorded']}"
    )  # fmt: skip
    return (
        f"{scenario.layout} seed {scenario.seed} missing {scenario.missing} places {scenario.places_told}: {true}; "
        f"said {said}, {cost:.1f} ms; {each.verdict.reason[:90]}"
    )


def _on_node(each: Judged) -> bool:
    return any(straggler.kind in ON_A_NODE for straggler in each.verdict.stragglers)


def _row(name: str, rows: list[Judged]) -> str:
    large = [each for each in rows if each.planted["loss_share"] >= LEAST_SHARE]
    found = [each for each in large if each.found()]
    errors = [abs(error) for each in found if (error := each.cost_error()) is not None]
    told, untold = ([each for each in large if _told(each) is wanted] for wanted in (True, False))
    return (
        f"| {name} | {len(rows)} | {len(large)} | {_share(each.found() for each in large)} "
        f"| {_share(each.explained() for each in told)} | {_share(each.explained() for each in untold)} "
        f"| {_share(_on_node(each) for each in large)} "
        f"| {f'{statistics.median(errors):.1%}' if errors else '–'} | {_share(error <= 0.1 for error in errors)} |"
    )


def _share(outcomes: Iterable[bool]) -> str:
    known = list(outcomes)
    return f"{sum(known) / len(known):.1%} of {len(known)}" if known else "–"


@dataclass
class ClockErrors:
    offsets: list[float]  # microseconds, of the bounded ones
    inside: list[bool]
    bounds: list[float]
    rates: list[float]  # ppm
    silent: int = 0  # hosts and windows without an offset


def _by_window(each: Judged) -> dict[tuple[str, int], HostClock]:
    """By host and true window: a step of evaluation at its begin does not count as its first."""
    starts = each.scenario.window_starts()
    return {
        (clock.host, min(starts, key=lambda start: abs(start - clock.window))): clock for clock in each.verdict.clocks
    }


def clock_errors(each: Judged, into: ClockErrors) -> None:
    """Errors against the reference host: the one whose offset is told as exactly 0."""
    said = _by_window(each)
    true = {(row["host"], row["window"]): row for row in each.truth["clocks"]}
    for window in sorted({window for _, window in said}):
        rows = [(clock, true[host, window]) for (host, at), clock in said.items() if at == window]
        known = [(clock, row) for clock, row in rows if clock.offset_us is not None]
        into.silent += len(rows) - len(known)
        zero = [row for clock, row in known if clock.offset_us == 0]
        if not known:
            continue
        reference = zero[0] if zero else known[0][1]
        stated = 0.0 if zero else known[0][0].offset_us or 0.0
        for clock, row in known:
            if row is reference:
                continue
            error = (clock.offset_us or 0.0) - stated - (row["offset_us"] - reference["offset_us"])
            into.offsets.append(abs(error))
            into.bounds.append(clock.bound_us or 0.0)
            into.inside.append(clock.bound_us is not None and abs(error) <= clock.bound_us)
            if clock.rate_ppm is not None and not row["changes"] and not reference["changes"]:
                into.rates.append(abs(clock.rate_ppm - (row["rate_ppm"] - reference["rate_ppm"])))


def found_steps(each: Judged) -> list[bool]:
    """Of each clock that was set: whether the offsets told around the window in which it was jump by as much.

    What the clock's rate makes of the time between two windows is taken from the truth: a set clock stands out from it.
    """
    outcomes = []
    said = {key: clock.offset_us for key, clock in _by_window(each).items()}
    for _, group in itertools.groupby(each.truth["clocks"], key=lambda row: row["host"]):
        for before, after in itertools.pairwise(group):
            if len(after["set_us"]) == len(before["set_us"]):
                continue
            told = [said.get((row["host"], row["window"])) for row in (before, after)]
            if told[0] is None or told[1] is None:
                outcomes.append(False)
                continue
            others = _reference_moved(each, before["window"], after["window"])
            moved, true = told[1] - told[0], after["offset_us"] - before["offset_us"] - others
            outcomes.append(abs(moved - true) < 500)
    return outcomes


def _reference_moved(each: Judged, before: int, after: int) -> float:
    """How far the true offset of the host that the verdict takes as reference moved between two windows."""
    zero = {clock.host for clock in each.verdict.clocks if clock.offset_us == 0}
    true = {(row["host"], row["window"]): row["offset_us"] for row in each.truth["clocks"]}
    return next((true[host, after] - true[host, before] for host in sorted(zero)), 0.0)


def clocks(args: argparse.Namespace) -> str:
    runs = 8 if args.quick else 48
    scenarios = [
        Scenario(
            hosts=8 if number % 3 else 16,
            layout=LAYOUTS[number % 4],
            steps=900,
            windows=4,
            missing=(0.0, 0.1)[number % 2],
            clocks=_hard_clocks(number),
            small_calls=number % 8 < 7,
            seed=700_000 + number,
        )
        for number in range(runs)
    ]
    lines = [
        "| layout | hosts and windows | no offset | error p50 | p99 | inside the bound | bound p50 | rate p50 | p95 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    everything = list(_all(scenarios, args))
    without = "large collectives alone"
    for layout in (*LAYOUTS, "all", without):
        errors = ClockErrors([], [], [], [])
        for each in everything:
            if layout in (each.scenario.layout, "all") if each.scenario.small_calls else layout == without:
                clock_errors(each, errors)
        if not errors.offsets:
            lines.append(f"| {layout} | 0 | {errors.silent} | – | – | – | – | – | – |")
            continue
        p50, p99 = np.quantile(errors.offsets, (0.5, 0.99))
        rates = [f"{value:.3f} ppm" for value in np.quantile(errors.rates, (0.5, 0.95))] if errors.rates else ["–", "–"]
        lines.append(
            f"| {layout} | {len(errors.offsets)} | {errors.silent} | {p50:.1f} µs | {p99:.1f} µs "
            f"| {_share(errors.inside)} | {statistics.median(errors.bounds):.1f} µs | {rates[0]} | {rates[1]} |"
        )
    set_clocks = [found for each in everything for found in found_steps(each)]
    lines += ["", f"Clocks that were set by 5 ms: found to within a window {_share(set_clocks)}."]
    return "\n".join(lines)


def scale(args: argparse.Namespace) -> str:
    steps = 1000 if args.quick else 10_000
    lines = [
        "| ranks | steps | simulated in | size | files of a host | verdict: wall | processor | peak | said |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    took = {}
    for ranks, hosts, pp in ((250, 30, 5), (1000, 125, 5)):
        scenario = Scenario(
            hosts=hosts, layout="3d", tp=8, pp=pp, steps=steps, windows=4, plants=(Plant("slow_gpu", 0.1),), seed=26
        )
        folder = args.keep / f"{ranks}" if args.keep else Path(tempfile.mkdtemp(prefix="stepscope-ranks-"))
        if not reduced_folder(folder):
            folder.mkdir(parents=True, exist_ok=True)
            begun = time.process_time()
            simulate(scenario, folder)
            made = f"{time.process_time() - begun:.0f} s"
        else:
            made = "–"
        files = list((folder / "reduced").rglob("*.*"))
        size = sum(path.stat().st_size for path in files if path.is_file()) / 1e6
        out = [
            subprocess.run(
                [sys.executable, "-c", _SCALE, str(folder / "reduced")], check=True, capture_output=True, text=True
            ).stdout.split()
            for _ in range(3)
        ]
        wall, processor, peak = (min(float(each[number]) for each in out) for number in range(3))
        took[ranks] = processor / scenario.ranks
        per_host = len([path for path in (folder / "reduced" / "host-node000").iterdir() if path.is_file()])
        lines.append(
            f"| {scenario.ranks} | {steps:,} | {made} | {size:.0f} MB | {per_host} | {wall:.1f} s | {processor:.1f} s "
            f"| {peak:.0f} MB | {out[0][3]} |"
        )
        if not args.keep:
            shutil.rmtree(folder)
    lines += ["", f"Processor time from 240 to 1,000 ranks, by rank: x {took[1000] / took[250]:.2f}, so x "
              f"{took[1000] / took[250] * 4:.2f} for four times the ranks (limit 4.5)."]  # fmt: skip
    return "\n".join(lines)


PARTS = {"scale": scale, "accuracy": accuracy, "healthy": healthy, "large": large, "clocks": clocks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="all where none is named")
    parser.add_argument("--quick", action="store_true", help="few and small runs; writes nothing")
    parser.add_argument("--dry", action="store_true", help="writes nothing")
    parser.add_argument("--runs", type=int, default=2, help="seeds of each planted scenario")
    parser.add_argument("--only", nargs="*", default=[], choices=PLANTS, help="these causes alone; writes nothing")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--keep", type=Path, help="for runs of `scale`, taken from there again, and those judged wrongly"
    )
    args = parser.parse_args()
    for name in args.parts or PARTS:
        before = results.machine("stepscope", "numpy", "polars")
        text = PARTS[name](args)
        print(text)
        if not (args.quick or args.only or args.dry):
            told = ", ".join(f"{key} {value}" for key, value in before.items())
            results.put_between_markers(results.RESULTS, f"ranks-{name}", f"{told}.\n\n{text}")


if __name__ == "__main__":
    main()
