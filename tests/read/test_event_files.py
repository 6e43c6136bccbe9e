"""Event files of TensorBoard, as its own writers make them; whatever is done to a file, nothing is made up."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope import api
from stepscope.read.event_files import read_scalars
from stepscope.read.raw import Losses
from tests.cli.calls import call

START = 1_750_000_000.0


def written(folder: Path, count: int = 40) -> Path:
    """A file of torch's writer: scalars in both of its styles, a text and a histogram."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(count):
            writer.add_scalar("a/loss", 1.0 / (step + 1), step, walltime=START + step)
            writer.add_scalar("new", float(step), step, walltime=START + step, new_style=True)
        writer.add_scalar("a/loss", math.nan, 2**40, walltime=START + 999)
        writer.add_text("said", "<b>", 1)
        writer.add_histogram("spread", np.arange(3.0), 1)
    return next(folder.glob("*tfevents*"))


@pytest.mark.torch
def test_what_torch_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "logs" / "one")
    written(tmp_path / "logs" / "two", 3)
    rows = api.open_run(tmp_path / "logs").table("metrics").rows
    assert Counter((row["process"], row["name"]) for row in rows) == {
        ("one", "a/loss"): 41,
        ("one", "new"): 40,
        ("two", "a/loss"): 4,
        ("two", "new"): 3,
    }
    new = [
        (row["step"], row["time_ns"], row["value"]) for row in rows if (row["process"], row["name"]) == ("one", "new")
    ]
    assert new == [(step, int(START + step) * 10**9, float(step)) for step in range(40)]
    assert call("analyze", tmp_path / "logs") == 0
    assert "no step was seen" in capfd.readouterr().out


@pytest.mark.torch
def test_damage_takes_points_and_makes_none(tmp_path: Path) -> None:
    file = written(tmp_path / "whole", 12)
    data, whole = file.read_bytes(), Counter(map(str, read_scalars(file, Losses(), "").rows()))
    other = tmp_path / "events.out.tfevents.1"

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=3), st.integers(0, len(data))
    )
    def damaged(changes: list[tuple[int, int]], length: int) -> None:
        bytes_ = bytearray(data)
        for place, byte in changes:
            bytes_[place] = byte
        other.write_bytes(bytes_[:length])
        losses = Losses()
        found = Counter(map(str, read_scalars(other, losses, "").rows()))
        assert found <= whole
        if found < whole:
            assert losses.counts or length < len(data)

    damaged()
