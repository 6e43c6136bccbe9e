"""The examples do what their READMEs say, without us: same data every time, and the fix computes the same figure."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.analyze import shared_traces

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> ModuleType:
    """An example's file as a module; `name` is its path below examples/, without the ending."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every picture, by its path below `folder`."""
    files = sorted(folder.glob("*/*.png"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_pictures_are_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    make_data = load("cifar_png/make_data")
    assert make_data.make_data(tmp_path / "a", 40) == 40
    assert make_data.make_data(tmp_path / "b", 40) == 40
    first = digests(tmp_path / "a")
    assert first == digests(tmp_path / "b")
    assert len(set(first.values())) == 40
    assert {name.split("/")[0] for name in first} == set(make_data.CLASSES)


@pytest.mark.torch
def test_both_losses_are_the_same_figure() -> None:
    import torch

    gpt = load("naive_gpt/train")
    logits, targets = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    assert gpt.looped_loss(logits, targets).item() == pytest.approx(gpt.vectorized_loss(logits, targets).item())


def test_missing_data_is_said_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    line = [sys.executable, str(EXAMPLES / "cifar_png" / "train.py"), "--data", str(tmp_path / "absent")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 2
    assert "make_data.py" in done.stderr


PAGE = Path(__file__).resolve().parents[1] / "docs" / "examples_of_traces.md"
ENTRY = re.compile(r'^- \*\*Trace\*\*: `([^`]+)`\n- \*\*First\*\*: (?:none|(\S+): "(.+)")$', re.MULTILINE)


def entries() -> dict[str, tuple[str, str]]:
    """Trace -> rule and title of its first finding, both empty where there is none."""
    return {match[1]: (match[2] or "", match[3] or "") for match in ENTRY.finditer(PAGE.read_text())}


def test_every_section_is_an_entry_with_reasons() -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) == len(entries()) >= 5
    assert all(len(section.split("\n\n", 1)[1].split()) >= 20 for section in sections)


def test_traces_of_different_programs_have_different_first_findings() -> None:
    rules = [
        rule
        for trace, (rule, _) in entries().items()
        if trace.startswith(("hta/df_", "tracelens/b200", "tracelens/h100"))
    ]
    assert len(rules) == len(set(rules)) == 5
    assert "" not in rules


@shared_traces.needs_traces
@pytest.mark.parametrize("trace", entries())
def test_the_first_finding_is_the_one_described(trace: str) -> None:
    findings = shared_traces.run_of(trace).diagnosis.findings
    found = (findings[0].rule, findings[0].title) if findings else ("", "")
    assert found == entries()[trace]
