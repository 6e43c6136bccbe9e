"""Which of several launchers reports: the one that ends last, once, and nobody waits."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stepscope.record.host.folder import LARGEST_READ_JOB, Part, part_in_report, reduces, say_done


def host(run: Path, index: int, members: int, *, ended: bool = True, **scheduler: Any) -> Path:
    folder = run / f"host-{index}"
    folder.mkdir(parents=True, exist_ok=True)
    value = {"identity": ["slurm", "17", "0", "0"], "members": members, "index": index, **scheduler}
    manifest = {"scheduler": value, "ended_ns": 1 if ended else None}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_launcher_alone_reports(tmp_path: Path) -> None:
    for number, manifest in enumerate(("", "[]", '{"scheduler": null}', '{"scheduler": {"identity": null}}')):
        folder = tmp_path / f"{number}" / "host-a"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(manifest)
        assert part_in_report(folder.parent, folder) is Part.REPORT
    assert part_in_report(tmp_path / "gone", tmp_path / "gone/host-a") is Part.REPORT
    assert part_in_report(tmp_path / "one", host(tmp_path / "one", 0, 1)) is Part.REPORT


def test_the_last_reports_and_the_first_task_says_a_word(tmp_path: Path) -> None:
    folders = [host(tmp_path, index, 3, ended=False) for index in range(3)]
    parts = []
    for index in (0, 2, 1):
        host(tmp_path, index, 3)
        parts.append(part_in_report(tmp_path, folders[index]))
    assert parts == [Part.WORD, Part.SILENT, Part.REPORT]


def test_one_report_when_all_end_in_the_same_moment(tmp_path: Path) -> None:
    folders = [host(tmp_path, index, 4) for index in range(4)]
    barrier = threading.Barrier(4)

    def end(folder: Path) -> Part:
        barrier.wait(30)
        return part_in_report(tmp_path, folder)

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(end, folders))
    assert parts.count(Part.REPORT) == 1


def test_of_a_large_job_each_machine_is_reduced_once_and_the_last_reports(tmp_path: Path) -> None:
    count = LARGEST_READ_JOB + 1
    folders = [host(tmp_path, index, count, ended=False) for index in range(count)]
    order = [*range(1, count), 0]
    parts = []
    for index in order:
        host(tmp_path, index, count)
        assert reduces(tmp_path, folders[index])
        assert not reduces(tmp_path, folders[index]), "once"
        say_done(folders[index])
        parts.append(part_in_report(tmp_path, folders[index]))
    assert parts == [Part.SILENT] * (count - 1) + [Part.REPORT]


def test_who_has_not_done_its_part_keeps_a_large_job_from_being_reported(tmp_path: Path) -> None:
    count = LARGEST_READ_JOB + 1
    folders = [host(tmp_path, index, count) for index in range(count)]
    for folder in folders[:-1]:
        say_done(folder)
        assert part_in_report(tmp_path, folder) is not Part.REPORT
    say_done(folders[-1])
    assert part_in_report(tmp_path, folders[-1]) is Part.REPORT
    assert part_in_report(tmp_path, folders[0]) is Part.WORD


def test_a_machine_with_several_launchers_is_reduced_by_the_last_that_lives(tmp_path: Path) -> None:
    count = 3 * LARGEST_READ_JOB
    names = ("a", "a.2", "a.3")
    folders = [host(tmp_path, 0, count, ended=False).rename(tmp_path / f"host-{name}") for name in names]
    host(tmp_path, 1, count)

    def ends(folder: Path, **more: Any) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))

    ends(folders[0], ended_ns=1)
    assert not reduces(tmp_path, folders[0])
    gone = subprocess.Popen(["true"])
    gone.wait()
    ends(folders[1], launcher_pid=gone.pid, host=socket.gethostname())
    ends(folders[2], launcher_pid=os.getpid(), host=socket.gethostname())
    assert not reduces(tmp_path, folders[0]), "one of the machine goes on"
    ends(folders[2], ended_ns=1)
    assert reduces(tmp_path, folders[2]), "one was killed, the others have ended"
    assert not reduces(tmp_path, folders[0])


def test_a_small_job_is_not_reduced(tmp_path: Path) -> None:
    assert not reduces(tmp_path, host(tmp_path, 0, LARGEST_READ_JOB))
    assert not reduces(tmp_path / "gone", tmp_path / "gone" / "host-a")


def test_a_host_without_a_readable_manifest_is_waited_for_by_nobody(tmp_path: Path) -> None:
    for broken in ("{", "[]"):
        mine = host(tmp_path / "broken", 1, 2)
        (host(tmp_path / "broken", 0, 2) / "manifest.json").write_text(broken)
        assert part_in_report(tmp_path / "broken", mine) is Part.SILENT
