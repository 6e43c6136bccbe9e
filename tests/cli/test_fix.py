"""`stepscope fix` on a recording made of plain values: listing, the difference, writing it, and who may be written."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import MS, T0, step_rows
from tests.cli.calls import call
from tests.run_folders import make_run_folder

pytest.importorskip("libcst")

SOURCE = "from torch.utils.data import DataLoader\n\nloader = DataLoader(data, batch_size=8)\n"
FIXED = SOURCE.replace("=8)", "=8, num_workers=2, persistent_workers=True)")


@pytest.fixture
def script(elsewhere: Path) -> Path:
    """`train.py` in the working folder, and RUN of it, whose loader keeps every step waiting."""
    script = elsewhere / "train.py"
    script.write_text(SOURCE)
    run_of(script, elsewhere)
    return script


def run_of(script: Path, folder: Path) -> Path:
    site = {"kind": "site", "what": "DataLoader", "file": str(script), "line": 3, "id": 1}
    return make_run_folder(
        folder,
        name="RUN",
        steps=step_rows(40, data_wait_ms=60, forward_ms=20),
        events=[
            {**site, "arguments": {"batch_size": "8"}},
            {"kind": "loader", "id": 1, "epoch": 0, "num_workers": 0, "batch_size": 8, "time_ns": T0 - MS},
            {"kind": "sources", "hashes": {str(script): hashlib.sha256(script.read_bytes()).hexdigest()}},
        ],
        manifest={
            "command": ["python", "train.py", "--name", "my run"],
            "cwd": str(folder),
            "hardware": {"logical_cores": 8, "affinity": list(range(8))},
        },
    )


def said(capfdbinary: pytest.CaptureFixture[bytes]) -> tuple[bytes, str]:
    out, err = capfdbinary.readouterr()
    return out, err.decode()


def test_shown_then_written_then_done(script: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert call("fix", "RUN") == 0
    listed, _ = said(capfdbinary)
    assert b"changes train.py: stepscope fix RUN --finding input.loader_bound" in listed
    assert call("fix", "RUN", "--finding", "input.loader_bound") == 0
    shown, words = said(capfdbinary)
    assert shown.startswith(b"diff --git a/train.py b/train.py\n--- a/train.py\n+++ b/train.py\n@@ ")
    assert script.read_text() == SOURCE
    workers = next(word for word in words.split() if word.startswith("loader.num_workers="))
    assert f"stepscope experiment --try {workers} --try loader.persistent_workers=true --together -- " in words
    assert "-- python train.py --name 'my run'" in words
    subprocess.run(["patch", "-p1", "-s", "--dry-run"], input=shown, check=True)
    assert call("fix", "RUN", "--finding", "input.loader_bound", "--apply") == 0
    shown, words = said(capfdbinary)
    assert shown == b""
    assert script.read_text() == FIXED.replace("num_workers=2", workers.partition(".")[2])
    assert "stepscope run --out RUN-fixed -- python train.py --name 'my run' && stepscope compare RUN RUN-f" in words
    assert call("fix", "RUN", "--finding", "input.loader_bound", "--apply") == 0
    assert "nothing to do" in said(capfdbinary)[1]


def test_a_terminal_obeys_no_character_of_the_source(
    elsewhere: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = elsewhere / "train.py"
    script.write_text(SOURCE.replace("\n\n", "\n# \x1b[2J\n"))
    run_of(script, elsewhere)
    wanted = ("fix", "RUN", "--finding", "input.loader_bound")
    assert call(*wanted) == 0
    assert b"# \x1b[2J\n" in said(capfdbinary)[0]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call(*wanted) == 0
    assert b"# \\x1b[2J\n" in said(capfdbinary)[0]


def test_refused(script: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    script.write_text(f"x = 1\n{SOURCE}")
    for words, status, why in (
        (["--finding", "input.loader_bound", "--apply"], 1, "changed since it was recorded"),
        (["--finding", "host.nothing"], 2, "no such finding"),
        (["--apply"], 2, "name it with --finding"),
        (["--every", "1"], 2, "2 or more"),
    ):
        assert call("fix", "RUN", *words) == status
        out, err = said(capfdbinary)
        assert out == b""
        assert why in err
    assert script.read_text() == f"x = 1\n{SOURCE}"


def test_only_in_folders_of_ones_own(
    elsewhere: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of a recording is shown as text, and a file elsewhere is written only where its folder is named."""
    script = elsewhere / "code\x1b[2J" / "train.py"
    script.parent.mkdir()
    script.write_text(SOURCE)
    run_of(script, elsewhere)
    work = elsewhere / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    wanted = ["fix", elsewhere / "RUN", "--finding", "input.loader_bound", "--apply"]
    assert call(*wanted) == 1
    refused = said(capfdbinary)[1]
    assert "--source-root" in refused
    assert "\x1b" not in refused
    assert script.read_text() == SOURCE
    assert call(*wanted, "--source-root", script.parent) == 0
    assert "\x1b" not in said(capfdbinary)[1]
    assert script.read_text() != SOURCE


def test_without_libcst(
    script: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("libcst", "stepscope.fix."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert call("fix", "RUN") == 4
    assert "pip install 'stepscope[fix]'" in said(capfdbinary)[1]
    assert script.read_text() == SOURCE
