"""Limits and processors of machines other than this one, from copies of what a kernel shows; what the doctor says."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.record.host import hardware
from stepscope.record.host.doctor import (
    frequency_check,
    pinned_cpus,
    processors_check,
    stacks_check,
    torch_check,
)
from stepscope.record.host.hardware import (
    Cgroups,
    find_cgroups,
    hardware_facts,
    noise_facts,
    parse_cpu_list,
    sibling_groups,
)
from stepscope.record.host.pyspy import Rights, rights


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


VERSION_2 = {
    "proc/self/cgroup": "0::/pod/box",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory",
    "sys/fs/cgroup/pod/cpu.max": "150000 100000",
    "sys/fs/cgroup/pod/memory.max": "max",
    "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
    "sys/fs/cgroup/pod/box/memory.max": "1073741824",
    "sys/fs/cgroup/pod/box/cpu.stat": "usage_usec 5\nthrottled_usec 7",
    "sys/fs/cgroup/pod/box/memory.events": "low 0\noom 3\noom_kill 2",
    "sys/fs/cgroup/pod/box/cpu.pressure": "some avg10=1.50 avg60=0 avg300=0 total=1",
}
VERSION_1 = {  # at a path that only the host has
    "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_throttled 1\nthrottled_time 9",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\noom_kill 1",
}


@pytest.mark.parametrize(
    ("files", "expected", "pressure"),
    [
        (VERSION_2, (2, 1.5, 1 << 30, 7000, 2), "sys/fs/cgroup/pod/box/cpu.pressure"),
        (VERSION_1, (1, 0.5, None, 9, 1), None),
        ({}, (None,) * 5, None),
    ],
)
def test_limits_of_cgroups(
    tmp_path: Path, files: dict[str, str], expected: tuple[float | None, ...], pressure: str | None
) -> None:
    found = find_cgroups(machine(tmp_path, files))
    limits = found.cpu_limit_cores(), found.memory_limit_bytes()
    assert (found.version, *limits, found.throttled_ns(), found.oom_events()) == expected
    assert found.pressure_file("cpu") == (None if pressure is None else tmp_path / pressure)
    assert found.pressure_file("io") is None


def test_a_machine_without_files_has_unknowns_and_no_zeros(tmp_path: Path) -> None:
    assert set(noise_facts(tmp_path).values()) == {None}
    facts = hardware_facts(tmp_path)
    unknown = ("cpu_model", "physical_cores", "cgroup_version", "cgroup_cpu_limit", "memory_bytes")
    assert [facts[name] for name in unknown] == [None] * len(unknown)


def test_hardware_and_noise_of_a_big_machine(tmp_path: Path) -> None:
    files = {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(8)}
    files |= {f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor": "powersave" for n in range(8)}
    files |= {
        "sys/devices/system/cpu/online": "0-7",
        "sys/devices/system/cpu/intel_pstate/no_turbo": "0",
        "sys/devices/system/cpu/smt/active": "1",
        "sys/devices/system/node/node0/cpulist": "0-3",
        "sys/devices/system/node/node1/cpulist": "4-7",
        "proc/loadavg": "0.50 1 1 1/300 5",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast One\n",
        "proc/meminfo": "MemTotal:       1024 kB",
        "proc/sys/kernel/randomize_va_space": "0",
    }
    root = machine(tmp_path, files)
    facts = hardware_facts(root)
    assert (facts["cpu_model"], facts["logical_cores"], facts["physical_cores"]) == ("Fast One", 8, 4)
    assert facts["smt_siblings"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert facts["numa_nodes"] == {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]}
    assert facts["memory_bytes"] == 1 << 20
    noise = {"governor": "powersave", "turbo": True, "smt": True, "load_1m": 0.5, "aslr": False}
    assert noise_facts(root) == noise
    assert sibling_groups([1, 5, 2], root) == [[1, 5], [2]]


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8", [0, 1, 2, 3, 8]), ("", []), ("x,2", [2]), ("5", [5])])
def test_processor_lists(text: str, cpus: list[int]) -> None:
    assert parse_cpu_list(text) == cpus


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


def test_a_fault_costs_something() -> None:
    found = hardware.page_fault_cost(2)
    assert found is not None
    assert found["page_bytes"] >= 4096
    assert found["threads"] in (1, 2)
    assert found["ns_alone"] > 0 and found["ns_beside"] > 0 and found["ns_returned"] > 0  # noqa: PT018


def test_settings_of_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    assert hardware.huge_pages(tmp_path) is None
    file.parent.mkdir(parents=True)
    for text, expected in (("always [madvise] never\n", "madvise"), ("odd", None), ("", None)):
        file.write_text(text)
        assert hardware.huge_pages(tmp_path) == expected
