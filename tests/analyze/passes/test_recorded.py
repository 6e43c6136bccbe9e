"""Needless work in traces that PyTorch wrote: each kind is found where it is, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepscope import api
from stepscope.model.device_losses import PassFacts

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


def facts(folder: Path, name: str) -> PassFacts:
    """Of the training steps of one loop."""
    run = api.open_run(folder / f"{name}.pt.trace.json", options=api.ReadOptions(cache=False))
    passes = run.analysis.passes
    assert passes is not None
    assert passes.copies is None  # no stacks were sampled
    (found,) = passes.runs
    assert found.steps == STEPS
    assert found.modules
    assert found.types
    assert found.shapes
    assert found.numbered
    assert found.functions
    return found


def kinds(found: PassFacts) -> set[str]:
    """What was found at all."""
    made = {
        "extra_calls": bool(found.extra_calls),
        "doubles": found.doubles is not None,
        "recompute": found.recompute is not None,
        "wide_gradients": bool(found.wide_gradients),
        "copies": bool(found.copies),
    }
    return {kind for kind, is_there in made.items() if is_there}


@pytest.mark.parametrize("name", ["plain", "taught", "adversaries", "second_order", "unbound"])
def test_needed_work_is_no_needless_work(folder: Path, name: str) -> None:
    assert kinds(facts(folder, name)) == set()


def test_a_validation_that_records_gradients(folder: Path) -> None:
    found = facts(folder, "validated")
    assert kinds(found) == {"extra_calls"}
    (call,) = found.extra_calls
    assert call.module.startswith("Sequential_")
    assert call.place.function == "accuracy"
    assert call.around is not None
    assert call.around.function == "accuracy"
    assert (call.calls_per_step, call.steps_share) == (1, 1)
    assert call.nodes_per_step >= 5  # five layers
    assert 0 < call.ms_per_step <= call.around_ms_per_step <= found.step_ms * STEPS


def test_a_validation_without_gradients_of_a_part_of_the_model(folder: Path) -> None:
    found = facts(folder, "validated_without_gradients")
    assert kinds(found) == {"extra_calls"}
    (call,) = found.extra_calls
    assert call.place.function == "accuracy"
    assert call.around is not None
    assert call.around.function == "evaluate"
    assert call.calls_per_step == 2
    assert call.nodes_per_step == 0


def test_a_validation_in_line_reaches_to_where_the_training_goes_on(folder: Path) -> None:
    found = facts(folder, "validated_in_line")
    (call,) = found.extra_calls
    assert call.place.function == "step"
    assert call.around is None
    assert call.nodes_per_step >= 5
    assert call.around_ms_per_step >= call.ms_per_step


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed_reentrant"])
def test_activation_checkpointing(folder: Path, name: str) -> None:
    found = facts(folder, name)
    assert kinds(found) == {"recompute"}
    again = found.recompute
    assert again is not None
    assert again.checkpoints_per_step == 2
    assert again.operators_per_step == 4  # a linear layer and a tanh of each
    assert again.lines[0].place.function == "step"
    assert again.memory_share is None
    assert 0 < again.ms_per_step < found.step_ms


def test_gradients_of_the_whole_for_parts(folder: Path) -> None:
    found = facts(folder, "selected")
    assert kinds(found) == {"wide_gradients"}
    (wide,) = found.wide_gradients
    assert (wide.node, wide.forward) == ("SelectBackward0", "aten::select")
    assert wide.calls_per_step == 48
    assert (wide.shape, wide.part, wide.dtype) == ((64, 48, 8), (64, 8), "float")
    assert wide.bytes_per_call == 64 * 48 * 8 * 4
    assert wide.dimension == "48 = dim 1 of (64, 48, 8)"
    assert wide.place is not None
    assert wide.place.function == "step"
    assert 0 < wide.ms_per_step <= wide.at_most_ms_per_step


def test_float64_with_its_conversions_and_without_scalars(folder: Path) -> None:
    found = facts(folder, "doubled")
    assert kinds(found) == {"doubles"}
    doubles = found.doubles
    assert doubles is not None
    assert doubles.lines[0].place.function == "widened"
    assert doubles.conversions_per_step == 6  # two there and one back, forward and backward
    assert doubles.compute_ms_per_step > 0
    assert doubles.conversion_ms_per_step > 0
    assert {"aten::mm", "aten::linear"} & set(doubles.parts)


def test_a_copy_of_the_model(folder: Path) -> None:
    found = facts(folder, "averaged")
    assert kinds(found) == {"copies"}
    (copied,) = found.copies
    assert copied.call == "copy.deepcopy"
    assert copied.place.function == "step"
    assert copied.ms_per_step > 0
