"""The lattice example: sampled stacks name the QR decomposition and its line; the fix draws the same fields."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

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


def test_it_dominates_the_flow(recorded: Recorded) -> None:
    samples = {"haar_qr": 0, "others": 0}
    for row in hotspots(recorded.folder):
        if row["library_function_name"] is not None:
            name = str(row["library_function_name"])
            samples[name if name in samples else "others"] += int(str(row["samples"]))
    assert samples["haar_qr"] > samples["others"], samples


@pytest.mark.thorough
def test_both_ways_train_on_the_same_fields(recorded: Recorded) -> None:
    fast = plain([PYTHON, TRAIN, "--steps", "5", "--gram-schmidt"], cwd=EXAMPLES.parent)
    assert fast.returncode == 0, fast.stderr.decode()
    assert fast.stdout.startswith(b"step 5: loss ")
    assert recorded.stdout.startswith(fast.stdout)


def flow_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lattice_flow", FLOW)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fields_are_in_su3_and_their_loops_are_loops() -> None:
    import torch

    flow = flow_module()
    for draw in (flow.haar_qr, flow.haar_gram_schmidt):
        links = draw(8)
        assert links.shape == (8, 4, 4, 4, 4, 4, 3, 3)
        assert torch.allclose(links @ links.mH, torch.eye(3, dtype=links.dtype), atol=1e-5)
        assert torch.allclose(torch.linalg.det(links), torch.ones((), dtype=links.dtype), atol=1e-5)
        assert links.mean().abs() < 0.01
    for mu, nu in flow.PLANES:
        along, across = links[..., mu, :, :], links[..., nu, :, :]
        product = along @ across.roll(-1, 1 + mu) @ along.roll(-1, 1 + nu).mH @ across.mH
        traces = product.diagonal(dim1=-2, dim2=-1).sum(-1).index_select(1 + nu, torch.tensor([0, 2]))
        assert torch.allclose(flow.loops(links, mu, nu).sum(-1), traces, atol=1e-5)
