"""Needless work in traces that PyTorch wrote: each kind is found where it is, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepscope import api
from stepscope.model.device_losses import PassFacts
from tests.records import some

pytestmark = [pytest.mark.process, pytest.mark.torch]

SCRIPT = Path(__file__).parent / "scripts" / "needless.py"
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("needless")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(made)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return made


def facts(folder: Path, name: str, kind: str | None = None) -> PassFacts:
    """Of the training steps of one loop, in which only needless work of a kind is found, if any."""
    run = api.open_run(folder / f"{name}.pt.trace.json", options=api.ReadOptions(cache=False))
    passes = some(run.analysis.passes)
    assert passes.copies is None  # no stacks were sampled
    (found,) = passes.runs
    assert found.steps == STEPS
    assert all((found.modules, found.types, found.shapes, found.numbered, found.functions))
    kinds = ("extra_calls", "doubles", "recompute", "wide_gradients", "wasted", "copies")
    assert [one for one in kinds if getattr(found, one)] == ([kind] if kind is not None else [])
    return found


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "taught",
        "adversaries",
        "second_order",
        "unbound",
        "tied",
        "in_lists",
        "by_hand",
        "truncated",
        "threaded",
        "cached",
        "adjoint",
        "dense",
        "rejoined",
        "factored",
    ],
)
def test_needed_work_is_no_needless_work(folder: Path, name: str) -> None:
    facts(folder, name)


def test_a_validation_that_records_gradients(folder: Path) -> None:
    found = facts(folder, "validated", "extra_calls")
    (call,) = found.extra_calls
    assert call.module.startswith("Sequential_")
    assert call.place.function == "accuracy"
    assert call.around is not None
    assert call.around.function == "accuracy"
    assert (call.calls_per_step, call.steps_share) == (1, 1)
    assert call.nodes_per_step >= 5  # five layers
    assert 0 < call.ms_per_step <= call.around_ms_per_step <= found.step_ms * STEPS


def test_a_validation_without_gradients_of_a_part_of_the_model(folder: Path) -> None:
    (call,) = facts(folder, "validated_without_gradients", "extra_calls").extra_calls
    assert call.place.function == "accuracy"
    assert call.around is not None
    assert call.around.function == "evaluate"
    assert call.calls_per_step == 2
    assert call.nodes_per_step == 0


def test_a_validation_in_line_reaches_to_where_the_training_goes_on(folder: Path) -> None:
    (call,) = facts(folder, "validated_in_line", "extra_calls").extra_calls
    assert call.place.function == "validated_in_line"
    assert call.around is None
    assert call.nodes_per_step >= 5
    assert call.around_ms_per_step >= call.ms_per_step


@pytest.mark.parametrize("name", ["thrown_away", "logged"])  # not at the function that makes the loss as well
def test_a_call_whose_result_is_thrown_away_or_logged(folder: Path, name: str) -> None:
    (call,) = facts(folder, name, "extra_calls").extra_calls
    assert (call.place.function, call.calls_per_step) == (name, 1)
    assert call.nodes_per_step >= 5


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed_reentrant"])
def test_activation_checkpointing(folder: Path, name: str) -> None:
    found = facts(folder, name, "recompute")
    again = some(found.recompute)
    assert again.checkpoints_per_step == 2
    assert again.operators_per_step == 4  # a linear layer and a tanh of each
    assert again.lines[0].place.function == "checkpointed"
    assert again.memory_share is None
    assert 0 < again.ms_per_step < found.step_ms


def test_gradients_of_the_whole_for_parts(folder: Path) -> None:
    (wide,) = facts(folder, "selected", "wide_gradients").wide_gradients
    assert (wide.node, wide.forward) == ("SelectBackward0", "aten::select")
    assert wide.calls_per_step == 48
    assert (wide.shape, wide.part, wide.dtype) == ((64, 48, 8), (64, 8), "float")
    assert wide.bytes_per_call == 64 * 48 * 8 * 4
    assert wide.dimension == "48 = dim 1 of (64, 48, 8)"
    assert wide.place is not None
    assert wide.place.function == "selected"
    assert 0 < wide.ms_per_step <= wide.at_most_ms_per_step


def test_float64_with_its_conversions_and_without_scalars(folder: Path) -> None:
    doubles = some(facts(folder, "doubled", "doubles").doubles)
    assert doubles.lines[0].place.function == "widened"
    assert doubles.conversions_per_step == 6  # two there and one back, forward and backward
    assert doubles.compute_ms_per_step > 0
    assert doubles.conversion_ms_per_step > 0
    assert {"aten::mm", "aten::linear"} & set(doubles.parts)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("broadcast", (512, 128, 64)),
        ("one_hot", (4, 16, 8192)),
        ("dense_gradient", (8192, 64)),
        ("decomposition", ()),
    ],
)
def test_operators_that_another_form_would_not_run(folder: Path, kind: str, shape: tuple[int, ...]) -> None:
    found = facts(folder, kind, "wasted")
    (work,) = found.wasted
    assert (work.kind, work.shape, work.calls_per_step) == (kind, shape, 1)
    assert work.lines[0].place.function == "wasted"
    assert 0 < work.ms_per_step <= found.step_ms


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("unused_gradient", 8),  # of three layers each a product and a t()
        ("biases", 6),  # of six layers the product that makes the weights' gradients
    ],
)
def test_gradients_of_what_no_optimizer_has(folder: Path, name: str, calls: int) -> None:
    (work,) = facts(folder, name, "wasted").wasted
    assert (work.kind, work.calls_per_step) == ("unused_gradient", calls)
    assert work.lines[0].place.function == "updated"


def test_a_graph_that_is_kept_from_step_to_step(folder: Path) -> None:
    found = facts(folder, "history", "wasted")
    (work,) = found.wasted
    assert (work.kind, work.lines[0].place.function) == ("history", "remembered")
    assert 0 < work.ms_per_step <= found.step_ms


@pytest.mark.parametrize(("name", "calls"), [("grown", 1), ("grown_within", 9)])  # two alike have no length
def test_a_tensor_that_grows(folder: Path, name: str, calls: int) -> None:
    (work,) = facts(folder, name, "wasted").wasted
    assert (work.kind, work.calls_per_step, work.lines[0].place.function) == ("grown", calls, "joined")


def test_a_copy_of_the_model(folder: Path) -> None:
    (copied,) = facts(folder, "averaged", "copies").copies
    assert copied.call == "copy.deepcopy"
    assert copied.place.function == "averaged"
    assert copied.ms_per_step > 0
