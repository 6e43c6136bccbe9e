"""What grew, shrank, came or went: rows of each kind, and what is too little to be a row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stepscope.analyze.views.trace_diff import DiffSide, diff
from stepscope.comparison import changes
from stepscope.comparison.changes import Judged, rows
from stepscope.comparison.profile import LOAD, Amount, Amounts, Thing, merged, relative_to
from stepscope.model import Abstention, Diagnosis, Finding, Ignored, Place
from stepscope.model.comparison import Change
from stepscope.model.views import Diff, DiffRow
from tests.records import replace

FLOOR = 0.5


def amounts(**values: float) -> Amounts:
    return {Thing(name): Amount(value) for name, value in values.items()}


def sampled(**values: tuple[float, float]) -> Amounts:
    return {Thing(name): Amount(value, samples) for name, (value, samples) in values.items()}


def told(*pairs: tuple[Amounts, Amounts], floor: float = FLOOR) -> list[tuple[str, str]]:
    return [(row.name, row.status) for row in rows("function", "ms per step", pairs, floor)]


# ------------------------------------------------------------------------------------------------------- amounts


def test_rows_say_what_grew_shrank_came_and_went_the_largest_difference_first() -> None:
    base = amounts(grew=10, shrank=20, same=30, gone=4)
    other = amounts(grew=13, shrank=12, same=30.2, new=5)
    assert told((base, other)) == [("shrank", "shrank"), ("new", "new"), ("gone", "gone"), ("grew", "grew")]


def test_a_row_holds_both_sides_and_none_where_a_side_has_nothing() -> None:
    (row,) = rows("kernel", "ms per step", [(amounts(), amounts(mm=5))], FLOOR)
    assert (row.kind, row.baseline, row.candidate, row.difference, row.unit) == ("kernel", None, 5, 5, "ms per step")


def test_less_than_the_floor_is_the_same() -> None:
    assert told((amounts(a=1), amounts(a=1.4))) == []
    assert told((amounts(a=1), amounts(a=1.6))) == [("a", "grew")]


def test_with_one_pair_a_small_part_of_the_amount_is_the_same() -> None:
    assert told((amounts(a=100), amounts(a=104))) == []
    assert told((amounts(a=100), amounts(a=106))) == [("a", "grew")]


def test_few_samples_show_no_difference() -> None:
    few = (sampled(a=(2.0, 2)), sampled(a=(5.0, 5)))
    many = (sampled(a=(2.0, 200)), sampled(a=(5.0, 500)))
    assert told(few) == []
    assert told(many) == [("a", "grew")]


def test_what_was_never_sampled_on_a_side_needs_samples_on_the_other_to_be_new() -> None:
    assert told(({}, sampled(a=(3.0, 3)))) == []
    assert told(({}, sampled(a=(3.0, 60)))) == [("a", "new")]


def test_with_three_pairs_what_runs_differ_by_decides() -> None:
    steady = [(amounts(a=100), amounts(a=102)), (amounts(a=101), amounts(a=103.1)), (amounts(a=99), amounts(a=100.9))]
    noisy = [(amounts(a=100), amounts(a=130)), (amounts(a=100), amounts(a=90)), (amounts(a=100), amounts(a=115))]
    assert told(*steady) == [("a", "grew")]
    assert told(*noisy) == []


def test_values_of_several_pairs_are_means_and_a_run_without_counts_as_nothing() -> None:
    pairs = [(amounts(a=10), amounts(a=30)), (amounts(), amounts(a=30)), (amounts(a=11), amounts(a=30))]
    (row,) = rows("function", "ms per step", pairs, FLOOR)
    assert (row.baseline, row.candidate) == (7, 30)


def test_equal_things_are_added_up() -> None:
    found = merged([(Thing("a"), Amount(1, 2)), (Thing("a"), Amount(3, 4)), (Thing("b"), Amount(1))])
    assert found == {Thing("a"): Amount(4, 6), Thing("b"): Amount(1)}


# --------------------------------------------------------------------------------------------------------- lines


def on(*places: tuple[str, int, float]) -> Amounts:
    return {Thing(name, "train.py", line): Amount(ms) for name, line, ms in places}


def test_a_function_whose_lines_all_moved_is_compared_as_a_whole() -> None:
    base, other = on(("load", 10, 4), ("load", 12, 4), ("main", 30, 1)), on(("load", 15, 2), ("main", 30, 5))
    found = changes.line_changes([(base, other)], [], FLOOR, shares=False)
    assert [(row.name, row.line, row.difference) for row in found] == [("load", None, -6), ("main", 30, 4)]


def test_a_function_that_keeps_some_lines_is_compared_line_by_line() -> None:
    base, other = on(("load", 10, 4), ("load", 12, 4)), on(("load", 10, 4), ("load", 13, 8))
    found = changes.line_changes([(base, other)], [], FLOOR, shares=False)
    assert [(row.line, row.status) for row in found] == [(13, "new"), (12, "gone")]


def test_files_are_named_alike_wherever_they_lie() -> None:
    ours, theirs = relative_to(("/home/a/project",)), relative_to(("/scratch/b/", "/scratch/b/src"))
    assert ours("/home/a/project/data/images.py") == theirs("/scratch/b/data/images.py") == "data/images.py"
    assert theirs("/scratch/b/src/train.py") == "train.py"
    installed = "/home/a/project/venv/lib/python3.11/site-packages/PIL/Image.py"
    assert ours(installed) == theirs("/usr/lib/python3/dist-packages/PIL/Image.py") == "PIL/Image.py"
    assert ours("/elsewhere/x.py") == "/elsewhere/x.py"


# -------------------------------------------------------------------------------------------------------- traces


def table_row(key: str, base: float | None, other: float | None) -> DiffRow:
    ns = [None if value is None else value * 1e6 for value in (base, other)]
    return DiffRow(key, 0, 1, 1, ns[0], ns[1], (ns[1] or 0) - (ns[0] or 0), None, None, None, None)


def found_in(overview: list[DiffRow], plugin: Sequence[DiffRow] = (), kernels: Sequence[DiffRow] = ()) -> Diff:
    tables = {"overview": tuple(overview), "tensorboard": tuple(plugin), "kernels": tuple(kernels)}
    return Diff("a", "b", True, {name: rows for name, rows in tables.items() if rows}, {}, ())


def test_parts_of_profiled_steps_leave_the_step_itself_out() -> None:
    diff = found_in([table_row("step", 100, 60), table_row("idle_data", 50, 1), table_row("compute", 40, 41)])
    found, note = changes.category_changes([diff], FLOOR)
    assert [(row.name, row.status) for row in found] == [("idle_data", "shrank")]
    assert note is None


def test_parts_of_host_and_device_are_not_mixed_and_the_plugins_stand_in() -> None:
    overview = [table_row("step", 100, 60), table_row("idle_data", 50, None), table_row("host_data", None, 1)]
    diff = found_in(overview, [table_row("step", 100, 60), table_row("DataLoader", 50, 1)])
    found, note = changes.category_changes([diff], FLOOR)
    assert [row.name for row in found] == ["DataLoader"]
    assert note is not None
    assert "TensorBoard" in note


def test_that_all_kernels_together_stayed_the_same_is_a_row() -> None:
    found = changes.kernel_changes([found_in([], kernels=[table_row("gemm", 40, 40.1), table_row("sum", 3, 3)])], FLOOR)
    assert [(row.name, row.status, row.baseline) for row in found] == [(changes.ALL_KERNELS, "same", 43)]


def test_kernels_that_neither_side_has_are_absent() -> None:
    empty = DiffSide("a", None, (), (), (), None, None)
    found = [diff(empty, empty)]
    assert changes.kernel_changes(found, FLOOR) == []
    assert "no work of a device" in (changes.why_absent(found, "kernels") or "")


# ------------------------------------------------------------------------------------------------------ findings


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


def judged(*found: Finding, abstained: tuple[Abstention, ...] = (), roots: tuple[str, ...] = ("/p",)) -> Judged:
    return Judged(Diagnosis(found, abstained), roots)


def statuses(found: list[Change]) -> list[tuple[str | None, str]]:
    return [(row.rule, row.status) for row in found]


def test_findings_go_come_and_cost_another_amount() -> None:
    base = judged(finding("a", 10), finding("b", 5), finding("c", 3))
    other = judged(finding("b", 8), finding("c", 3.01), finding("d", 1))
    found, absent = changes.finding_changes([base], [other], FLOOR)
    assert statuses(found) == [("a", "gone"), ("b", "grew"), ("d", "new")]
    assert absent == {}


def test_a_finding_is_the_same_one_where_only_its_line_moved() -> None:
    base = judged(finding("a", 10, line=7), finding("a", 4, line=70, function="other"))
    other = judged(finding("a", 10, line=9), finding("a", 9, line=72, function="other"))
    found, _ = changes.finding_changes([base], [other], FLOOR)
    assert [(row.status, row.line, row.difference) for row in found] == [("grew", 72, 5)]


def test_a_finding_in_the_same_project_elsewhere_is_the_same_one() -> None:
    base = judged(finding("a", 10, file="/home/x/p/train.py"), roots=("/home/x/p",))
    other = judged(finding("a", 2, file="/mnt/q/train.py"), roots=("/mnt/q",))
    found, _ = changes.finding_changes([base], [other], FLOOR)
    assert [(row.status, row.file) for row in found] == [("shrank", "train.py")]


def test_a_finding_of_a_rule_that_was_not_judged_there_is_neither_gone_nor_new() -> None:
    silent = judged(abstained=(Abstention("a", "sampled stacks"),))
    for sides in (([judged(finding("a", 10))], [silent]), ([silent], [judged(finding("a", 10))])):
        assert changes.finding_changes(*sides, FLOOR) == ([], {"a": "sampled stacks"})


def test_a_finding_of_a_rule_about_what_a_run_does_not_use_is_gone() -> None:
    unused = judged(abstained=(Abstention("a", "a DataLoader", quiet=True),))
    found, _ = changes.finding_changes([judged(finding("a", 10))], [unused], FLOOR)
    assert statuses(found) == [("a", "gone")]


def test_a_finding_that_configuration_ignores_on_a_side_is_not_judged_there() -> None:
    ignoring = Judged(Diagnosis((), (), (Ignored("a", "known"),)), ("/p",))
    assert changes.finding_changes([judged(finding("a", 10))], [ignoring], FLOOR) == ([], {"a": "ignored: known"})


def test_of_several_runs_more_than_half_have_to_show_a_finding() -> None:
    with_it, without = judged(finding("a", 9)), judged()
    assert changes.finding_changes([with_it, without, without], [without] * 3, FLOOR)[0] == []
    found, _ = changes.finding_changes([with_it, with_it, without], [without] * 3, FLOOR)
    assert [(row.status, row.baseline) for row in found] == [("gone", 9)]


# ---------------------------------------------------------------------------- environment, windows, utilisation


def test_only_what_differs_in_the_environment_is_a_row() -> None:
    before = {"torch version": "2.1", "CPU": "x", "$OMP_NUM_THREADS": "4"}
    after = {"torch version": "2.2", "CPU": "x", "knob loader.num_workers": "2"}
    found = [
        (row.name, row.baseline, row.candidate, row.status) for row in changes.environment_changes([before], [after])
    ]
    assert found == [
        ("torch version", "2.1", "2.2", "changed"),
        ("$OMP_NUM_THREADS", "4", None, "gone"),
        ("knob loader.num_workers", None, "2", "new"),
    ]


def test_what_is_not_known_of_a_side_is_no_difference() -> None:
    assert changes.environment_changes([{"CPU": "x", "threads of torch": "2"}], [{"CPU": "x"}]) == []


@pytest.mark.parametrize(("after", "differs"), [("1.4", False), ("9.0", True)])
def test_the_load_differs_only_by_a_busy_process_or_more(after: str, differs: bool) -> None:
    found = changes.environment_changes([{LOAD: "1.0"}], [{LOAD: after}])
    assert bool(found) == differs


def test_a_value_that_varies_alike_on_both_sides_is_no_difference() -> None:
    assert changes.environment_changes([{"host": "a"}, {"host": "b"}], [{"host": "b"}, {"host": "a"}]) == []
    (row,) = changes.environment_changes([{"host": "a"}, {"host": "b"}], [{"host": "a"}, {"host": "a"}])
    assert (row.baseline, row.candidate) == ("a, b", "a")


def test_the_windows_are_told_whether_or_not_they_differ() -> None:
    found = changes.window_changes([{"measured steps": "90", "traces hold": "host"}], [{"measured steps": "40"}])
    assert [(row.name, row.status) for row in found] == [("measured steps", "changed"), ("traces hold", "gone")]


def test_less_utilisation_is_a_figure_and_no_judgement() -> None:
    found = changes.utilisation_changes([{"GPU utilisation": 90.0}], [{"GPU utilisation": 60.0}])
    assert [(row.kind, row.status, row.difference) for row in found] == [("utilisation", "shrank", -30)]
    assert changes.utilisation_changes([{"GPU utilisation": 90.0}], [{"GPU utilisation": 89.0}]) == []
    assert changes.utilisation_changes([{"GPU utilisation": 90.0}], [{}]) == []


def test_a_change_is_the_same_whatever_the_order_of_its_things() -> None:
    base, other = amounts(a=1, b=2, c=3), amounts(c=9, b=8, a=7)
    backwards = dict(reversed(list(other.items())))
    assert rows("line", "ms", [(base, other)], 0.1) == rows("line", "ms", [(base, backwards)], 0.1)


def test_a_difference_turned_round_is_its_opposite() -> None:
    base, other = amounts(a=1, b=20, gone=3), amounts(a=9, b=2, new=4)
    there = {row.name: row for row in rows("line", "ms", [(base, other)], 0.1)}
    back = {row.name: row for row in rows("line", "ms", [(other, base)], 0.1)}
    opposite = {"grew": "shrank", "shrank": "grew", "new": "gone", "gone": "new"}
    assert {
        name: replace(row, baseline=row.candidate, candidate=row.baseline, difference=-(row.difference or 0))
        for name, row in there.items()
    } == {name: replace(row, status=opposite[row.status]) for name, row in back.items()}
