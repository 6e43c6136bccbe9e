"""Constructions lead to the loader that is fetched from, through a framework that makes one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.record.agent.processes import Outcome, run_script
from tests.record.agent.window_harness import read_events, read_steps, recorded

torch = pytest.importorskip("torch")

from stepscope.record.agent.probes.loader import batch_content  # noqa: E402 - after the check for torch

pytestmark = pytest.mark.torch

SCRIPT = """import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate.data_loader import prepare
from transformers import training_args

class Arguments(training_args.TrainingArguments):
    def __init__(self):
        self.__post_init__()

settings = Arguments()
images = TensorDataset(torch.ones(64, 3), torch.ones(64))
held_out = DataLoader(TensorDataset(torch.ones(64, 3), torch.ones(64)), batch_size=4)
loader = DataLoader(images, batch_size=4)
loader = prepare(loader)
from plain_sgd import PlainSGD
model = torch.nn.Linear(3, 1)
optimizer = PlainSGD(model.parameters(), 0.1)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for x, y in held_out:
            model(x)
"""
PREPARE = """from torch.utils.data import DataLoader

class Shard(DataLoader):
    pass

def prepare(loader):
    return Shard(loader.dataset, batch_sampler=loader.batch_sampler)
"""
ARGUMENTS = """class TrainingArguments:
    def __post_init__(self):
        pass
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A script with loaders for training and evaluation, the first made anew by a library called as a framework."""
    folder = tmp_path_factory.mktemp("sites")
    installed = folder / "site-packages"
    for package, file, text in (("accelerate", "data_loader", PREPARE), ("transformers", "training_args", ARGUMENTS)):
        (installed / package).mkdir(parents=True)
        (installed / package / "__init__.py").write_text("")
        (installed / package / f"{file}.py").write_text(text)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    found = run_script(folder, script, path=(installed,))
    assert found.status == 0, found.stderr
    assert found.events("probe_error") == []
    return found


def test_constructions_lead_to_what_is_iterated(outcome: Outcome) -> None:
    sites = {event["line"]: event for event in outcome.events("site") if event["what"] == "DataLoader"}
    iterated = outcome.events("loader")
    assert [event["id"] for event in iterated] == [sites[14]["id"], sites[12]["id"]] * 2
    assert len({site["id"] for site in sites.values()}) == 3
    assert {event["batch_size"] for event in iterated} == {4}  # of its sampler, where the loader has none
    # the loader of a framework keeps the data set of the user's
    assert (sites[14]["via"], "via" in sites[13]) == ("accelerate/data_loader.py", False)
    assert sites[13]["dataset"] == sites[14]["dataset"] != sites[12]["dataset"]
    # a framework that is imported later tells its settings: where the user's own `__init__` is left for its code
    (told,) = [event for event in outcome.events("site") if event["what"] == "transformers.TrainingArguments"]
    assert (told["line"], told["called"]) == (8, "Arguments")
    # some batches say what a worker would hand over: a few of each iterator, of 16
    looked = outcome.events("batch")
    assert {event["id"] for event in looked} == {sites[14]["id"], sites[12]["id"]}
    assert {(event["tensors"], event["bytes"]) for event in looked} == {(2, 4 * (3 + 1) * 4)}
    assert len(looked) <= 3 * 4
    assert all(event["duration_ns"] > 0 for event in looked)


class Unread:
    """A tensor's shape and size, and nothing else."""

    shape = (8, 2)
    nbytes = 64

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


@pytest.mark.parametrize(
    ("batch", "content"),
    [
        (torch.ones(8, 2), (1, 64, 0)),
        ([torch.ones(8), torch.ones(8)], (2, 64, 1)),
        ([Unread()], (1, 64, 1)),
        ({"x": torch.ones(8), "name": ["ab", "cd"]}, (1, 36, 4)),
        ([[1] * 1000], (0, 0, 1002)),  # of many alike the first stand for all
        (None, (0, 0, 1)),
        (7, (0, 0, 1)),
        ("text", (0, 4, 1)),
        ([], (0, 0, 1)),
    ],
)
def test_tensors_bytes_and_objects_are_counted_without_reading(batch: Any, content: tuple[float, ...]) -> None:
    assert batch_content(batch) == content


def test_what_holds_itself_ends() -> None:
    batch: list[Any] = [torch.ones(2)]
    batch.append(batch)
    tensors, _, objects = batch_content(batch)
    assert (tensors, objects) == (5, 6)


class Strange(str):
    """A text whose length is nobody's to ask for."""

    def __len__(self) -> int:
        raise RuntimeError("not now")


def strange(items: list[Any]) -> list[Any]:
    return [torch.stack(items), Strange()]


def test_a_batch_that_cannot_be_counted_costs_its_count_alone(tmp_path: Path) -> None:
    with recorded(tmp_path, mode="off"):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for batch in torch.utils.data.DataLoader([torch.ones(1)] * 40, batch_size=4, collate_fn=strange):
            (batch[0] * weight).sum().backward()
            optimizer.step()
    assert [event["probe"] for event in read_events(tmp_path, "probe_error")] == ["batch"]
    assert read_events(tmp_path, "batch") == []
    assert [(step["kind"], step["samples"]) for step in read_steps(tmp_path)] == [("train", 4)] * 10
