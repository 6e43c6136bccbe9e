"""Source lines are quoted only from small regular Python files of the user's own."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from stepscope.api import open_run
from stepscope.model import SourceFiles
from stepscope.report.document import report_bytes
from stepscope.report.source import MAX_FILE_BYTES, MAX_FILES, SourceReader
from tests.run_folders import PID, make_run_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.py").write_text("one\ntwo\n  three\nfour\n")
    return folder


def test_lines_are_counted_as_python_counts_them(root: Path) -> None:
    (root / "b.py").write_bytes(b"x = 1\x0c\r\ny = '\xe2\x80\xa8'\rz\xff = 3\n")

    assert SourceReader(SourceFiles((str(root),))).lines(str(root / "b.py")) == [
        "x = 1\x0c",
        "y = '\u2028'",
        "z\ufffd = 3",
        "",
    ]


@pytest.mark.parametrize("name", ["secret.txt", "noise", "binary.py", "huge.py", "missing.py", "folder.py", "pipe.py"])
def test_what_is_not_a_small_source_file_is_not_read(root: Path, name: str) -> None:
    path = root / name
    if name == "folder.py":
        path.mkdir()
    elif name == "pipe.py":
        os.mkfifo(path)
    elif name == "huge.py":
        path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    elif name == "binary.py":
        path.write_bytes(b"\0\1\2\n")
    elif name != "missing.py":
        path.write_text("token = 1\n")

    assert SourceReader(SourceFiles((str(root),))).context(str(path), 1) is None


def test_nothing_outside_the_roots_is_read(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("secret\n")
    (root / "link.py").symlink_to(outside)
    twin = tmp_path / "project-two"
    twin.mkdir()
    (twin / "c.py").write_text("other project\n")
    reader = SourceReader(SourceFiles((str(root),)))

    for file in (outside, root / "link.py", root / ".." / "outside.py", twin / "c.py"):
        assert reader.lines(str(file)) is None
    assert reader.lines("a.py") is None  # relative to whom?


def test_the_root_of_the_file_system_is_no_root(root: Path) -> None:
    assert SourceReader(SourceFiles(("/", "", "."))).lines(str(root / "a.py")) is None


def test_reading_stops_at_a_number_of_files(root: Path) -> None:
    reader = SourceReader(SourceFiles((str(root),)))
    for index in range(MAX_FILES):
        reader.lines(str(root / f"missing{index}.py"))

    assert reader.lines(str(root / "a.py")) is None


def hashed(*files: Path) -> SourceFiles:
    return SourceFiles(hashes={str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files})


def test_a_file_is_quoted_anywhere_while_it_has_the_content_that_ran(root: Path) -> None:
    file = root / "a.py"
    files = hashed(file)
    os.utime(file, ns=(2 * 10**18, 2 * 10**18))  # touched, with the same content

    assert SourceReader(files, recorded_ns=10**18).context(str(file), 2, around=0) == {
        "first_line": 2,
        "lines": ["two"],
        "changed_since": False,
    }
    file.write_text("other\n")
    assert SourceReader(files).lines(str(file)) is None
    assert SourceReader(SourceFiles(hashes={str(file): "0" * 64})).lines(str(file)) is None


def test_a_changed_file_of_the_reader_is_quoted_and_marked_but_no_text_of_what_ran(root: Path) -> None:
    file = root / "a.py"
    files = SourceFiles((str(root),), hashed(file).hashes)
    file.write_text("one\nanother\n")
    os.utime(file, ns=(0, 0))  # older than the run, as a checkout of another commit may be
    reader = SourceReader(files, recorded_ns=10**18)

    assert (reader.context(str(file), 2) or {})["changed_since"]
    assert reader.text(str(file)) is None


def test_a_file_without_a_hash_that_is_younger_than_the_run_tells_no_lines_unless_named_for_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    file = str(root / "a.py")
    os.utime(file, ns=(2 * 10**18, 2 * 10**18))
    assert SourceReader(SourceFiles(), recorded_ns=3 * 10**18).text(file)
    reader = SourceReader(SourceFiles(), recorded_ns=10**18)
    assert (reader.text(file), reader.line(file, 1)) == (None, None)
    assert SourceReader(SourceFiles((str(root),)), recorded_ns=10**18).text(file)


@pytest.mark.parametrize("named", ["copy", "."])  # the folder of the code, and the one around it
def test_a_folder_named_for_it_stands_in_for_one_that_is_gone(tmp_path: Path, named: str) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "a.py").write_text("one\n")
    gone = "/gone/project/copy"
    reader = SourceReader(SourceFiles((str(tmp_path / named),), folders=(gone,)), recorded_ns=1)
    assert reader.text(f"{gone}/a.py") == "one\n"
    assert reader.text("/gone/project/a.py") is None


@pytest.mark.parametrize("inside", [".", "deeper"])
def test_the_readers_own_folder_and_its_git_root_need_no_hash(
    root: Path, tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / ".git").mkdir()
    (root / "deeper").mkdir()
    (tmp_path / "outside.py").write_text("secret\n")
    monkeypatch.chdir(root / inside)
    reader = SourceReader(SourceFiles())

    assert reader.line(str(root / "a.py"), 1) == "one"
    assert reader.lines(str(tmp_path / "outside.py")) is None


@pytest.mark.parametrize("still_as_it_ran", [True, False])
def test_a_recording_is_quoted_by_what_ran_and_not_by_the_folders_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still_as_it_ran: bool
) -> None:
    script, private = tmp_path / "code" / "train.py", tmp_path / "private" / "settings.py"
    for file in (script, private):
        file.parent.mkdir()
        file.write_text("\n".join([f"SECRET = 'of {file.name}'"] * 40))
    hashes = {str(script): hashlib.sha256(script.read_bytes()).hexdigest()}
    if not still_as_it_ran:
        script.write_text(script.read_text() + "\n")
    root = f'process {PID}:"python train.py";thread ({PID}): MainThread;<module> ({script}:40);'
    stack = f"{root}train ({script}:7);load ({private}:9) 400\n"
    folder = make_run_folder(
        tmp_path,
        stacks_raw=stack + stack.replace(f"load ({private}:9)", f"step ({script}:8)"),
        manifest={"user_roots": [str(tmp_path)], "cwd": str(private.parent)},
        rank_json={"main_file": str(script)},
        events=[{"kind": "sources", "hashes": hashes}],
    )
    (tmp_path / "reader").mkdir()
    monkeypatch.chdir(tmp_path / "reader")
    report = open_run(folder).report()
    text = report_bytes(report).decode()

    assert "settings.py" in text
    assert "of settings.py" not in text
    assert ("of train.py" in text) == still_as_it_ran
    assert hashes[str(script)] not in text
