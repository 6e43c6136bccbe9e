"""Readings of a machine and its processes: cores, storage, clocks, GPUs, energy, from files and a driver as played."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stepscope.api import open_run
from stepscope.record.host import meters
from stepscope.record.host.doctor import cpu_energy_check, gpu_energy_check
from stepscope.record.host.hardware import Gpus, Metric, numa_node
from stepscope.record.host.meters import (
    LOOKS_PER_READING,
    CoresMeter,
    PoolMeter,
    ProcessMeter,
    Rapl,
    StorageLooks,
    SystemClock,
    Times,
    mount_of,
    named_paths,
    parse_mounts,
    read_times,
)  # fmt: skip
from stepscope.record.host.processes import read_stat
from tests.record.host.launching import host_dir, manifest, record, rows
from tests.records import some

SECOND_NS = 1_000_000_000
HZ = os.sysconf("SC_CLK_TCK")


def processors(path: Path, *rows: tuple[int, int, int]) -> str:
    """A /proc/stat with (user, idle, steal) seconds of each processor."""
    lines = ["cpu  0 0 0 0 0 0 0 0 0 0"]
    for number, (user, idle, steal) in enumerate(rows):
        lines.append(f"cpu{number} {user * HZ} 0 0 {idle * HZ} 7 0 0 {steal * HZ} {user * HZ} 0")
    path.write_text("\n".join([*lines, "intr 12345", "ctxt 9"]) + "\n")
    return str(path)


def test_busy_and_stolen_cores_are_of_the_allowed_processors_alone(tmp_path: Path) -> None:
    path = tmp_path / "stat"
    meter = CoresMeter([0, 2], processors(path, (10, 0, 0), (10, 0, 0), (10, 0, 0)))
    assert meter.metrics(0) == []  # a rate needs two readings
    processors(path, (12, 0, 0), (12, 0, 0), (11, 0, 1))
    found = {name: (value, pid, device) for name, _, value, pid, device in meter.metrics(2 * SECOND_NS)}
    assert found == {"busy_cores": (1.5, None, None), "stolen_cores": (0.5, None, None)}


def test_a_kernel_that_does_not_tell_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu 1 2\ncpu0 1 x 3 4 5 6 7 8 9 10\n")
    for path in ("stat", "missing"):
        meter = CoresMeter([0], str(tmp_path / path))
        assert meter.metrics(0) == meter.metrics(SECOND_NS) == []
    for text, times in (("", None), ("1 2", None), ("1 2 x", None), ("-1 2 3", None), ("1 2 3\n", Times(1, 2, 3))):
        (tmp_path / "schedstat").write_text(text)
        assert read_times(str(tmp_path / "schedstat")) == times


def test_a_pool_of_one_thread_is_none_and_one_of_many_is_read_less_often() -> None:
    assert PoolMeter(os.getpid()).read(1) is PoolMeter(2**22 + 1).read(4) is None
    meter = PoolMeter(os.getpid())
    read = [meter.read(3 * meters.THREADS_PER_READING) is not None for _ in range(6)]
    assert read == [True, False, False, True, False, False]


def test_only_training_processes_tell_of_their_threads() -> None:
    stat = read_stat(os.getpid())
    assert stat is not None

    def names(role: str) -> set[str]:
        return {name for name, *_ in ProcessMeter(os.getpid()).metrics(stat, 0, role)}

    pool = {"main_cpu_ns", "main_timeslices", "main_minor_faults", "voluntary_switches", "processor"}
    assert pool <= names("rank")
    assert not pool & names("loader_worker")
    assert "requested_bytes" in names("loader_worker")
    assert "requested_bytes" not in names("other")
    assert {"run_delay_ns", "threads", "rss_bytes"} <= names("other")


MOUNTS = r"""
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:20 / /proc rw - proc proc rw
23 21 0:21 / /scratch rw shared:7 master:1 - lustre 10.0.0.1@o2ib:/scratch rw
24 23 0:22 / /scratch/local\040disk rw - xfs /dev/nvme0n1 rw
25 21 0:23 / /data rw - ext4 /dev/vdb rw
26 25 0:24 / /data rw - nfs4 server:/export rw
27 21 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup rw
28 torn
""".strip().splitlines()


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/scratch/set/train.tar", ("/scratch", "lustre")),
        ("/scratchy/x", ("/", "ext4")),
        ("/scratch/local disk/x", ("/scratch/local disk", "xfs")),
        ("/data", ("/data", "nfs4")),  # mounted over another
        ("/home/user/x", ("/", "ext4")),
        ("/proc/self/maps", None),
        ("/sys/fs/cgroup/cpu.max", None),
    ],
)
def test_the_longest_mount_point_holds_a_path(path: str, mount: tuple[str, str] | None) -> None:
    assert mount_of(path, parse_mounts(MOUNTS)) == mount


def test_files_open_for_reading_are_data_and_logs_are_not(tmp_path: Path) -> None:
    own = tmp_path / "run"
    own.mkdir()
    (tmp_path / "train.bin").write_bytes(b"x")
    (tmp_path / "code.py").write_text("")
    (own / "steps.jsonl").write_text("")

    def seen() -> int:
        rows = StorageLooks(str(own)).metrics([os.getpid()])
        counts = [value for name, _, value, pid, _ in rows if name == "open_files" and pid == os.getpid()]
        assert all(device and ":/" in device for *_, device in rows)
        return int(sum(counts))

    before = seen()
    with ExitStack() as files:
        for path in (tmp_path / "train.bin", tmp_path / "code.py", own / "steps.jsonl"):
            files.enter_context(path.open())
        files.enter_context((tmp_path / "log.txt").open("w"))
        assert seen() == before + 1
    assert seen() == before


def test_processes_are_looked_at_in_turn_and_their_commands_once() -> None:
    looks = StorageLooks("/nowhere")
    own = os.getpid()
    gone = [2**22 + number for number in range(1, LOOKS_PER_READING + 1)]
    assert looks.metrics(gone) == []
    assert looks.metrics([]) == []
    for _ in range(2):
        named = [row for row in looks.metrics([own]) if row[0] == "named_paths"]
    assert named == []  # the second look does not tell the command again


def test_paths_that_a_command_names() -> None:
    words = ["--data=/data/../data/set", "/scratch/x", "/opt/code.py", "--rate", "0.1", "relative/path", "a=/no"]
    line = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", *words]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            assert named_paths(process.pid) == ["/data/set", "/scratch/x"]
        finally:
            process.communicate(timeout=60)
    assert named_paths(2**22 + 1) == []


TICK = 1_000_000 // os.sysconf("SC_CLK_TCK")


class Kernel:
    """Clocks that show what they are told to; each look takes 100 ns."""

    def __init__(self) -> None:
        self.now = self.ahead = self.slewed = 0
        self.state: tuple[int, int, int, int] | None = (0, 10 * 65_536, 1500, TICK)
        self.asked = 0

    def read(self, clock: int) -> int:
        self.now += 100
        if clock == time.CLOCK_REALTIME:
            return self.now + self.slewed + self.ahead
        return self.now + (self.slewed if clock == time.CLOCK_MONOTONIC else 0)

    def told(self) -> tuple[int, int, int, int] | None:
        self.asked += 1
        return self.state


def looks(clock: SystemClock, count: int) -> list[dict[str, float]]:
    """What `count` readings of telemetry hold, those without anything left out."""
    found = [{str(name): float(value) for name, _, value, *_ in clock.metrics()} for _ in range(count)]
    return [one for one in found if one]


def test_a_clock_that_is_set_and_one_that_is_slewed_are_told_apart() -> None:
    kernel = Kernel()
    clock = SystemClock(kernel.read, kernel.told)
    (first,) = looks(clock, 5)
    kernel.ahead += 5_000_000
    (second,) = looks(clock, 5)
    kernel.slewed += 300_000
    (third,) = looks(clock, 5)

    assert (first["clock_set_ns"], second["clock_set_ns"], third["clock_set_ns"]) == (0, 5_000_000, 5_000_000)
    assert third["clock_slewed_ns"] - second["clock_slewed_ns"] == 300_000
    assert (first["clock_state"], first["clock_frequency_ppm"], first["clock_max_error_us"]) == (0, 10, 1500)


def test_a_kernel_that_does_not_tell_is_asked_once_and_the_clocks_are_still_compared() -> None:
    kernel = Kernel()
    kernel.state = None
    found = looks(SystemClock(kernel.read, kernel.told), 20)
    assert kernel.asked == 1
    assert [sorted(one) for one in found] == [["clock_set_ns", "clock_slewed_ns"]] * 4


def test_this_machine_is_read_without_an_error() -> None:
    found = looks(SystemClock(), 6)
    assert len(found) == 2
    assert abs(found[1]["clock_set_ns"]) < 1e9


class Refused(Exception):
    """As pynvml raises."""


ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=10 << 30, total=80 << 30),
    "nvmlDeviceGetPowerUsage": 349_500,
    "nvmlDeviceGetEnforcedPowerLimit": 350_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetTemperature": 84,
    "nvmlDeviceGetClockInfo": 1200,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
    "nvmlDeviceGetComputeRunningProcesses": [
        SimpleNamespace(pid=100, usedGpuMemory=9 << 30),
        SimpleNamespace(pid=7, usedGpuMemory=None),
    ],
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:17:00.0"),
    "nvmlDeviceGetName": b"NVIDIA H100",
    "nvmlDeviceGetUUID": "GPU-1",
}


def driver(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> None:
    """A driver of one board that gives these answers; those that are errors it raises, and refuses all else."""
    module = ModuleType("pynvml")
    usual = {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": "handle"}

    def answering(answer: Any) -> Any:
        def call(*_: Any) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call

    given = dict.fromkeys(ANSWERS, Refused()) | usual | answers
    module.__dict__.update({name: answering(answer) for name, answer in given.items()}, NVMLError=Refused)
    monkeypatch.setitem(sys.modules, "pynvml", module)


def by_name(rows: list[Metric]) -> dict[str, float]:
    return {name: value for name, _, value, pid, device in rows if device == "gpu:0" and pid is None}


def test_clocks_with_their_reasons_and_power_with_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, ANSWERS)
    with Gpus() as gpus:
        found = by_name(gpus.metrics())
        (description,) = gpus.describe()
    assert found == {
        "gpu_util_pct": 97,
        "gpu_memory_bytes": 10 << 30,
        "gpu_power_w": 349.5,
        "gpu_power_limit_w": 350,
        "gpu_power_default_w": 700,
        "gpu_temperature_c": 84,
        "gpu_sm_clock_mhz": 1200,
        "gpu_sm_clock_max_mhz": 1980,
        "gpu_clock_reasons": 4,
    }
    assert (description["sm_clock_max_mhz"], description["power_default_w"]) == (1980, 700)
    assert description["name"] == "NVIDIA H100"


def test_what_a_driver_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, {"nvmlDeviceGetClockInfo": 1980})
    with Gpus() as gpus:
        assert by_name(gpus.metrics()) == {"gpu_sm_clock_mhz": 1980}
        (description,) = gpus.describe()
    assert {name for name, value in description.items() if value is not None} == {"index"}


def test_the_node_next_to_a_device(tmp_path: Path) -> None:
    for name, text in (("0000:17:00.0", "1\n"), ("0000:18:00.0", "-1\n"), ("0000:19:00.0", "?")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    assert numa_node("00000000:17:00.0", tmp_path) == 1
    for unknown in ("00000000:18:00.0", "00000000:19:00.0", "00000000:1A:00.0", "../../etc", None):
        assert numa_node(unknown, tmp_path) is None


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
THREADS = 8
# With more threads than it needs: what the scheduler counted of them reaches the analysis.
TRAINING = f"""
import os, sys, time
from pathlib import Path
import torch
from plain_sgd import PlainSGD
torch.set_num_threads({THREADS})
Path(os.environ["PLAYED"], "pid").write_text(str(os.getpid()))
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
optimizer = PlainSGD(model.parameters(), lr=1e-3)
inputs = torch.randn(256, 256)
end = time.time() + 4.5
while time.time() < end:
    Path(__file__).read_bytes()
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that training's run, beside a driver and a processor that are played."""
    folder = tmp_path_factory.mktemp("metered")
    played = folder / "played"
    powercap(played / "powercap", {"intel-rapl:0": "package-0"})
    (played / "powercap/intel-rapl:0/max_energy_range_uj").write_text("10000000000")  # it begins anew after 3 s
    (played / "pynvml.py").write_text(PLAYED)
    (folder / "train.py").write_text(TRAINING)
    environment = {**os.environ, "PYTHONPATH": f"{played}{os.pathsep}{os.environ['PYTHONPATH']}", "PLAYED": str(played)}
    done = record(folder / "run", sys.executable, "train.py", cwd=folder, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    return folder / "run"


COUNTERS = ("main_cpu_ns", "main_timeslices", "run_delay_ns", "pool_cpu_ns", "pool_delay_ns", "pool_timeslices")


@pytest.mark.process
@pytest.mark.torch
def test_every_counter_of_the_main_thread_and_its_pool_is_there_and_grows(recorded: Path) -> None:
    rank = json.loads((recorded / "rank-0" / "rank.json").read_text())
    assert rank["threads"] == THREADS
    values: dict[str, list[float]] = {}
    for row in rows(host_dir(recorded) / "system.jsonl"):
        for name, _, value, pid, _ in row["metrics"]:
            if name in ("busy_cores", "stolen_cores") or pid == rank["pid"]:
                values.setdefault(name, []).append(value)
    for name in COUNTERS:
        assert values[name] == sorted(values[name]), name
        assert values[name][-1] > values[name][0], name
    assert {"processor", "voluntary_switches", "requested_bytes", "busy_cores", "stolen_cores"} <= set(values)


@pytest.mark.process
@pytest.mark.torch
def test_a_real_recording_holds_the_energy_of_its_steps(recorded: Path) -> None:
    system = rows(host_dir(recorded) / "system.jsonl")
    only = [row for row in (system[0], *system[-2:]) if {each[0] for each in row["metrics"]} <= ENERGY]
    assert len(only) == 2  # at both ends
    hardware = manifest(recorded)["hardware"]
    assert hardware["cpu_energy"]["devices"] == ["package-0"]
    assert (hardware["gpus"][0]["energy_counter"], hardware["gpus"][0]["mig"]) == (True, None)
    run = open_run(recorded)
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
