"""Nothing that is shown has changed since `make golden` kept it."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.golden import inputs, kept
from tests.golden.documents import digests, parts_of

KEPT = kept.load()


def check(given: inputs.Input) -> None:
    parts = parts_of(given.paths, given.root)
    now, before = digests(parts), KEPT[given.name]
    changed = sorted(name for name in {**now, **before} if now.get(name) != before.get(name))
    if changed:
        old = kept.whole(given.name).get(changed[0], "").splitlines()
        lines = difflib.unified_diff(old, parts.get(changed[0], "").splitlines(), "kept", "now", lineterm="", n=1)
        shown = "\n".join(list(lines)[:40]) if old else "`git stash; make golden` keeps what it was"
        pytest.fail(f"{given.name}: {len(changed)} parts changed: {', '.join(changed[:20])}\n{changed[0]}:\n{shown}")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> dict[str, inputs.Input]:
    return {given.name: given for given in inputs.made_up(tmp_path_factory.mktemp("golden").resolve())}


@pytest.mark.parametrize("name", sorted(set(KEPT) - set(inputs.NAMES)))
def test_made_up(name: str, made_up: dict[str, inputs.Input], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(made_up[name])


@pytest.mark.parametrize("given", inputs.real(), ids=lambda given: given.name)
def test_real(given: inputs.Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(given)
