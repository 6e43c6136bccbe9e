"""Kinds of file systems: from a table of mounts, from open files of this process, and from words of a command."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from stepscope.record.host.meters import LOOKS_PER_READING, StorageLooks, mount_of, named_paths, parse_mounts

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
