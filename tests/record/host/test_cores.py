"""Who had the cores: a machine's processors from a copied file, and the threads of this very process."""

from __future__ import annotations

import os
from pathlib import Path

from stepscope.record.host import meters
from stepscope.record.host.meters import CoresMeter, PoolMeter, ProcessMeter, Times, read_times
from stepscope.record.host.processes import read_stat

SECOND_NS = 1_000_000_000
TICKS = os.sysconf("SC_CLK_TCK")


def processors(path: Path, *rows: tuple[int, int, int]) -> str:
    """A /proc/stat with (user, idle, steal) seconds of each processor."""
    lines = ["cpu  0 0 0 0 0 0 0 0 0 0"]
    for number, (user, idle, steal) in enumerate(rows):
        lines.append(f"cpu{number} {user * TICKS} 0 0 {idle * TICKS} 7 0 0 {steal * TICKS} {user * TICKS} 0")
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
