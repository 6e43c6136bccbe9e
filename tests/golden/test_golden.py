"""Nothing that is shown has changed since `make golden` kept it."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.golden import inputs, kept
from tests.golden.documents import digests, parts_of

KEPT = kept.load()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden").resolve()


@pytest.fixture(scope="module")
def given(folder: Path) -> dict[str, inputs.Input]:
    return {given.name: given for given in (*inputs.made_up(folder), *inputs.real(folder))}


@pytest.mark.parametrize("name", sorted(KEPT))
def test_nothing_shown_has_changed(
    name: str, given: dict[str, inputs.Input], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in given:
        pytest.skip("a real trace that lies beside the project, which is not here")
    monkeypatch.chdir(folder)  # no source file of whoever calls this is quoted
    parts, before = parts_of(given[name], folder), KEPT[name]
    now = digests(parts)
    changed = sorted(part for part in {**now, **before} if now.get(part) != before.get(part))
    if changed:
        old = kept.whole(name).get(changed[0], "").splitlines()
        lines = difflib.unified_diff(old, parts.get(changed[0], "").splitlines(), "kept", "now", lineterm="", n=1)
        shown = "\n".join(list(lines)[:40]) if old else "`git stash; make golden` keeps what it was"
        pytest.fail(f"{name}: {len(changed)} parts changed: {', '.join(changed[:20])}\n{changed[0]}:\n{shown}")
