"""The bottleneck zoo: its table fits its scripts, and a report is judged as the table says. No script is run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ZOO = BENCHMARKS / "zoo"
CATEGORIES = set(re.findall(r"\w+", "input host sync launch compute memory transfer communication compile io system"))
# Modules of the zoo that are no script of it.
MACHINERY = {
    *("common", "fixes", "launch", "perceptron", "planted", "run", "score", "table", "traceml_peer", "zoo_report")
}
SCRIPT = """
def fetch(path):
    return decode(
        path,
    )  {0}


@compiled(dynamic=False)  {1}
def forward(x):
    return x


def main():
    for batch in loader:
        with watch.step(model):
            for item in batch:  {2}
                count(item)
            forward(batch)
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not ZOO.is_dir():
        pytest.skip("the benchmarks are not here")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(ZOO))
    return importlib.import_module


def test_every_entry_has_its_script_and_every_script_its_entry(load: Any) -> None:
    names = [entry.name for entry in load("table").ENTRIES]
    assert len(names) == len(set(names))
    assert set(names) == {path.stem for path in ZOO.glob("*.py")} - MACHINERY


def test_there_are_enough_scripts_of_each_kind(load: Any) -> None:
    entries = load("table").ENTRIES
    assert len(entries) >= 24
    assert sum(entry.clean for entry in entries) >= 5
    assert sum(entry.ranks > 1 and not entry.clean for entry in entries) >= 4
    assert sum(entry.needs is not None and entry.clean for entry in entries) >= 6
    assert sum(entry.needs is not None and not entry.clean for entry in entries) >= 6


def test_a_script_says_which_framework_it_needs(load: Any) -> None:
    frameworks = {name for loop in load("tests.frameworks.catalogue").ALL for name in loop.needs}
    for entry in load("table").ENTRIES:
        imported = set(re.findall(r"^(?:from|import) (\w+)", entry.script.read_text(), re.MULTILINE))
        assert imported & frameworks == ({entry.needs} if entry.needs else set()), entry.name


def test_every_planted_line_is_there_and_no_clean_script_has_one(load: Any) -> None:
    find = load("planted").find
    for entry in load("table").ENTRIES:
        if entry.clean:
            assert "planted" not in entry.script.read_text(), entry.name
            continue
        assert find(entry.script).file == entry.script
        assert set(entry.expected) <= CATEGORIES, entry.name


@pytest.mark.parametrize(
    ("marked", "named", "right"),
    [
        (0, (5, "fetch"), True),
        (0, (3, "fetch"), True),  # the function of the planted line
        (0, (12, "main"), False),
        (1, (9, "forward"), True),  # told by the `def` instead of by the decorator
        (1, (10, "Model.forward"), True),
        (2, (16, "main"), True),  # within the planted loop
        (2, (14, "main"), False),  # the training loop's function alone is no answer
        (2, (None, "main"), False),
    ],
)
def test_what_names_the_planted_line(
    load: Any, tmp_path: Path, marked: int, named: tuple[int | None, str], right: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(*("# planted" if number == marked else "" for number in range(3))))
    planted = load("planted").find(script)
    assert planted.is_named_by(str(script), *named) is right
    assert not planted.is_named_by(str(tmp_path / "other.py"), *named)


def finding(category: str, share: float, ceiling: float, line: int = 1) -> dict[str, Any]:
    where = [{"file": "decode_png.py", "line": line, "function": "f"}]
    cost = {"cost_ms_per_step": share * 10, "share": share, "gain_ceiling": ceiling}
    return {"rule": f"{category}.rule", "category": category, "where": where, **cost}


def test_a_ceiling_must_reach_the_gain_less_its_interval(load: Any) -> None:
    score, entry = load("score"), load("table").ENTRIES[0]
    planted = load("planted").find(entry.script)
    measured = score.gain([(10.0, 6.0), (10.0, 5.0), (10.0, 4.0)])
    assert (measured.low, measured.median, measured.high) == (0.4, 0.5, 0.6)
    for ceiling, holds in ((0.39, False), (0.45, True), (0.7, True)):
        report = {"findings": [finding("input", 0.3, ceiling, planted.first_line)]}
        judged = score.score(entry, report, planted, measured)
        assert (judged.category, judged.line, judged.ceiling_holds) == (True, True, holds)
        assert judged.excess_points == pytest.approx((ceiling - 0.5) * 100)


def test_the_first_finding_is_the_one_with_the_highest_cost(load: Any) -> None:
    score, entry = load("score"), load("table").ENTRIES[0]
    planted = load("planted").find(entry.script)
    report = {"findings": [finding("input", 0.2, 0.2, planted.first_line), finding("io", 0.3, 0.3)]}
    judged = score.score(entry, report, planted, None)
    assert (judged.first.category, judged.category, judged.line) == ("io", False, False)
    assert judged.ceiling == 0.2


def test_on_a_clean_script_only_compute_may_be_large(load: Any) -> None:
    score = load("score")
    entry = next(entry for entry in load("table").ENTRIES if entry.clean)
    findings = [finding("compute", 0.4, 0.4), finding("host", 0.11, 0.11), finding("io", 0.09, 0.09)]
    judged = score.score(entry, {"findings": findings}, None, None)
    assert [alarm.category for alarm in judged.alarms] == ["host"]
