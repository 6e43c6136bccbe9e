"""Which line a finding about the loader may name: by identity, the user's own, or none."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.model import Analysis
from tests.builders import MS, T0, make_tables, step_rows
from tests.records import some

SCRIPT = "/home/me/train.py"
ARGUMENTS = "transformers.TrainingArguments"


def site(line: int, *, what: str = "DataLoader", via: str | None = None, **fields: Any) -> dict[str, Any]:
    found = {"kind": "site", "what": what, "file": SCRIPT, "line": line, "function": "main", "time_ns": T0 - 9 * MS}
    return {**found, **({"via": via} if via is not None else {}), **fields}


def iterated(loader: int, data: int) -> dict[str, Any]:
    return {"kind": "loader", "id": loader, "dataset": data, "num_workers": 0, "batch_size": 8, "time_ns": T0 - MS}


def analyzed(*journal: dict[str, Any]) -> Analysis:
    """40 steps of 100 ms."""
    steps = step_rows(40, data_wait_ms=60, forward_ms=40, backward_ms=0, optimizer_ms=0, other_ms=0)
    return analyze(make_tables(steps=steps, journal=journal))


def line(found: Analysis) -> int | None:
    assert found.loader is not None
    return found.loader.site.line if found.loader.site is not None else None


def test_the_loader_is_told_by_its_number_and_not_by_its_arguments() -> None:
    alike = {"arguments": {"batch_size": "8"}}
    held_out, own = site(10, id=1, dataset=2, **alike), site(20, id=3, dataset=4, **alike)
    assert line(analyzed(held_out, own, iterated(3, 4))) == 20


def test_the_users_own_construction_stands_for_the_one_that_a_framework_made_of_it() -> None:
    own, others = site(20, id=1, dataset=2), site(21, id=3, dataset=4)
    shard = site(30, id=5, dataset=2, via="accelerate/accelerator.py")
    assert line(analyzed(own, others, shard, iterated(5, 2))) == 20


def test_two_of_the_users_over_one_data_set_are_not_chosen_between() -> None:
    shard = site(30, id=5, dataset=2, via="accelerate/accelerator.py")
    assert line(analyzed(site(20, id=1, dataset=2), site(21, id=3, dataset=2), shard, iterated(5, 2))) is None


def test_recordings_without_numbers_go_by_likeness() -> None:
    small, large = site(10, arguments={"batch_size": "2"}), site(20, arguments={"batch_size": "8"})
    made = {"kind": "loader", "id": 3, "num_workers": 0, "batch_size": 8, "time_ns": T0 - MS}
    assert line(analyzed(small, large, made)) == 20


@pytest.mark.parametrize(
    ("told", "framework"),
    [
        ([("lightning.Trainer", None)], "lightning"),
        ([("lightning.Fabric", None)], "fabric"),
        ([(ARGUMENTS, None), ("accelerate.Accelerator", "transformers/trainer.py")], "transformers"),
        ([("accelerate.Accelerator", None)], "accelerate"),
        ([("accelerate.Accelerator", "transformers/trainer.py")], None),
        ([("skorch.NeuralNet", "skorch/classifier.py")], "skorch"),
        ([(ARGUMENTS, "trl/trainer/sft_config.py")], "transformers"),
        ([("AdamW", None), ("GradScaler", None)], None),
    ],
)
def test_the_framework_is_the_one_that_the_user_told_its_settings(
    told: list[tuple[str, str | None]], framework: str | None
) -> None:
    found = analyzed(*(site(5, what=what, via=via) for what, via in told)).settings
    assert (found.framework if found is not None else None) == framework


@pytest.mark.parametrize(
    ("name", "package", "framework", "line"),
    [("Accelerate", "accelerate", "accelerate", None), ("HF Trainer", "transformers", "transformers", 12)],
)
def test_the_framework_that_was_seen_training_is_spoken_of(
    name: str, package: str, framework: str, line: int | None
) -> None:
    told = site(12, what=ARGUMENTS)  # made in any case, and perhaps read by a loop of the user's own
    seen = {"kind": "framework", "name": name, "package": package, "version": "1.0", "time_ns": T0}
    found = some(analyzed(told, site(20, id=1, dataset=2), iterated(1, 2), seen).settings)
    assert found.framework == framework
    assert (found.place.line if found.place is not None else None) == line
