"""Counters of energy as a recording reads them: a driver that is played, and a tree of powercap in a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepscope.api import open_run
from stepscope.record.host.doctor import cpu_energy_check, gpu_energy_check
from stepscope.record.host.hardware import Gpus
from stepscope.record.host.meters import Rapl
from tests.record.host.launching import host_dir, manifest, record, rows
from tests.records import some


def clock() -> int:
    clock.now += 1_000_000  # type: ignore[attr-defined]
    return int(clock.now)  # type: ignore[attr-defined]


def powercap(folder: Path, zones: dict[str, str], counter: str = "5000000\n") -> Path:
    for zone, name in zones.items():
        (folder / zone).mkdir(parents=True)
        for file, text in (("name", f"{name}\n"), ("energy_uj", counter), ("max_energy_range_uj", "262143328850\n")):
            (folder / zone / file).write_text(text)
    return folder


TREE = {
    "intel-rapl:0": "package-0",
    "intel-rapl:0:0": "core",
    "intel-rapl:0:1": "uncore",
    "intel-rapl:0:2": "dram",
    "intel-rapl:1": "package-1",
    "intel-rapl:2": "psys",  # holds the packages
    "intel-rapl-mmio:0": "package-0",  # the first once more
    "dtpm": "dtpm",
}


def test_packages_and_their_memory_are_read_and_nothing_that_lies_in_them(tmp_path: Path) -> None:
    clock.now = 0  # type: ignore[attr-defined]
    rapl = Rapl(powercap(tmp_path, TREE))
    assert (rapl.devices, rapl.reason) == (["package-0", "package-0-dram", "package-1"], None)
    found = rapl.metrics(clock)
    assert found[:3] == [
        ("cpu_energy_uj", "uJ", 5e6, None, "package-0"),
        ("energy_after_ns", "ns", 1_500_000.0, None, "package-0"),  # half-way through the reading
        ("cpu_energy_range_uj", "uJ", 262143328850.0, None, "package-0"),
    ]
    assert len(found) == 9
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()  # as when a module is unloaded meanwhile
    assert len(rapl.metrics(clock)) == 6
    assert cpu_energy_check(rapl).state == "ok"


def test_what_cannot_be_read_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "virtual machine" in some(Rapl(tmp_path / "none").reason)
    odd = powercap(tmp_path / "odd", {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1"}, "not a number")
    (odd / "intel-rapl:1" / "energy_uj").unlink()
    os.mkfifo(odd / "intel-rapl:1" / "energy_uj")  # nobody ever writes: it must not be waited for
    rapl = Rapl(odd)
    assert (rapl.devices, rapl.remedy, rapl.metrics(clock)) == ([], None, [])
    assert "package-0, package-1 cannot be read" in some(rapl.reason)
    monkeypatch.setattr(os, "access", lambda *_: False)  # whoever runs the tests may be root
    refused = Rapl(odd)
    assert "read by root alone" in some(refused.reason)
    check = cpu_energy_check(refused)
    assert (check.state, check.remedy) == ("limited", refused.remedy)
    assert "chmod" in check.remedy


def driver(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> None:
    """A driver of one board that gives these answers; those that are errors it raises."""
    module = ModuleType("pynvml")
    module.__dict__.update(NVMLError=OSError, nvmlInit=lambda: None, nvmlShutdown=lambda: None)
    module.__dict__.update(nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=lambda index: f"handle {index}")

    def answering(answer: Any) -> Any:
        def call(*_: Any) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call

    module.__dict__.update({name: answering(answer) for name, answer in answers.items()})
    monkeypatch.setitem(sys.modules, "pynvml", module)


COUNTER = "nvmlDeviceGetTotalEnergyConsumption"


@pytest.mark.parametrize("answer", [RuntimeError("?"), TypeError("?"), OSError("?"), None, "7", -1, 2**64 - 1, 1.5])
def test_a_driver_that_refuses_or_talks_nonsense_gives_no_reading(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    driver(monkeypatch, {COUNTER: answer, "nvmlDeviceGetMigMode": RuntimeError("?")})
    with Gpus() as gpus:
        assert gpus.energy(clock) == []
        (described,) = gpus.describe()
    assert (described["energy_counter"], described["mig"], described["virtualization"]) == (None, None, None)
    check = gpu_energy_check([described])
    assert (check.state, "no energy counter on GPU 0" in check.finding) == ("limited", True)


def test_a_driver_that_cannot_be_started_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, {"nvmlInit": RuntimeError("does not fit")})
    with Gpus() as gpus:
        assert (gpus.energy(clock), gpus.metrics(), gpus.reason) == ([], [], "does not fit")


def test_a_board_tells_whether_it_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {COUNTER: 12, "nvmlDeviceGetMigMode": [1, 0], "nvmlDeviceGetVirtualizationMode": 1}
    driver(monkeypatch, answers)
    with Gpus() as gpus:
        assert gpus.energy(clock)[0][:3] == ("gpu_energy_mj", "mJ", 12.0)
        (described,) = gpus.describe()
    assert (described["energy_counter"], described["mig"], described["virtualization"]) == (True, True, "passthrough")
    check = gpu_energy_check([described])
    assert (check.state, "MIG" in check.finding) == ("limited", True)


# A driver whose board draws 200 W and lists the processes of the run, and a processor that draws 50 W. Both are found
# by the process beside the run on its path.
PLAYED = """
import json, os, time
from pathlib import Path
from types import SimpleNamespace
from stepscope.record.host import meters

