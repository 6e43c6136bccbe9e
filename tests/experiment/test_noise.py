"""What a quiet machine is: cores for training alone, and everything that cannot be changed, said as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from stepscope.experiment import noise
from stepscope.model.comparison import Effect, Noise, Outcome, Verdict
from stepscope.record.agent.knobs import check


def machine_of(root: Path, *, cores: int, threads: int = 2, files: Mapping[str, str] | None = None) -> list[int]:
    """A machine with so many cores, processor n and n + cores being threads of one; returns its processors."""
    for cpu in range(cores * threads):
        group = ",".join(str(cpu % cores + cores * thread) for thread in range(threads))
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(group + "\n")
    for name, text in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return list(range(cores * threads))


def plan(root: Path, cpus: list[int], **environment: str) -> tuple[dict[str, str], Noise]:
    """The knobs that are set, each one of the table, and what is said."""
    knobs, said = noise.plan(seed=3, environment=environment, root=root, allowed=cpus)
    for knob in knobs:
        check(knob)
    return {knob.knob: knob.value for knob in knobs}, said


def test_training_gets_whole_cores_and_one_is_left_and_a_variable_that_is_set_stays(tmp_path: Path) -> None:
    values, found = plan(tmp_path, machine_of(tmp_path, cores=4), OMP_NUM_THREADS="1")
    assert values == {"cpu.affinity": "1-3,5-7", "env:MKL_NUM_THREADS": "3", "gc": "freeze"}
    assert "training on 3 of 4 cores (processors 1-3,5-7), 0,4 left" in dict(found.settings)["cores"]
    assert dict(found.unchanged)["OMP_NUM_THREADS"] == "is 1 in the environment, which stays"


NOISY = {
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    "sys/devices/system/cpu/intel_pstate/no_turbo": "0\n",
    "sys/devices/system/cpu/smt/active": "1\n",
    "proc/loadavg": "3.50 1.00 0.50 5/600 1234\n",
    "proc/sys/kernel/randomize_va_space": "2\n",
    "proc/stat": "cpu  100 0 100 700 0 0 0 100 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n",
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/cgroup.controllers": "cpu\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
}
QUIET = {
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/intel_pstate/no_turbo": "1\n",
    "sys/devices/system/cpu/smt/active": "0\n",
    "proc/loadavg": "0.10 1.00 0.50 1/600 1234\n",
    "proc/sys/kernel/randomize_va_space": "0\n",
    "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\n",
}


def test_what_cannot_be_changed_is_told(tmp_path: Path) -> None:
    machine_of(tmp_path, cores=2, files=NOISY)
    gpus = [{"name": "NVIDIA A100"}, {"name": "NVIDIA A100"}]
    found = {**dict(noise.machine(tmp_path, gpus)), **dict(plan(tmp_path, [0, 1])[1].unchanged)}

    assert found["governor"].startswith("powersave: the clock follows the load")
    assert found["turbo"].startswith("on")
    assert found["hyper-threads"].startswith("on")
    assert found["other load"] == "3.5 processes ran or waited in the last minute, on 2 cores"
    assert found["CPU quota"].startswith("1.5 cores")
    assert found["hypervisor"].startswith("has taken 10.0%")
    assert "address layout" in found
    assert found["GPU clocks"].endswith("(2 x NVIDIA A100)")


def test_a_quiet_machine_has_nothing_to_tell(tmp_path: Path) -> None:
    machine_of(tmp_path, cores=2, files=QUIET)

    assert noise.machine(tmp_path, []) == ()
    assert [name for name, _ in plan(tmp_path, [0, 1])[1].unchanged] == ["cores"]


def outcome(effect: Effect | None) -> Outcome:
    effects = {"mean_ms": effect} if effect is not None else {}
    return Outcome((), Verdict("no_difference", ""), effects, (), ())


def test_the_smallest_effect_is_the_half_width_of_equal_runs(tmp_path: Path) -> None:
    found = noise.of_equal_runs(outcome(Effect(1.001, 0.98, 1.02, 6, 0.019)), None, tmp_path)

    # Student's 2.571 for 5 degrees of freedom, times 0.019, over the root of 6
    assert found.smallest_effect == pytest.approx(0.01994, rel=1e-3)
    assert found.pairs == 6
    assert dict(found.unchanged)["turbo"].startswith("unknown")
