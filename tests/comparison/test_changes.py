"""What grew, shrank, came or went: rows of each kind, and what is too little to be a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from stepscope.analyze.views.trace_diff import DiffSide
from stepscope.comparison.changes import changes
from stepscope.comparison.profile import LOAD, Amount, Amounts, Profile, Thing, relative_to
from stepscope.model import Abstention, Diagnosis, Finding, Ignored, Place
from stepscope.model.comparison import Change
from tests.comparison.measures import measure
from tests.records import replace

UNTRACED = DiffSide("a", None, (), (), (), None, None)


def profile(**known: Any) -> Profile:
    return Profile(label="a", side="a", path="a", recorded=True, traced=UNTRACED, **known)


def compared(*pairs: tuple[Profile, Profile]) -> tuple[tuple[Change, ...], dict[str, str]]:
    """Rows, and why a kind has none, of runs whose mean step is 100 ms, so that half a millisecond is the floor."""
    return changes(pairs, [(measure(), measure())] * len(pairs), profiled=False)[:2]


def rows(field: str, *pairs: tuple[Any, Any]) -> list[Change]:
    """Of the kind that a field of profiles makes, without those that stayed the same."""
    found = compared(*((profile(**{field: one}), profile(**{field: other})) for one, other in pairs))[0]
    return [row for row in found if row.kind.startswith(field[:4]) and row.status != "same"]


def amounts(**values: float) -> Amounts:
    return {Thing(name): Amount(value) for name, value in values.items()}


def told(*pairs: tuple[Amounts, Amounts]) -> list[tuple[str, str]]:
    """Of functions; one that both sides have makes them known."""
    both = {Thing("both"): Amount(1.0)}
    found = rows("functions", *(({**one, **both}, {**other, **both}) for one, other in pairs))
    return [(row.name, row.status) for row in found]


def test_rows_say_what_grew_shrank_came_and_went_the_largest_difference_first() -> None:
    base, other = amounts(grew=10, shrank=20, same=30, gone=4), amounts(grew=13, shrank=12, same=30.2, new=5)
    assert told((base, other)) == [("shrank", "shrank"), ("new", "new"), ("gone", "gone"), ("grew", "grew")]
    new = next(row for row in rows("functions", (base, other)) if row.name == "new")
    assert (new.kind, new.baseline, new.candidate, new.difference, new.unit) == ("function", None, 5, 5, "ms per step")
    there = {row.name: row for row in rows("functions", (base, other))}
    back = {row.name: row for row in rows("functions", (other, base))}
    opposite = {"grew": "shrank", "shrank": "grew", "new": "gone", "gone": "new"}
    assert {
        name: replace(row, baseline=row.candidate, candidate=row.baseline, difference=-(row.difference or 0))
        for name, row in there.items()
    } == {name: replace(row, status=opposite[row.status]) for name, row in back.items()}


def sampled(value: float, samples: float) -> Amounts:
    return {Thing("a"): Amount(value, samples)}


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(amounts(a=1), amounts(a=1.4))], []),  # below the floor
        ([(amounts(a=1), amounts(a=1.6))], [("a", "grew")]),
        ([(amounts(a=100), amounts(a=104))], []),  # with one pair a small part of the amount is the same
        ([(amounts(a=100), amounts(a=106))], [("a", "grew")]),
        ([(sampled(2, 2), sampled(5, 5))], []),  # few samples show no difference
        ([(sampled(2, 200), sampled(5, 500))], [("a", "grew")]),
        ([({}, sampled(3, 3))], []),  # what was never seen on a side may have been missed
        ([({}, sampled(3, 60))], [("a", "new")]),
        # with three pairs what runs differ by decides
        ([(amounts(a=100 + n), amounts(a=102.05 + n - n * n / 20)) for n in (-1, 0, 1)], [("a", "grew")]),
        ([(amounts(a=100), amounts(a=value)) for value in (130, 90, 115)], []),
    ],
)
def test_what_is_enough_to_be_a_row(pairs: list[tuple[Amounts, Amounts]], expected: list[tuple[str, str]]) -> None:
    assert told(*pairs) == expected


def on(*places: tuple[str, int, float]) -> Amounts:
    return {Thing(name, "train.py", line): Amount(ms) for name, line, ms in places}


def test_a_function_whose_lines_all_moved_is_compared_as_a_whole() -> None:
    base, other = on(("load", 10, 4), ("load", 12, 4), ("main", 30, 1)), on(("load", 15, 2), ("main", 30, 5))
    assert [(row.name, row.line, row.difference) for row in rows("lines", (base, other))] == [
        ("load", None, -6),
        ("main", 30, 4),
    ]
    base, other = on(("load", 10, 4), ("load", 12, 4)), on(("load", 10, 4), ("load", 13, 8))
    assert [(row.line, row.status) for row in rows("lines", (base, other))] == [(13, "new"), (12, "gone")]


def test_files_are_named_alike_wherever_they_lie() -> None:
    ours, theirs = relative_to(("/home/a/project",)), relative_to(("/scratch/b/", "/scratch/b/src"))
    assert ours("/home/a/project/data/images.py") == theirs("/scratch/b/data/images.py") == "data/images.py"
    assert theirs("/scratch/b/src/train.py") == "train.py"
    installed = "/home/a/project/venv/lib/python3.11/site-packages/PIL/Image.py"
    assert ours(installed) == theirs("/usr/lib/python3/dist-packages/PIL/Image.py") == "PIL/Image.py"
    assert ours("/elsewhere/x.py") == "/elsewhere/x.py"


def finding(rule: str, cost: float, file: str = "/p/train.py", line: int = 7, function: str | None = "main") -> Finding:
    return Finding(
        id=rule,
        rule=rule,
        category="input",
        title=f"{rule} costs {cost} ms",
        severity="warning",
        confidence="high",
        cost_ms_per_step=cost,
        share=0.1,
        gain_ceiling=0.1,
        where=(Place(file, line, function),),
        evidence=(),
        fix="",
        falsified_by="",
    )


def judged(*found: Finding, abstained: tuple[Abstention, ...] = (), roots: tuple[str, ...] = ("/p",)) -> Profile:
    return profile(diagnosis=Diagnosis(found, abstained), roots=roots)


def findings(*pairs: tuple[Profile, Profile]) -> list[Change]:
    return [row for row in compared(*pairs)[0] if row.kind == "finding"]


def test_a_finding_is_the_same_one_where_only_its_line_or_its_folder_moved() -> None:
    base = judged(finding("a", 10, line=7), finding("a", 4, line=70, function="other"))
    other = judged(finding("a", 10, line=9), finding("a", 9, line=72, function="other"))
    assert [(row.status, row.line, row.difference) for row in findings((base, other))] == [("grew", 72, 5)]
    base = judged(finding("a", 10, file="/home/x/p/train.py"), roots=("/home/x/p",))
    other = judged(finding("a", 2, file="/mnt/q/train.py"), roots=("/mnt/q",))
    assert [(row.status, row.file) for row in findings((base, other))] == [("shrank", "train.py")]


def test_a_finding_of_a_rule_that_was_not_judged_there_is_neither_gone_nor_new() -> None:
    silent = judged(abstained=(Abstention("a", "sampled stacks"),))
    ignoring = profile(diagnosis=Diagnosis((), (), (Ignored("a", "known"),)))
    for side, why in ((silent, "sampled stacks"), (ignoring, "ignored: known")):
        for pair in ((judged(finding("a", 10)), side), (side, judged(finding("a", 10)))):
            assert findings(pair) == []
            assert compared(pair)[1]["finding a"] == why
    unused = judged(abstained=(Abstention("a", "a DataLoader", quiet=True),))
    assert [row.status for row in findings((judged(finding("a", 10)), unused))] == ["gone"]


def test_of_several_runs_more_than_half_have_to_show_a_finding() -> None:
    with_it, without = judged(finding("a", 9)), judged()
    assert findings((with_it, without), (without, without), (without, without)) == []
    (row,) = findings((with_it, without), (with_it, without), (without, without))
    assert (row.status, row.baseline) == ("gone", 9)


Texts = Mapping[str, str]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (
            [
                (
                    {"torch version": "2.1", "CPU": "x", "$OMP_NUM_THREADS": "4"},
                    {"torch version": "2.2", "CPU": "x", "knob gc": "off"},
                )
            ],
            [
                ("torch version", "2.1", "2.2", "changed"),
                ("$OMP_NUM_THREADS", "4", None, "gone"),
                ("knob gc", None, "off", "new"),
            ],
        ),
        ([({"CPU": "x", "threads of torch": "2"}, {"CPU": "x"})], []),  # not known is no difference
        ([({LOAD: "1.0"}, {LOAD: "1.4"})], []),  # less than a busy process
        ([({LOAD: "1.0"}, {LOAD: "9.0"})], [(LOAD, "1.0", "9.0", "changed")]),
        ([({"host": "a"}, {"host": "b"}), ({"host": "b"}, {"host": "a"})], []),  # varies alike on both sides
        ([({"host": "a"}, {"host": "a"}), ({"host": "b"}, {"host": "a"})], [("host", "a, b", "a", "changed")]),
    ],
)
def test_only_what_differs_in_the_environment_is_a_row(
    pairs: list[tuple[Texts, Texts]], expected: list[tuple[Any, ...]]
) -> None:
    found = rows("environment", *pairs)
    assert [(row.name, row.baseline, row.candidate, row.status) for row in found] == expected


def test_the_windows_are_told_whether_or_not_they_differ() -> None:
    base, other = (
        {"measured steps": "90", "traces hold": "host", "traces": "2"},
        {"measured steps": "40", "traces": "2"},
    )
    found = compared((profile(windows=base), profile(windows=other)))[0]
    assert [(row.name, row.status) for row in found if row.kind == "window"] == [
        ("measured steps", "changed"),
        ("traces hold", "gone"),
        ("traces", "same"),
    ]


@pytest.mark.parametrize(("after", "differences"), [({"GPU": 60.0}, [-30]), ({"GPU": 89.0}, []), ({}, [])])
def test_less_utilisation_is_a_figure_and_no_judgement(after: dict[str, float], differences: list[float]) -> None:
    assert [row.difference for row in rows("utilisation", ({"GPU": 90.0}, after))] == differences
