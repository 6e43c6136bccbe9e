"""Which of several launchers reports: the one that ends last, once, and nobody waits."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stepscope.record.host.folder import LARGEST_REPORTED_JOB, Part, part_in_report


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


def test_a_large_job_and_a_host_without_a_readable_manifest_wait_for_nobody(tmp_path: Path) -> None:
    count = LARGEST_REPORTED_JOB + 1
    folders = [host(tmp_path / "large", index, count) for index in range(count)]
    parts = [part_in_report(tmp_path / "large", folder) for folder in folders]
    assert parts == [Part.WORD] + [Part.SILENT] * (count - 1)
    for broken in ("{", "[]"):
        mine = host(tmp_path / "broken", 1, 2)
        (host(tmp_path / "broken", 0, 2) / "manifest.json").write_text(broken)
        assert part_in_report(tmp_path / "broken", mine) is Part.SILENT
