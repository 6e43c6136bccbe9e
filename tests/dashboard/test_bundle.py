"""The built front end: made when the package is, part of the wheel, and no reason for an installation to fail."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from stepscope.dashboard import bundle
from tests.run_folders import make_run_folder

pytest.importorskip("hatchling", reason="needs hatchling")
ROOT = Path(__file__).resolve().parents[2]
UNREACHABLE = "http://127.0.0.1:9/"
PLAIN = "This is the plain form of the report"
LOCK = {
    "lockfileVersion": 3,
    "packages": {
        "": {"dependencies": {"drawn": "1.0.0"}, "devDependencies": {"tool": "1.0.0"}},
        "node_modules/drawn": {"version": "1.0.0", "license": "ISC", "resolved": f"{UNREACHABLE}drawn.tgz"},
        "node_modules/tool": {"version": "1.0.0", "license": "MIT", "dev": True, "resolved": f"{UNREACHABLE}tool.tgz"},
    },
}
NPM = """#!/bin/sh
echo "$1" >> calls
if [ "$1" = ci ]; then mkdir -p node_modules/drawn; echo "Copyright Somebody" > node_modules/drawn/LICENSE; exit 0; fi
if [ -e broken ]; then echo "vite: something is wrong in App.svelte"; exit 1; fi
static=../src/stepscope/dashboard/static
mkdir -p $static/assets
echo '<script type="module" src="./assets/a.js"></script>' > $static/index.html
echo 'let a' > $static/assets/a.js
echo '{}' > $static/assets/a.js.map
"""


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with a front end of one file."""
    web = tmp_path / "tree" / "web"
    web.mkdir(parents=True)
    (web / "package.json").write_text(json.dumps({"name": "w", "version": "1.0.0", **LOCK["packages"][""]}))  # type: ignore[index]
    (web / "package-lock.json").write_text(json.dumps({"name": "w", "version": "1.0.0", **LOCK}))
    (web / "main.ts").write_text("let a")
    return web.parent


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Node.js and an npm of our own in front of all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("node", "#!/bin/sh\necho v22.12.0\n"), ("npm", NPM)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def calls(tree: Path) -> list[str]:
    """What npm was called for since this was asked last; the script above keeps it among the sources."""
    known = tree / "web" / "calls"
    found = known.read_text().split() if known.exists() else []
    known.unlink(missing_ok=True)
    return found


def static(tree: Path) -> Path:
    return tree / "src/stepscope/dashboard/static"


def test_this_installation_has_a_front_end() -> None:
    """Without one the tests in a browser would all skip, and a build that fails would go unnoticed."""
    if os.environ.get("STEPSCOPE_TEST_WEB") == "optional":
        pytest.skip("STEPSCOPE_TEST_WEB=optional")
    assert bundle.folder() is not None, f"{bundle.missing()} (STEPSCOPE_TEST_WEB=optional to go without)"
    assert bundle.load() is not None


def test_only_a_node_that_the_build_runs_on_is_used(hook: ModuleType) -> None:
    assert all(map(hook.fits, ("v20.19.0\n", "v22.12.0", "v24.0.0")))
    assert not any(map(hook.fits, ("v18.20.0", "v20.18.3", "v21.7.0", "v22.11.0", "", "not found")))


@pytest.mark.usefixtures("programs")
def test_it_is_built_once_and_again_when_a_source_has_changed(hook: ModuleType, tree: Path) -> None:
    assert hook.build(tree) is None
    assert calls(tree) == ["ci", "run"]
    assert (static(tree) / "index.html").is_file()
    assert not list(static(tree).rglob("*.map"))
    licences = (static(tree) / "licences.txt").read_text()
    assert [text in licences for text in ("drawn 1.0.0 (ISC)", "Copyright Somebody", "tool")] == [True, True, False]
    assert hook.build(tree) is None
    assert calls(tree) == []

    (tree / "web" / "main.ts").write_text("let b")
    assert hook.build(tree) is None
    assert calls(tree) == ["run"]  # the packages are those of the lockfile already


@pytest.mark.usefixtures("programs")
def test_a_build_that_fails_says_why_and_keeps_what_there_is(
    hook: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "web" / "broken").touch()
    assert hook.build(tree).endswith("reports are plain (npm run build: vite: something is wrong in App.svelte)")
    monkeypatch.setattr(bundle, "FOLDER", static(tree))
    assert bundle.folder() is None
    assert "App.svelte" in bundle.missing()
    assert "\n" not in bundle.missing()

    (tree / "web" / "broken").unlink()
    assert hook.build(tree) is None
    assert bundle.folder() == static(tree)
    assert not (static(tree) / "not_built.txt").exists()

    (tree / "web" / "broken").touch()
    assert "older build" in hook.build(tree)
    assert bundle.folder() == static(tree)


def test_node_comes_from_pypi_only_where_it_is_needed(
    hook: ModuleType, tree: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requirements(hook, tree) == []
    monkeypatch.setenv("PATH", str(tree))  # a machine without Node.js
    machine = os.uname().machine.lower()
    assert requirements(hook, tree) == ([hook.NODE_WHEEL] if machine in hook.NODE_WHEEL_MACHINES else [])
    (programs / "node").write_text("#!/bin/sh\necho v12.22.0\n")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}/bin{os.pathsep}/usr/bin")  # one with an old one
    assert hook.installed_node() is None


def requirements(hook: ModuleType, tree: Path) -> list[str]:
    made: list[str] = hook.FrontEndHook(str(tree), {}, None, None, "", "wheel").dependencies()
    return made


def test_an_installation_that_cannot_reach_npm_works(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    leave = shutil.ignore_patterns("static", "__pycache__", "node_modules")
    for name in ("src", "web"):
        shutil.copytree(ROOT / name, tree / name, ignore=leave)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree / name)
    offline = {"npm_config_registry": UNREACHABLE, "npm_config_cache": str(tmp_path / "cache")}
    made = wheel(tree, tmp_path / "wheels", **offline)
    made.extractall(tmp_path / "installed")
    run = make_run_folder(tmp_path)

    shown = subprocess.run(
        [sys.executable, "-m", "stepscope", "analyze", str(run), "--html", "-"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "<script" not in shown.stdout
    assert shown.stdout.count(PLAIN) == 1
    reason = (tmp_path / "installed/stepscope/dashboard/static/not_built.txt").read_text()
    assert reason.count("\n") == 1
    assert reason.strip() in shown.stdout


def wheel(tree: Path, folder: Path, **environment: str) -> zipfile.ZipFile:
    """The wheel of a source tree, built with what is installed here."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(tree)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("stepscope-*.whl")
    return zipfile.ZipFile(path)
