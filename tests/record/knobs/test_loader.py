"""Knobs of the DataLoader: the decision for every combination, and what real loaders of real processes make of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.record.agent.knobs.loader import Given, plan

from .recorded import recorded

WISHES = st.fixed_dictionaries(
    {},
    optional={
        "num_workers": st.integers(0, 4),
        "prefetch_factor": st.integers(1, 8),
        "persistent_workers": st.booleans(),
        "pin_memory": st.booleans(),
    },
)
LOADERS = st.builds(
    Given,
    num_workers=st.integers(0, 3),
    iterable=st.booleans(),
    start_method=st.sampled_from(["fork", "spawn"]),
    daemon=st.booleans(),
    pins=st.booleans(),
)


@given(WISHES, LOADERS)
def test_every_wish_is_met_or_refused_with_a_reason_and_torch_takes_the_rest(
    wishes: dict[str, Any], given_loader: Given
) -> None:
    changes, refused = plan(wishes, given_loader)
    assert set(refused) <= set(wishes)
    for name, wish in wishes.items():
        assert refused[name] if name in refused else changes[name] == wish
    workers = changes.get("num_workers", given_loader.num_workers)
    # torch's rules, for a loader that was valid as the script made it
    if workers == 0:
        assert changes.get("prefetch_factor") is None
        assert not changes.get("persistent_workers")
        if given_loader.num_workers:
            assert changes["prefetch_factor"] is None
            assert changes["multiprocessing_context"] is None
            assert (changes["persistent_workers"], changes["timeout"]) == (False, 0)
    if workers and not given_loader.num_workers:
        assert (given_loader.iterable, given_loader.daemon, given_loader.start_method) == (False, False, "fork")
    if not given_loader.pins:
        assert not changes.get("pin_memory")


COMMON = """
import json, os, sys, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        cpus = sorted(os.sched_getaffinity(0))
        return torch.ones(2), -1 if info is None else info.id, torch.get_num_threads(), cpus[0], len(cpus), os.getpid()

class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from range(info.id if info else 0, 4, info.num_workers if info else 1)

model = torch.nn.Linear(2, 1)

def train(loader):
    seen = {"workers": set(), "threads": set(), "first_cpu": set(), "cpus": set(), "pids": set()}
    for rows, *facts in loader:
        model(rows).sum().backward()
        model.zero_grad()
        for name, values in zip(seen, facts):
            seen[name].update(values.tolist())
    return {name: sorted(values) for name, values in seen.items()}
"""

MORE = (
    COMMON
    + """
class Mine(DataLoader):
    def __init__(self, rows):
        super().__init__(rows, 4, False, None, None, 0, None, True)

