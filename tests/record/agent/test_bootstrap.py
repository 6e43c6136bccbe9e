"""The injected sitecustomize: inert without torch, chained, harmless, and fit for Python 3.8."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.record.agent.imports import Finder

from .processes import PYTHONS, SCRIPTS, run_script

FAKE_TORCH = SCRIPTS / "fake_torch"


@pytest.mark.parametrize("python", PYTHONS)
def test_without_torch_nothing_of_ours_is_there(tmp_path: Path, python: str) -> None:
    outcome = run_script(tmp_path, "plain.py", "names", python=python)
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "[]\n[] 1\nNone\n", "")
    assert [path.name for path in outcome.run.rglob("*")] == ["host-h"]


@pytest.mark.parametrize("python", PYTHONS)
def test_a_torch_that_lacks_everything_wakes_the_agent_and_breaks_nothing(tmp_path: Path, python: str) -> None:
    outcome = run_script(tmp_path, "plain.py", "torch", python=python, path=(FAKE_TORCH,))
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "\n[] 1\nNone\n", "")
    announced = outcome.agents()[0]
    assert (announced["role"], announced["torch"]) == ("torch", "2.1.0-fake")
    assert outcome.ranks == []


@pytest.mark.parametrize("configured", ["", "no JSON", '{"run": 3}', "{}"])
def test_a_broken_configuration_is_ignored(tmp_path: Path, configured: str) -> None:
    environment = {"STEPSCOPE_RECORD": configured}
    outcome = run_script(tmp_path, "plain.py", "torch", path=(FAKE_TORCH,), environment=environment)
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "\n[] 1\nNone\n", "")
    assert outcome.agents() == []


def test_the_users_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("GREETING = 'hello'\n")
    outcome = run_script(tmp_path, "plain.py", path=(tmp_path / "site",))
    assert (outcome.status, outcome.stdout) == (0, "\n[] 1\nhello\n")


@pytest.mark.parametrize("error", ["ValueError('mine')", "ImportError('mine')"])
def test_a_raising_sitecustomize_raises_as_without_us(tmp_path: Path, error: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"raise {error}\n")
    with_us = run_script(tmp_path, "plain.py", path=(tmp_path / "site",))
    without = run_script(tmp_path, "plain.py", path=(tmp_path / "site",), recorded=False)
    assert (with_us.status, with_us.stdout, with_us.stderr) == (without.status, without.stdout, without.stderr)


def test_a_torch_that_fails_to_import_fails_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise OSError('libtorch is missing')\n")
    with_us = run_script(tmp_path, "plain.py", "torch", path=(tmp_path / "site",))
    without = run_script(tmp_path, "plain.py", "torch", path=(tmp_path / "site",), recorded=False)
    assert with_us.status == without.status == 1
    assert with_us.stderr.splitlines()[-1] == without.stderr.splitlines()[-1] == "OSError: libtorch is missing"
    assert with_us.agents() == []


@pytest.mark.parametrize(("name", "text"), [("resource", "raise SystemExit(9)"), ("stepscope", "GREETING = 'mine'")])
def test_a_module_of_the_scripts_by_the_name_of_one_that_we_need_is_the_scripts(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / f"{name}.py").write_text(text)
    script = tmp_path / "site" / "script.py"
    script.write_text(
        f"import torch\nimport sys\nprint('{name}' in sys.modules)\nimport {name}\nprint({name}.GREETING)\n"
    )
    with_us, without = (run_script(tmp_path, str(script), path=(FAKE_TORCH,), recorded=told) for told in (True, False))
    assert (with_us.status, with_us.stdout, with_us.stderr) == (without.status, without.stdout, without.stderr)
    foreign = [str(script.with_name("stepscope.py"))] if name == "stepscope" else []
    assert [agent["foreign"] for agent in with_us.agents() if "foreign" in agent] == foreign


def test_a_clone_of_ours_beside_the_script_does_not_end_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where we are installed for another Python, the folder is all that the script's path has by our name."""
    (tmp_path / "stepscope" / "docs").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    package = Path(__file__).parents[3] / "src" / "stepscope"
    spec = Finder(str(package), lambda _: None).find_spec("stepscope")
    assert spec is not None
    assert spec.origin == str(package / "__init__.py")
