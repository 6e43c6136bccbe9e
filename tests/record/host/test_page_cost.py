"""What a page fault costs, measured: sound figures on a real machine, and the settings of made-up ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stepscope.record.host import hardware
from tests.record.host.launching import manifest, record


def test_a_fault_costs_something() -> None:
    found = hardware.page_fault_cost(2)
    assert found is not None
    assert found["page_bytes"] >= 4096
    assert found["threads"] in (1, 2)
    assert found["ns_alone"] > 0 and found["ns_beside"] > 0 and found["ns_returned"] > 0  # noqa: PT018


def test_settings_of_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    assert hardware.huge_pages(tmp_path) is None
    file.parent.mkdir(parents=True)
    for text, expected in (("always [madvise] never\n", "madvise"), ("odd", None), ("", None)):
        file.write_text(text)
        assert hardware.huge_pages(tmp_path) == expected


@pytest.mark.process
def test_measured_only_beside_training(tmp_path: Path) -> None:
    assert record(tmp_path / "idle", sys.executable, "-c", "print(1)", cwd=tmp_path).returncode == 0
    assert manifest(tmp_path / "idle")["page_faults"]["cost"] is None
    rank = "import json, os, pathlib; run = pathlib.Path(json.loads(os.environ['STEPSCOPE_RECORD'])['run']);" + (
        "host = pathlib.Path(json.loads(os.environ['STEPSCOPE_RECORD'])['host_dir']); (run / 'rank-0').mkdir();"
        "(run / 'rank-0' / 'rank.json').write_text(json.dumps({'threads': 1}));"
        "(host / 'agents.jsonl').write_text(json.dumps({'folder': 'rank-0'}) + '\\n')"
    )
    assert record(tmp_path / "trained", sys.executable, "-c", rank, cwd=tmp_path).returncode == 0
    told = manifest(tmp_path / "trained")["page_faults"]
    assert told["cost"]["threads"] == 1
    assert json.dumps(told)
