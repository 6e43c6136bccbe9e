"""Pages as a server asks for them, whatever is chosen on them: each is the document that it was, by its digest.

After a change that was meant: `python -m tests.dashboard.test_kept_pages`. What has changed in a document is told by
the golden documents, which hold whole pages, and by the tests beside this one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.dashboard.pages import PAGES
from tests.dashboard import served_runs
from tests.dashboard.opened import page, two_workers
from tests.golden.documents import _text, digests

KEYS = [key for key in PAGES if key != "findings"]  # that page names every rule, and a new rule should not end here
KEPT = Path(__file__).with_name("kept_pages.json")
CHOSEN: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "small": (
        *((key, {"worker": "rank-1"}) for key in ("steps", "timeline", "operators", "memory", "system", "flame")),
        *((key, {"span": "rank-0/span0"}) for key in ("steps", "operators", "gpu")),
        ("flame", {"by": "line"}),
        ("timeline", {"at": "0:5000000"}),
        ("steps", {"limit": 5}),
        ("metrics", {"over": "time", "smooth": "10"}),
        ("metrics", {"group": "perf", "worker": "rank-1"}),
        *((key, {"embedded": True, "limit": 20}) for key in KEYS),
    ),
    "workers": (
        *((key, {"worker": "worker1"}) for key in ("steps", "operators", "kernels", "modules", "memory", "gpu")),
        *((key, {"span": "worker0/span1"}) for key in ("timeline", "kernels", "modules", "memory")),
        *(("operators", {"group": "shapes", "worker": worker}) for worker in (None, "worker1")),
        *(("operators", {"operator": name}) for name in ("aten::mm", "aten::addmm", "nothing")),
        *(("kernels", {"group": group}) for group in ("name", "launch", "none")),
        ("kernels", {"operator": "aten::mm"}),
        ("kernels", {"device": "0"}),
        ("modules", {"limit": 2}),
        ("gpu", {"gpu": "worker1/span1:0"}),
    ),
    "cpu": (("operators", {"group": "shapes"}), ("flame", {"by": "line"})),
}


def made(folder: Path) -> dict[str, str]:
    """The digest of every page, by its run, its key and what is chosen."""
    options = api.ReadOptions(cache=False)
    for name in ("traces", "workers"):
        (folder / name).mkdir()
    runs = {
        "small": api.open_run(served_runs.small(folder / "small"), options=options),
        "fuzzed": api.open_run(served_runs.fuzzed(folder / "fuzzed"), options=options),
        "empty": api.open_run(served_runs.empty(folder / "empty"), options=options),
        "cpu": api.open_run(served_runs.cpu_trace(folder / "traces" / "cpu.pt.trace.json"), options=options),
    }
    runs["workers"] = two_workers(folder / "workers")
    texts = {}
    for name, run in runs.items():
        for key, given in (*((key, {}) for key in KEYS), *CHOSEN.get(name, ())):
            text = _text(page(run, key, **given)).replace(str(folder), "/FOLDER")
            texts[f"{name}: {key} {json.dumps(given) if given else ''}".strip()] = text
    return digests(texts)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))  # lines of files below the working folder are quoted
        yield made(tmp_path_factory.mktemp("kept"))


def test_every_page_is_the_one_that_is_kept(found: dict[str, str]) -> None:
    assert found == json.loads(KEPT.read_text())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as given:
        KEPT.write_text(json.dumps(made(Path(given)), indent=1) + "\n")
    print(f"wrote {KEPT}", file=sys.stderr)
