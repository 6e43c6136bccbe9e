"""Loggers that a script calls: everything they were given is in the table of metrics, and their files are the same."""

from __future__ import annotations

import math

import polars as pl
import pytest

from tests.frameworks.catalogue import Loop, interpreter, missing
from tests.frameworks.compared import Compared, compare

pytestmark = [pytest.mark.frameworks, pytest.mark.process, pytest.mark.timeout(400)]

TOOLS = Loop("tools", "logged_tools", ("wandb", "tensorboard", "tensorboardX", "mlflow", "trackio"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    lacking = missing(interpreter(), (TOOLS,))
    if lacking:
        pytest.skip(f"{interpreter()} has no {', '.join(sorted(lacking))}")
    return compare(TOOLS, interpreter(), tmp_path_factory.mktemp("tools"))


def test_every_value_is_there_under_its_own_name_and_at_its_step(compared: Compared) -> None:
    table = pl.read_parquet(compared.folder / "tables" / "metrics.parquet")
    steps = compared.steps("train")["step"].to_list()
    for source, names in compared.truth["logged"].items():
        for name, values in names.items():
            kept = table.filter((pl.col("source") == source) & (pl.col("name") == name))
            assert kept["value"].to_list() == values, (source, name)
            if len(values) == len(steps):  # logged in each step; else after an epoch's last step of evaluation
                assert kept["step"].to_list() == steps, (source, name)
            else:
                assert kept["step"].to_list() == [13, 27], (source, name)
    kept = table.filter(~pl.col("source").is_in(["backward", "optimizer"]))
    told = {(source, name) for source, names in compared.truth["logged"].items() for name in names}
    assert set(kept.select("source", "name").iter_rows()) == {*told, ("wandb", "nothing")}
    assert all(math.isnan(value) for value in kept.filter(pl.col("name") == "nothing")["value"])


def test_files_of_the_loggers_are_the_same_but_for_times(compared: Compared) -> None:
    assert compared.plain.truth is not None, compared.plain.stderr[-2000:]
    assert compared.plain.truth["files"] == compared.truth["files"]
    files = compared.truth["files"]
    assert len(files["tensorboard"]["train"]["loss"]) == len(files["mlflow"]["loss"]) == len(files["trackio"]) == 20
    assert len(files["wandb"]) == 22
    assert compared.recorded.status == 0
