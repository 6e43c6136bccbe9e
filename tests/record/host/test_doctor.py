"""Doctor's facts: which processors to pin to, and what each finding is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.record.host.doctor import (
    frequency_check,
    pinned_cpus,
    processors_check,
    stacks_check,
    torch_check,
)
from stepscope.record.host.hardware import Cgroups
from stepscope.record.host.pyspy import Rights, rights

PAIRS = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("allowed", "cores", "limit", "expected"),
    [
        (range(8), PAIRS, None, [1, 2, 3, 5, 6, 7]),  # one whole core is left to the system
        (range(8), PAIRS, 2.5, [1, 2, 5, 6]),
        ([0, 1, 4], [[0, 4], [1]], None, [0, 4]),  # 5, the sibling of 1, belongs to somebody else
        ([1, 2], [[1], [2]], None, [1, 2]),
        ([0, 1], [[0], [1]], 0.5, [0]),
    ],
)
def test_pinning_takes_whole_cores(
    allowed: list[int], cores: list[list[int]], limit: float | None, expected: list[int]
) -> None:
    assert pinned_cpus(allowed, cores, limit, PAIRS) == expected


def test_a_refusal_says_what_it_costs_and_how_to_lift_it() -> None:
    container = stacks_check("0.4.3", "Permission denied", Rights(0, 0, False, 1))
    assert container.state == "limited"
    assert "--cap-add SYS_PTRACE" in container.remedy
    assert container.cost
    locked = stacks_check("0.4.3", "Permission denied", Rights(0, 0, False, 3))
    assert "ptrace_scope=1" in locked.remedy
    assert stacks_check(None, None, Rights(0, 0, None, None)).state == "missing"
    assert stacks_check("0.4.3", None, Rights(0, 0, None, 0)).state == "ok"


def test_other_checks() -> None:
    assert frequency_check("performance", True).state == "ok"
    assert frequency_check("powersave", None).remedy
    assert frequency_check(None, None).state == "unknown"
    assert torch_check({"python": "python", "problem": "no torch"}).state == "missing"
    build = {"python": "python", "python_version": "3.11.7", "version": "2.9.0", "threads": 2}
    assert torch_check(build | {"activities": ["CPU"]}).state == "ok"
    assert torch_check(build | {"activities": []}).state == "limited"
    assert processors_check([0, 1], [0, 1], Cgroups(None, (), ())).state == "ok"


def test_rights_are_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    assert (rights(1, tmp_path).capability, rights(1, tmp_path).yama) == (None, None)
    for effective, capability in (
        ("CapPrm:\t0\nCapEff:\t0000000000080000\n", True),
        ("CapEff:\t000001fffff7ffff\n", False),
    ):
        (tmp_path / "proc" / "self" / "status").write_text(effective)
        assert rights(1, tmp_path).capability is capability
