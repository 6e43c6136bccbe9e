"""What is published: the source distribution, the wheel made of it, and what that does where there is nothing else."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from stepscope.dashboard import bundle
from tests.record.agent.processes import OLD
from tests.run_folders import make_run_folder

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepscope"
OF_THE_TRAINING = [
    *sorted((SOURCE / "record" / "agent").rglob("*.py")),
    *(SOURCE / name for name in ("__init__.py", "schema.py", "errors.py")),
]
built = pytest.mark.skipif(bundle.folder() is None, reason="needs the built front end (npm run build in web/)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel made of the source distribution, on a machine without Node.js."""
    folder = tmp_path_factory.mktemp("dist")
    _build(ROOT, folder, "sdist", STEPSCOPE_NO_WEB="1")  # what the installation has built: others look at it meanwhile
    with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
        packed.extractall(folder, filter="data")
    _build(next(folder.glob("stepscope-*/")), folder, "wheel", PATH=str(folder))
    return next(folder.glob("*.whl"))


def _build(tree: Path, folder: Path, target: str, **environment: str) -> None:
    _run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)], tree, **environment)


def _run(line: list[str], cwd: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(line, cwd=cwd, env=kept, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@built
def test_the_wheel_contains_the_front_end_and_no_source_map(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    static = "stepscope/dashboard/static/"
    inside = {name.removeprefix(static) for name in names if name.startswith(static)}
    assert "index.html" in inside
    assert not (bundle.FOLDER / "build.json").exists() or "licences.txt" in inside  # else it was built by hand, by npm
    assert {".js", ".css"} <= {Path(name).suffix for name in inside}
    assert not [name for name in names if name.endswith((".map", ".ts", ".svelte"))]
    assert not [name for name in names if name.startswith(("web/", "tests/"))]


@built
def test_the_wheel_shows_a_page_without_node_and_without_this_repository(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, whose dependencies are those of this one: they are fetched by whoever installs."""
    run = make_run_folder(tmp_path)
    place = tmp_path / "environment"
    _run([sys.executable, "-m", "venv", "--without-pip", str(place)], tmp_path)
    python, program = place / "bin" / "python", place / "bin" / "stepscope"
    installed = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    _run([*installed, str(wheel)], tmp_path)
    own = next(place.glob("lib/python*/site-packages"))
    # the folder alone: files of links in it, such as that of an editable installation, are not followed
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    alone = {"PATH": str(place / "bin"), "HOME": str(tmp_path), "BROWSER": "false"}
    where = _run([str(python), "-c", "import stepscope; print(stepscope.__file__)"], tmp_path, **alone)
    assert where.startswith(str(own))
    assert _run([str(program), "--version"], tmp_path, **alone).startswith("stepscope ")
    line = [str(program), "view", str(run), "--no-browser", "--port", "0"]
    with subprocess.Popen(line, cwd=tmp_path, env=alone, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            page = browser.open(address, timeout=60).read().decode()
            script = re.search(r'src="\.?/?(assets/[\w.-]+\.js)"', page)
            assert script is not None, page
            server = address.partition("?")[0]
            assert len(browser.open(server + script[1], timeout=60).read()) > 100_000
            (known,) = json.load(browser.open(f"{server}api/runs", timeout=60))["runs"]
            steps = f"{server}api/runs/{known['id']}/pages/steps"
            shown = (browser.open(steps, timeout=60).read() for _ in range(300) if not time.sleep(0.2))
            assert any(b"data wait" in document for document in shown)  # the first ones say that the run is read
        finally:
            process.kill()


def test_what_runs_inside_the_training_is_of_the_grammar_of_python_3_8() -> None:
    for path in OF_THE_TRAINING:
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 8))


@pytest.mark.skipif(not OLD.exists(), reason="no Python 3.8 here")
def test_python_3_8_compiles_what_runs_inside_the_training() -> None:
    read = "import sys; [compile(open(name, encoding='utf-8').read(), name, 'exec') for name in sys.argv[1:]]"
    _run([str(OLD), "-c", read, *map(str, OF_THE_TRAINING)], ROOT)
