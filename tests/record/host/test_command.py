"""What a command line starts, found without starting it; the words of `--window`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stepscope.errors import UsageError
from stepscope.record.host.command import find_script, user_roots
from stepscope.record.host.options import parse_window


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a script in a folder, a package, a module on PYTHONPATH, and a fake environment's programs."""
    for name in (
        "src/train.py",
        "pkg/__init__.py",
        "pkg/sub/__init__.py",
        "pkg/sub/__main__.py",
        "lib/tool.py",
        "job.sh",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name in ("torchrun", "accelerate", "python3"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\n")
        program.chmod(0o755)
    direct = tmp_path / "go.py"
    direct.write_text("#!/usr/bin/env python3\n")
    direct.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "kind", "path", "label"),
    [
        ("python3 src/train.py --lr 1", "script", "src/train.py", "train"),
        ("python3 -u -W ignore -X dev src/train.py", "script", "src/train.py", "train"),
        ("env A=1 nice -n 5 taskset -c 0,1 python3 src/train.py x.py", "script", "src/train.py", "train"),
        ("python3 -m pkg.sub --steps 3", "module", "pkg/sub/__main__.py", "sub"),
        ("python3 -mtool", "module", "lib/tool.py", "tool"),
        ("python3 -c pass", "other", None, "python"),
        ("torchrun --nproc-per-node 2 --standalone src/train.py --x", "script", "src/train.py", "train"),
        ("torchrun --nproc-per-node=2 -m pkg.sub", "module", "pkg/sub/__main__.py", "sub"),
        ("python3 -m torch.distributed.run --nproc-per-node=2 src/train.py", "script", "src/train.py", "train"),
        ("accelerate launch --cpu src/train.py", "script", "src/train.py", "train"),
        ("bash -e job.sh 1", "other", "job.sh", "job"),
        ("bash -c true", "other", None, "bash"),
        ("./go.py", "script", "go.py", "go"),
        ("something-else --flag", "other", None, "something-else"),
    ],
)
def test_the_script_is_found(project: Path, line: str, kind: str, path: str | None, label: str) -> None:
    environ = {"PATH": f"{project}/bin:{os.environ['PATH']}", "PYTHONPATH": "lib"}
    command = [str(project / "go.py") if word == "./go.py" else word for word in line.split()]
    script = find_script(command, environ, project)
    assert (script.kind, script.path, script.label) == (kind, None if path is None else project / path, label)


def test_the_interpreter_is_that_of_the_launch_line(project: Path) -> None:
    environ = {"PATH": f"{project}/bin"}
    assert find_script(["python3", "src/train.py"], environ, project).python == str(project / "bin/python3")
    assert find_script(["torchrun", "src/train.py"], environ, project).python == sys.executable
    assert find_script(["something"], environ, project).python is None


def test_user_roots_are_the_scripts_folder_the_working_directory_and_its_repository(project: Path) -> None:
    environ = {"PATH": f"{project}/bin"}
    script = find_script(["python3", "../src/train.py"], environ, project / "lib")
    assert user_roots(script, project / "lib", project) == [str(project / "src"), str(project / "lib"), str(project)]
    module = find_script(["python3", "-m", "pkg.sub"], environ, project)
    assert user_roots(module, project, None) == [str(project / "pkg"), str(project)]


def test_installed_code_and_the_whole_disk_are_never_the_users(project: Path) -> None:
    installed = project / "venv/lib/python3.11/site-packages/app"
    installed.mkdir(parents=True)
    (installed / "train.py").touch()
    script = find_script(["python3", str(installed / "train.py")], {"PATH": f"{project}/bin"}, project)
    assert user_roots(script, Path("/"), None) == []
    assert user_roots(script, project, Path("/")) == [str(project)]


def test_window_words() -> None:
    assert parse_window(None).mode == "auto"
    assert parse_window(None, off=True).mode == "off"
    assert parse_window(None, memory=True).memory == "on"
    found = parse_window("skip_first=10, wait=2,warmup=0,active=5,repeat=3,everywhere")
    assert (found.mode, found.skip_first, found.wait, found.warmup, found.active, found.repeat, found.everywhere) == (
        "schedule", 10, 2, 0, 5, 3, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text", ["active", "active=", "active=-1", "active=0", "steps=3", "active=x", "wait=1;active=2"]
)
def test_window_words_that_cannot_be_used_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="--window"):
        parse_window(text)
