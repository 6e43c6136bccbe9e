"""`stepscope analyze` on a run folder, with the stages before the report replaced by made-up facts."""

from __future__ import annotations

import json
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from stepscope import api
from stepscope.report.document import load_report
from tests.cli.calls import call
from tests.report.fabricate import analysis, diagnosis, write_script

main = partial(call, "analyze")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder in the current folder whose facts are made up."""
    write_script(tmp_path)
    folder = tmp_path / "run"
    (folder / "rank-0").mkdir(parents=True)
    monkeypatch.setattr(api.Run, "analysis", analysis(tmp_path))
    monkeypatch.setattr(api.Run, "diagnosis", diagnosis(tmp_path))
    monkeypatch.chdir(tmp_path)
    return folder


def test_it_shows_the_report_and_keeps_it_in_the_run_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("run") == 0

    shown = capsys.readouterr()
    assert shown.out.startswith("pictures: 512 of 521 train steps are steady, 61.3 ms a step")
    assert "Image.open" in shown.out
    assert "run/report.html" in shown.out
    assert shown.err == ""
    assert load_report(run / "report.json").run["name"] == "pictures"
    assert "<title>pictures" in (run / "report.html").read_text()
    assert sorted(os.listdir(run)) == ["rank-0", "report.html", "report.json"]


@pytest.mark.usefixtures("run")
def test_a_pipe_or_a_device_is_written_into_and_stays_what_it_is() -> None:
    os.mkfifo("pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_bytes()), daemon=True)
    reader.start()
    assert main("run", "--json", "pipe", "--force") == 0
    assert Path("pipe").is_fifo()
    reader.join(60)
    assert json.loads(read[0])["schema"] == "stepscope.report/1"


def test_no_source_quotes_nothing_anywhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("run", "--no-source") == 0

    assert "Image.open" not in capsys.readouterr().out
    for name in ("report.json", "report.html"):
        assert "Image.open" not in (run / name).read_text()


def test_a_folder_that_cannot_be_written_is_shown_all_the_same(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)

    Path("file").touch()
    assert main("run", "--html", "file/x") == 4
    assert capsys.readouterr().err.startswith("stepscope: file/x: cannot be written")
    assert main("run") == 0
    assert "--html report.html" in " ".join(capsys.readouterr().out.split())
    assert os.listdir(run) == ["rank-0"]