plain = DataLoader(Rows(), 4, True)
epochs = [train(plain), train(plain)]
mine = Mine(Rows())
stream = DataLoader(Stream(), batch_size=None)
streamed = DataLoader(Stream(), batch_size=None, num_workers=1)
print(json.dumps({
    "epochs": epochs,
    "mine": [train(mine), mine.num_workers, mine.pin_memory],
    "stream": [sorted(stream), stream.num_workers, stream.prefetch_factor],
    "streamed": [sorted(streamed), streamed.num_workers, streamed.prefetch_factor],
}))
"""
)


@pytest.mark.process
@pytest.mark.torch
def test_workers_for_loaders_that_can_have_them(tmp_path: Any) -> None:
    run = recorded(
        tmp_path,
        MORE,
        "loader.num_workers=2",
        "loader.prefetch_factor=3",
        "loader.persistent_workers=true",
        "loader.pin_memory=false",
    )
    assert (run.status, run.stderr) == (0, "")
    printed = run.printed()
    for epoch in printed["epochs"]:
        assert (epoch["workers"], epoch["threads"]) == ([0, 1], [1])
    assert printed["epochs"][0]["pids"] == printed["epochs"][1]["pids"]
    assert printed["mine"][0]["workers"] == [0, 1]
    assert printed["mine"][1:] == [2, False]
    assert printed["stream"] == [[0, 1, 2, 3], 0, None]
    assert printed["streamed"] == [[0, 1, 2, 3], 2, 3]

    lines = {text: number for number, text in enumerate(MORE.splitlines(), 1)}
    at = {lines[text]: text.split(" =")[0] for text in lines if text.split(" =")[0] in ("plain", "stream", "streamed")}
    at[next(number for text, number in lines.items() if "super()" in text)] = "mine"
    found = {
        name: {at[row["line"]]: (row["applied"], row["observed"], row["reason"]) for row in run.knobs("loader." + name)}
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
    }
    good = (True, "2, processes alive: 2", None)
    workers = found["num_workers"]
    assert (workers["plain"], workers["mine"], workers["streamed"]) == (good, good, good)
    assert workers["stream"][0] is False
    assert "get_worker_info" in workers["stream"][2]
    assert found["prefetch_factor"]["plain"] == (True, "3, batches asked for ahead: 2", None)
    assert found["prefetch_factor"]["stream"] == (False, None, "this loader has no workers")
    assert found["persistent_workers"]["mine"] == (True, "true", None)
    assert found["pin_memory"]["mine"] == (True, "false", None)
    assert {row["file"] for row in run.events("knob")} == {str(tmp_path / "train.py")}


FEWER = (
    COMMON
    + """
loader = DataLoader(Rows(), batch_size=4, num_workers=2, prefetch_factor=4, persistent_workers=True, timeout=30,
                    multiprocessing_context="fork")
unused = DataLoader(Rows(), num_workers=2)
try:
    DataLoader(Rows(), batch_size=-1)
    error = None
except ValueError as raised:
    error = str(raised)
print(json.dumps([train(loader), loader.num_workers, loader.prefetch_factor, loader.persistent_workers, error]))
sys.exit(4)
"""
)


@pytest.mark.process
@pytest.mark.torch
def test_no_workers_and_what_has_no_meaning_without_them(tmp_path: Any) -> None:
    run = recorded(tmp_path, FEWER, "loader.num_workers=0", "loader.prefetch_factor=2", "loader.pin_memory=true")
    assert (run.status, run.stderr) == (4, "")
    seen, *loader, error = run.printed()
    assert seen["workers"] == [-1]
    assert loader == [0, None, False]
    assert "batch_size" in error
    assert [(row["applied"], row["observed"]) for row in run.knobs("loader.num_workers")][-1:] == [
        (True, "0, processes alive: 0")
    ]
    assert {row["reason"] for row in run.knobs("loader.prefetch_factor")} == {"this loader has no workers"}
    import torch

    if not torch.accelerator.is_available():
        (reason,) = {row["reason"] for row in run.knobs("loader.pin_memory")}
        assert "no accelerator" in reason


LEFT_ALONE = (
    COMMON
    + """
import multiprocessing
if sys.argv[1:] == ["spawn"]:
    multiprocessing.set_start_method("spawn")
loader = DataLoader(Rows(), batch_size=4)
print(json.dumps([train(loader)["workers"], loader.num_workers]))
"""
)


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.parametrize("case", ["spawn", "fault"])
def test_a_loader_that_is_left_alone_trains_as_the_script_says(tmp_path: Any, case: str) -> None:
    faults = "knob.loader" if case == "fault" else None
    knobs = ("loader.num_workers=2", "cpu.worker_affinity=0")
    run = recorded(tmp_path, LEFT_ALONE, *knobs, arguments=(case,), faults=faults)
    assert (run.status, run.stderr) == (0, "")
    assert run.printed() == [[-1], 0]
    row = run.knob("loader.num_workers")
    assert (row["applied"], row["observed"]) == (False, None)
    assert ("spawn" if case == "spawn" else "InjectedFault") in row["reason"]
    assert run.knob("cpu.worker_affinity")["reason"] == "the script started no loader workers"
