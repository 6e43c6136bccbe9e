"""The loss of an update from what backward was called on; norms after clipping; the step of each value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl
import pytest

from stepscope.read.raw import RawRank, RawSeries
from stepscope.read.run_folder import read_series
from stepscope.record.agent.metrics import packed
from stepscope.tables.metrics import metrics_table
from tests.builders import MS, T0, full_steps

UNDIVIDED, DIVIDED = {"node": "MseLossBackward0"}, {"node": "DivBackward0", "factor": 2.0}
PACKED = packed("q", [T0, T0 + 1])
LINE_D, LINE_E, LINE_G = ({"file": "/x/gan.py", "line": number} for number in (41, 44, 50))


def line(points: list[tuple[float, float, int]], optimizers: list[int] | None = None, **about: Any) -> RawSeries:
    """Backward passes of a line: (ms after the start, value, optimizer steps before, -1 minus that inside one)."""
    times, values, updates = (np.array(column) for column in zip(*points, strict=True))
    return RawSeries(
        "train/loss",
        "backward",
        (times * MS).astype(np.int64) + T0,
        values,
        updates,
        None if optimizers is None else np.array(optimizers),
        about,
    )


def found(*series: RawSeries, steps: int = 3, fetches: int = 1, journal: Any = ()) -> dict[str, list[Any]]:
    """(step, value) of each name, of a run with steps of 10 ms."""
    rows = full_steps([{"fetches": fetches, "wall_ns": 10 * MS} for _ in range(steps)])
    table = metrics_table([RawRank("rank-0", 0, steps=tuple(rows), metrics=series, journal=journal)])
    assert table["time_ns"].is_sorted()
    parts = table.partition_by("name", as_dict=True, maintain_order=True)
    return {str(name): part.select("step", "value").rows() for (name,), part in parts.items()}


ACCUMULATED = [(1, 1.0, 0), (2, 3.0, 0), (11, 5.0, 1), (12, 7.0, 1)]


@pytest.mark.parametrize(
    ("about", "journal", "losses"),
    [
        (DIVIDED, (), [4.0, 12.0]),
        (UNDIVIDED, (), [2.0, 6.0]),
        ({"node": "MulBackward0", "factor": 0.5}, (), [4.0, 12.0]),
        ({"node": "MulBackward0", "factor": 3.0}, (), [2.0, 6.0]),  # a weight of the loss, no number of batches
        ({"node": "DivBackward0", "factors": [None] * 4}, (), [4.0, 12.0]),  # by what is known on the device alone
        ({"node": "DivBackward0", "factors": [2.0] * 4}, (), [4.0, 12.0]),
        ({"node": "DivBackward0", "factors": [90.0, 71.0, 84.0, 77.0]}, (), [2.0, 6.0]),  # by each pass's own tokens
        ({"node": "DivBackward0", "factors": [161.0, 161.0, 147.0, 147.0]}, (), [4.0, 12.0]),  # by those of the update
        (UNDIVIDED, ({"kind": "framework", "name": "HF Trainer"},), [4.0, 12.0]),
    ],
)
def test_gradients_accumulated_over_two_batches(about: Any, journal: Any, losses: list[float]) -> None:
    seen = found(line(ACCUMULATED, **about), fetches=2, journal=journal)
    assert [value for _, value in seen["train/loss"]] == losses
    assert seen["train/loss_sum"] == [(0, 4.0), (1, 12.0)]
    assert seen["train/loss_mean"] == [(0, 2.0), (1, 6.0)]


@pytest.mark.parametrize(
    ("points", "losses"),
    [
        ([(1, 1.0, 0), (21, 3.0, 0)], {2: 4.0}),  # before an evaluation, and after it
        ([(1, 1.0, 0), (21, 3.0, 0), (22, 5.0, 0)], {0: 1.0, 2: 8.0}),  # as many batches as passes: a trial
        ([(1, 1.0, 0), (2, 2.0, 0), (11, 3.0, 1), (21, 5.0, 1)], {0: 3.0, 2: 8.0}),  # left over by an epoch
    ],
)
def test_passes_in_no_step_are_of_the_update_that_follows(points: Any, losses: dict[int, float]) -> None:
    rows = full_steps([{"fetches": 2, "wall_ns": 10 * MS} for _ in range(3)])
    trained = rows[2:] if len(points) < 4 else [rows[0], rows[2]]
    series = line(points, **DIVIDED)
    table = metrics_table([RawRank("rank-0", 0, steps=tuple(trained), metrics=(series,))])
    seen = table.filter(pl.col("name") == "train/loss")
    assert dict(seen.select(pl.col("step").fill_null(0), "value").rows()) == losses


def rates(*values: float) -> list[RawSeries]:
    """Of optimizers, each from 10 ms after the one before it on."""
    return [
        RawSeries(f"train/lr/{f'{number}.' if number else ''}0", "optimizer", np.array([T0 + number * 10 * MS]), value)
        for number, value in enumerate(np.array(values).reshape(-1, 1))
    ]


@pytest.mark.parametrize(
    ("optimizers", "names"),
    [([0, 0, 1, 2], {"train/lr/0": [0.1, 0.2, 0.3]}), ([0, 1, 0, 1], {"train/lr/0": [0.1], "train/lr/1.0": [0.2]})],
    ids=["one after the other", "in turn"],
)
def test_the_rate_of_an_optimizer_that_follows_another_goes_on_with_its(optimizers: Any, names: Any) -> None:
    points = [(10 * at + 1, float(at), at) for at in range(4)]
    seen = found(line(points, optimizers), *rates(0.1, 0.2, 0.3)[: max(optimizers) + 1], steps=4)
    assert {name: [value for _, value in seen[name]] for name in seen if "/lr/" in name} == names


@pytest.mark.parametrize(
    ("name", "about", "told", "of"),
    [
        ("train_loss", {"node": "DivBackward0", "factors": [None]}, 0.5, "mean"),
        ("train_loss", {"node": "DivBackward0", "factors": [None]}, 1.0, "sum"),
        ("Loss/train", {"node": "AddBackward0"}, 1.0, "sum"),  # divided before a penalty was added
        ("loss", {"node": "DivBackward0", "factors": [2.0] * 9}, 0.5, "sum"),  # logged after it was divided
        ("val/loss", {"node": "DivBackward0", "factors": [None]}, 0.5, "sum"),
        ("loss", {"node": "AddBackward0"}, 0.75, "mean"),  # neither
        ("loss", {"node": "MseLossBackward0"}, 1.0, "mean"),  # their sum is logged, and nothing divides
    ],
)
def test_what_the_script_logs_tells_where_the_root_does_not(name: str, about: Any, told: float, of: str) -> None:
    steps = range(12)
    values = [(1.0 + at % 3, 1.5 + at % 2) for at in steps]
    passes = [(10 * at + part + 1, values[at][part], at) for at in steps for part in (0, 1)]
    times = np.array([10 * at + 5 for at in steps]) * MS + T0
    logged = RawSeries(name, "wandb", times, np.array([told * sum(pair) for pair in values]))
    seen = found(line(passes, **about), logged, steps=12, fetches=2)
    expected = [sum(pair) / (2 if of == "mean" else 1) for pair in values]
    assert [value for _, value in seen["train/loss"]] == pytest.approx(expected)


def test_the_losses_of_two_optimizers_are_of_the_first_and_of_each_line() -> None:
    """As in a GAN: two passes of the critic are added, the generator has an update of its own."""
    real = line([(1, 0.5, 0), (11, 0.6, 2)], [0, 0], **LINE_D)
    fake = line([(2, 0.2, 0), (12, 0.1, 2)], [0, 0], **LINE_E)
    of_generator = line([(3, 9.0, 1), (13, 8.0, 3)], [1, 1], **LINE_G)
    assert found(real, fake, of_generator) == {
        "train/loss": [(0, 0.7), (1, 0.7)],
        "train/loss_sum": [(0, 0.7), (1, 0.7)],
        "train/loss_mean": [(0, 0.35), (1, 0.35)],
        "train/loss/gan.py:41": [(0, 0.5), (1, 0.6)],
        "train/loss/gan.py:44": [(0, 0.2), (1, 0.1)],
        "train/loss/gan.py:50": [(0, 9.0), (1, 8.0)],
    }


@pytest.mark.parametrize("optimizers", [[0, 0, 1, 1], [0, 1, 0, 1]], ids=["one after the other", "in turn"])
def test_optimizers_that_are_never_in_one_step_go_on_with_one_loss(optimizers: list[int]) -> None:
    """As the models of a cross-validation do, or two halves of a model that are updated in turn."""
    points = [(10 * at + 1, float(at), at) for at in range(4)]
    assert found(line(points, optimizers), steps=4)["train/loss"] == [(at, float(at)) for at in range(4)]


def test_a_function_that_calls_backward_for_several_lines_is_told_apart_by_them() -> None:
    real, fake = (line([(at, 1.0, 0)], file="/x/a.py", line=7, caller=["/x/a.py", at]) for at in (1, 2))
    seen = found(real, fake)
    assert seen["train/loss"] == [(0, 2.0)]
    assert seen["train/loss/a.py:1"] == seen["train/loss/a.py:2"] == [(0, 1.0)]


def test_losses_that_one_call_was_given_are_one() -> None:
    """Not passes of as many batches, whose mean would be the loss."""
    parts = [(at, value, update) for update, at in enumerate((1, 11)) for value in (0.5, 2.0 + update)]
    assert found(line(parts, **UNDIVIDED), fetches=2) == {"train/loss": [(0, 2.5), (1, 3.5)]}


def test_the_norm_after_clipping_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.zeros(3))
    norms = []
    for values in ([3.0, 4.0, 0.0], [0.1, 0.2, 0.2], [math.nan, 0.0, 0.0]):
        parameter.grad = torch.tensor(values)
        before = torch.nn.utils.clip_grad_norm_([parameter], 1.5)
        norms.append((before.item(), parameter.grad.norm().item()))
    times = np.arange(3) * 10 * MS + T0
    before, after = (np.array(column) for column in zip(*norms, strict=True))
    seen = found(
        RawSeries("train/grad_norm", "clipping", times, before, about={"max_norm": 1.5}),
        RawSeries("train/grad_norm", "clipping", times, before, about={"max_norm": 1.0, "again": True}),
    )
    assert [value for _, value in seen["train/grad_norm"]] == pytest.approx(before, nan_ok=True)
    assert [value for _, value in seen["train/grad_norm_clipped"]][::2] == pytest.approx(after, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    "broken",
    [
        {"name": ""},
        {"source": None},
        {"start_ns": -1},
        {"after_ns": [0]},
        {"after_ns": [0, -1]},
        {"after_ns": [0, True]},
        {"values": [1.0, "infinite"]},
        {"values": [1.0, None]},
        {"updates": [0]},
        {"updates": [0, 1e3]},
        {"updates": [0, 2**70]},
        {"times_ns": PACKED[:-4]},
        {"times_ns": PACKED + "="},
        {"times_ns": packed("q", [-1, 0])},
        {"times_ns": packed("q", [0])},
        {"values": PACKED + "é"},
    ],
)
def test_a_stretch_that_makes_no_sense_is_counted(broken: dict[str, Any]) -> None:
    good = {"name": "a", "source": "log", "start_ns": T0, "after_ns": [0, 1], "values": [1.0, "-inf"]}
    kept, refused = read_series({"series": [good, {**good, **broken}]})
    assert kept is not None
    assert refused is None
    (same,) = read_series({"series": [{"name": "a", "source": "log", "times_ns": PACKED, "values": good["values"]}]})
    assert same is not None
    assert same.times_ns.tolist() == kept.times_ns.tolist() == [T0, T0 + 1]
    assert kept.values.tolist() == [1.0, -math.inf]
    assert list(read_series({"series": 7})) == [None]


def test_a_run_without_metrics_has_an_empty_table() -> None:
    assert metrics_table([RawRank("rank-0", 0)]).schema["value"] == pl.Float64