FOLDER = Path(__file__).parent
meters.POWERCAP = FOLDER / "powercap"
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return "board"
def nvmlDeviceGetName(handle): return "Played"
def nvmlDeviceGetTotalEnergyConsumption(handle):
    passed = time.time() - (FOLDER / "pynvml.py").stat().st_mtime
    new = FOLDER / f"counter-{os.getpid()}"
    new.write_text(str((9_850_000_000 + int(passed * 50e6)) % 10_000_000_000))
    new.replace(FOLDER / "powercap/intel-rapl:0/energy_uj")
    return int(time.time() * 200e3)
def nvmlDeviceGetEnforcedPowerLimit(handle): return 300_000
def nvmlDeviceGetComputeRunningProcesses(handle):
    pids = (FOLDER / "pid").read_text().split() if (FOLDER / "pid").exists() else []
    return [SimpleNamespace(pid=int(pid), usedGpuMemory=None) for pid in pids]
"""
TRAINING = """
import os, sys, time
from pathlib import Path
import torch
from plain_sgd import PlainSGD
Path(os.environ["PLAYED"], "pid").write_text(str(os.getpid()))
model = torch.nn.Linear(4, 1)
optimizer = PlainSGD(model.parameters(), lr=0.01)
end = time.time() + 4.5
while time.time() < end:
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""


@pytest.mark.process
def test_a_real_recording_holds_the_energy_of_its_steps(tmp_path: Path) -> None:
    played = tmp_path / "played"
    powercap(played / "powercap", {"intel-rapl:0": "package-0"})
    (played / "powercap/intel-rapl:0/max_energy_range_uj").write_text("10000000000")  # it begins anew after 3 s
    (played / "pynvml.py").write_text(PLAYED)
    (tmp_path / "train.py").write_text(TRAINING)
    environment = {**os.environ, "PYTHONPATH": f"{played}{os.pathsep}{os.environ['PYTHONPATH']}", "PLAYED": str(played)}
    done = record(tmp_path / "run", sys.executable, "train.py", cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    system = rows(host_dir(tmp_path / "run") / "system.jsonl")
    only = [row for row in (system[0], *system[-2:]) if {each[0] for each in row["metrics"]} <= ENERGY]
    assert len(only) == 2  # at both ends
    hardware = manifest(tmp_path / "run")["hardware"]
    assert hardware["cpu_energy"]["devices"] == ["package-0"]
    assert (hardware["gpus"][0]["energy_counter"], hardware["gpus"][0]["mig"]) == (True, None)
    run = open_run(tmp_path / "run")
    found = some(run.analysis.energy)
    assert [one.source for one in found.domains] == ["counter", "RAPL"]
    assert found.absent is None
    board, processor = found.domains
    assert some(board.joules) == pytest.approx(200 * board.seconds, rel=0.02)
    assert some(processor.joules) == pytest.approx(50 * processor.seconds, rel=0.02)
    assert min(board.seconds, processor.seconds) > 4
    watts = 250 if processor.counted else 200  # where these tests have a part of a machine its energy is not theirs
    train = run.analysis.steps[0]
    assert some(found.per_step.joules_per_step) == pytest.approx(watts / 1e3 * train.mean_ms, rel=0.05)


ENERGY = {"gpu_energy_mj", "energy_after_ns", "cpu_energy_uj", "cpu_energy_range_uj"}
