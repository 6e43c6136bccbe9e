"""The lattice example: sampled stacks name the QR decomposition and its line; the fix draws the same fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.harness import EXAMPLES, PYTHON, Recorded, command, line_of, plain, record

pytestmark = [pytest.mark.process, pytest.mark.torch]

FLOW = EXAMPLES / "lattice_qr" / "flow.py"
TRAIN = "examples/lattice_qr/train.py"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The example, started as its README says."""
    return record(tmp_path_factory.mktemp("qr") / "run", [PYTHON, TRAIN, "--steps", "12"], cwd=EXAMPLES.parent)


def hotspots(run: Path, *options: str) -> list[dict[str, object]]:
    done = command("hotspots", str(run), "--library", "flow", "--json", "-", *options)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, object]] = json.loads(done.stdout)["rows"]
    return rows


def test_the_first_row_is_the_decomposition(recorded: Recorded) -> None:
    assert recorded.status == 0, recorded.text
    first = hotspots(recorded.folder)[0]
    assert first["library_function_name"] == "haar_qr"
    assert Path(str(first["library_function_path"])).resolve() == FLOW
    assert first["library_function_line"] == line_of(FLOW, "torch.linalg.qr(")


@pytest.mark.thorough
def test_both_ways_train_on_the_same_fields(recorded: Recorded) -> None:
    fast = plain([PYTHON, TRAIN, "--steps", "5", "--gram-schmidt"], cwd=EXAMPLES.parent)
    assert fast.returncode == 0, fast.stderr.decode()
    assert fast.stdout.startswith(b"step 5: loss ")
    assert recorded.stdout.startswith(fast.stdout)
