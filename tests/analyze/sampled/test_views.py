"""The views of sampled stacks together, and what counts as the loop where no step is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope import tables
from stepscope.analyze import Context, Facts
from stepscope.model.sampled import SampledViews
from stepscope.read.sampled_files import read_stack_files
from tests.builders import MS, T0, make_tables, step_rows
from tests.records import replace

SAMPLERS = Path(__file__).resolve().parents[4] / "shared" / "traces" / "py_spy"
needs_samples = pytest.mark.skipif(not SAMPLERS.is_dir(), reason=f"the real samples are not at {SAMPLERS}")
TRAIN = "/home/user/project/train.py"
LOADER = "torch/utils/data/dataloader.py"
NEXT = [f"_BaseDataLoaderIter.__next__ ({LOADER}:725)", "select (selectors.py:415)"]
CALL = ["Module._call_impl (torch/nn/modules/module.py:1790)", f"Net.forward ({TRAIN}:3)"]
BACKWARD = ["Tensor.backward (torch/_tensor.py:623)", "_engine_run_backward (torch/autograd/graph.py:979)"]


def views_of(context: Context) -> SampledViews | None:
    return Facts(context).sampled


def stack(frames: Sequence[str], samples: int, phase: str = "other", **more: Any) -> dict[str, Any]:
    return {"frames": frames, "samples": samples, "phase": phase, "start_ns": None, "end_ns": None, **more}


def loop_of(*stacks: dict[str, Any]) -> tuple[dict[str, float], float | None]:
    """The phases of a loop without steps, and the share of it in the loader."""
    views = views_of(Context(make_tables(stacks=stacks)))
    assert views is not None
    return views.phases, views.waits[0].wait_share if views.waits else None


def at(function: str, line: int) -> str:
    return f"{function} ({TRAIN}:{line})"


def test_the_loop_is_the_function_that_fetches_and_trains() -> None:
    epoch = [at("<module>", 90), at("main", 80), at("train_epoch", 31)]
    phases, wait = loop_of(
        stack([at("<module>", 90), at("main", 70), "randn (torch/x.py:3)"], 500),  # sets up
        stack([at("<module>", 90), at("main", 80), at("train_epoch", 20), f"__init__ ({LOADER}:3)"], 100),
        stack([*epoch, *NEXT], 60, "data_wait"),
        stack([*epoch[:2], at("train_epoch", 33), *CALL], 20, "forward"),
        stack([*epoch[:2], at("train_epoch", 34), *BACKWARD], 15, "backward"),
        stack([*epoch[:2], at("train_epoch", 36)], 5),
    )
    assert phases == pytest.approx({"data_wait": 0.6, "forward": 0.2, "backward": 0.15, "other": 0.05})
    assert wait == pytest.approx(0.6)


def test_what_cannot_be_said_has_a_reason() -> None:
    views = views_of(Context(make_tables(stacks=[stack([at("main", 3)], 10)])))
    assert views is not None
    assert views.phases == {}
    assert (views.waits, views.slow_steps, views.rank_lines) == ((), None, None)
    no_loop = "no step is known, and no sampled stack of a main thread fetches a batch or calls a model"
    assert views.absent["phases"] == views.absent["waits"] == no_loop
    assert views.absent["slow_steps"] == "the samples of this run carry no time"
    assert views.absent["rank_lines"] == "no stack was sampled in a training loop"


def test_a_run_without_stacks_has_no_views() -> None:
    assert views_of(Context(make_tables(steps=step_rows(600)))) is None


def test_stacks_of_memory_have_no_views() -> None:
    tables_of = make_tables(stacks=[stack([at("main", 3)], 10)])
    in_bytes = tables_of.segments.with_columns(unit=pl.lit("bytes"))
    assert views_of(Context(replace(tables_of, segments=in_bytes))) is None


def test_everything_together_with_times() -> None:
    steps_of = [
        {"start_ns": T0 + number * 20 * MS, "wall_ns": 20 * MS, "first_batch": False, "data_wait_ns": 10 * MS}
        for number in range(50)
    ]
    train = [at("train", 31), *NEXT], [at("train", 34), *BACKWARD]
    rows = []
    for step in steps_of:
        begin = step["start_ns"]
        rows.append({"frames": train[0], "phase": "data_wait", "start_ns": begin, "end_ns": begin + 10 * MS})
        rows.append({"frames": train[1], "phase": "backward", "start_ns": begin + 10 * MS, "end_ns": begin + 20 * MS})
    stacks = [{**row, "samples": 50, "start_ns": T0, "end_ns": T0 + 1000 * MS} for row in rows[:2]]
    views = views_of(Context(make_tables(steps=steps_of, stacks=stacks, stretches=rows)))
    assert views is not None
    (wait,) = views.waits
    assert wait.simultaneous
    assert wait.wait_share == pytest.approx(0.5)
    assert wait.wait_ms_per_step == pytest.approx(10)
    assert [(part.kind, part.share) for part in wait.parts] == [("unknown", 1.0)]
    assert views.absent["slow_steps"].startswith("0 of 49 sampled steady steps are slow")


@needs_samples
@pytest.mark.parametrize("path", sorted(SAMPLERS.glob("*.txt")), ids=lambda path: path.name)
def test_every_real_file_has_its_views(path: Path) -> None:
    views = views_of(Context(tables.build(read_stack_files([path]))))
    assert views is not None
    assert views.slow_steps is None
    assert "slow_steps" in views.absent
    if views.phases:
        assert sum(views.phases.values()) == pytest.approx(1)
    for wait in views.waits:
        assert wait.wait_share is not None
        assert 0 < wait.wait_share <= 1
        assert sum(part.share for part in wait.parts) == pytest.approx(1)
        assert sum(part.samples for part in wait.parts) == wait.samples <= wait.loop_samples
