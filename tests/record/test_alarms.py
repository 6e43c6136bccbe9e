"""A planted NaN or leap is named with its step, its series and its samples; a healthy run gives no alarm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset  # noqa: E402

from stepscope.analyze import metrics  # noqa: E402 - after the check for torch
from stepscope.analyze.metrics import spikes  # noqa: E402
from stepscope.record.agent import alarms  # noqa: E402

from .agent.fake_agent import Captured  # noqa: E402

pytestmark = pytest.mark.torch

SAMPLES, BATCH, POISONED = 1_200, 8, 611
ALIVE: list[Any] = []  # as a script's own data set is


class Samples(Dataset[Any]):
    """Rows that a line explains, each with its number; what is poisoned has `value` for a target."""

    def __init__(self, value: float | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randn(SAMPLES, 6, generator=generator)
        self.targets = self.rows.sum(1) + torch.randn(SAMPLES, generator=generator)
        if value is not None:
            self.targets[POISONED] = value
        self.samples = [(f"pictures/{index}.png", index % 10) for index in range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Any, int]:
        return self.rows[index], self.targets[index], index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Samples(math.nan)
        return (data[index] for index in range(SAMPLES))


class Script:
    """A model to train; `used` are the samples of each step's batches as the script saw them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.used: list[list[list[int]]] = [[]]

    def backward(self, batch: Any) -> Any:
        rows, targets, numbers = batch
        self.used[-1].append(numbers.tolist())
        loss = (self.model(rows).squeeze(1) - targets).abs().mean()
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.used.append([])

    def train(self, batches: Any, *, every: int = 1, clip: bool = False, last: int = -1) -> Script:
        """An epoch, with an update after `every` batches, and after batch `last`."""
        for number, batch in enumerate(batches, 1):
            self.backward(batch)
            if clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if number % every == 0 or number == last:
                self.update()
        return self

    @property
    def step(self) -> int:
        """The number of the step under way."""
        return len(self.used) - 1

    def step_with(self, sample: int) -> int:
        return next(step for step, batches in enumerate(self.used) if any(sample in batch for batch in batches))


def loader(data: Any, **options: Any) -> Any:
    options = {"batch_size": BATCH, "shuffle": True, "generator": torch.Generator().manual_seed(7), **options}
    ALIVE[:] = [data]
    return DataLoader(data, **options)


def one_ahead(batches: Any) -> Iterator[Any]:
    """As Accelerate's loaders do: a batch is handed out once the next one is there."""
    iterator = iter(batches)
    held = next(iterator)
    for batch in iterator:
        yield held
        held = batch
    yield held


Planted = tuple[Script, int, str]


def poisoned(workers: int) -> Planted:
    script = Script().train(loader(Subset(Samples(math.nan), range(SAMPLES)), num_workers=workers))
    return script, script.step_with(POISONED), "train/loss"


def far_off_and_one_ahead() -> Planted:
    script, batches = Script(), loader(Samples(9_000.0))
    for _ in range(2):
        script.train(one_ahead(batches), clip=True)
    return script, script.step_with(POISONED), "train/loss"


def fetched_ahead_and_accumulated() -> Planted:
    """As Accelerate's own loaders, which are told by their module, with a last update of fewer batches."""

    class Shard(DataLoader[Any]):
        __module__ = "accelerate.data_loader"

        def __iter__(self) -> Any:
            return one_ahead(super().__iter__())

    script, ahead = Script(), Shard(Samples(math.nan), batch_size=BATCH)
    ALIVE[:] = [ahead]
    for _ in range(2):
        script.train(ahead, every=4, last=len(ahead))
    return script, script.step_with(POISONED), "train/loss"


def far_off_while_accumulating() -> Planted:
    script = Script().train(loader(Samples(9_000.0), num_workers=2), every=3)
    return script, script.step_with(POISONED), "train/loss"


def fetched_before_trained() -> Planted:
    """Three batches are fetched, then trained on; one layer loses its weights."""
    script, batches = Script(), iter(loader(Samples()))
    while script.step < 49:
        fetched = [next(batches) for _ in range(3)]
        if script.step == 31:
            script.model[2].weight.data[0, 3] = math.inf
        for batch in fetched:
            script.backward(batch)
        script.update()
    return script, 31, "train/loss"


def in_the_second_epoch_of_workers_that_stay() -> Planted:
    script, batches = Script(), loader(Samples(), num_workers=2, persistent_workers=True)
    script.train(batches)
    script.model[2].weight.data[0, 3] = math.inf
    script.train(batches)
    return script, SAMPLES // BATCH, "train/loss"


def gradient_lost() -> Planted:
    """A layer hands on gradients that are no numbers; the loss shows it a step later."""
    script = Script()
    for batch in loader(Samples(), num_workers=2):
        if script.step == 101:
            hook = script.model[0].weight.register_hook(lambda gradient: gradient * math.nan)
        script.backward(batch)
        torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
        if script.step == 101:
            hook.remove()
        script.update()
    return script, 101, "train/grad_norm"


def rate_jumps() -> Planted:
    script = Script()
    for batch in loader(Samples()):
        script.backward(batch)
        if script.step == 90:
            script.optimizer.param_groups[0]["lr"] = 1e5
        script.update()
    return script, 91, "train/loss"


# what goes wrong: (script, step, series)
PLANTED: dict[str, Callable[[], Planted]] = {
    "a batch, no workers": lambda: poisoned(0),
    "a batch, two workers": lambda: poisoned(2),
    "a batch, fetched one ahead": far_off_and_one_ahead,
    "a batch, fetched ahead and accumulated": fetched_ahead_and_accumulated,
    "a batch, gradients accumulated": far_off_while_accumulating,
    "a layer, batches fetched before": fetched_before_trained,
    "a layer, workers that stay": in_the_second_epoch_of_workers_that_stay,
    "a layer's gradient": gradient_lost,
    "the learning rate": rate_jumps,
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_step_its_series_and_its_samples(captured: Captured, name: str) -> None:
    script, step, series = PLANTED[name]()
    captured.finish()
    alarm = captured.of("alarm")[0]
    assert (alarm["step"], alarm["series"]) == (step, series)
    used = [(number, batch) for number, batches in enumerate(script.used) for batch in batches]
    at = next(place for place, (number, batch) in enumerate(used) if number == step)
    if "a batch" in name:
        at = next(place for place, (_, batch) in enumerate(used) if POISONED in batch)
    told = [(batch["step"], batch["indices"]) for batch in alarm["batches"]]
    assert told == used[at - 2 : at + 1]
    assert [batch["suspect"] for batch in alarm["batches"]] == [False, False, True]
    last = alarm["batches"][-1]
    assert last["files"] == [f"pictures/{index}.png" for index in used[at][1]]
    assert last["targets"] == [index % 10 for index in used[at][1]]
    assert last["samples"] == BATCH
    assert len(captured.of("alarm")) <= 3


@pytest.mark.parametrize("series", ["train/loss", "train/grad_norm"])
def test_a_norm_is_of_the_backward_pass_before_it(captured: Captured, series: str) -> None:
    """Without an optimizer the step is over when its backward pass is."""
    weight = torch.nn.Parameter(torch.ones(3))
    for number in range(40):
        loss = weight.sum()
        if number == 20 and series == "train/loss":
            loss = loss * math.inf
        elif number == 20:
            loss.register_hook(lambda gradient: gradient * math.nan)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        if number != 20:
            weight.data -= 0.01 * weight.grad
        weight.grad = None
    captured.finish()
    alarm = captured.of("alarm")[0]
    assert (alarm["series"], alarm["step"]) == (series, 19), "the first pass alone tells that there is no optimizer"


def test_a_crash_in_the_step_itself_and_a_batch_that_was_left_out(captured: Captured) -> None:
    script, seen = Script(), []
    batches = loader(Samples(math.nan))
    for batch in batches:
        seen.append(batch[2].tolist())
        if len(seen) in (20, 40):
            continue
        if not torch.isfinite(script.backward(batch)):
            break
        script.update()
    captured.finish()
    (alarm,) = captured.of("alarm")
    assert (alarm["step"], alarm["value"]) == (script.step, "nan")
    assert [batch["indices"] for batch in alarm["batches"]] == seen[-3:]


def test_a_stream_has_positions_and_a_strange_sampler_what_is_a_number(captured: Captured) -> None:
    script = Script()
    script.train(DataLoader(Stream(), batch_size=BATCH))
    captured.finish()
    (alarm,) = captured.of("alarm")
    step = script.step_with(POISONED)
    assert [(batch["batch"], batch["indices"]) for batch in alarm["batches"]] == [
        (position, None) for position in range(step - 2, step + 1)
    ]
    assert "iterable" in alarm["batches"][-1]["reason"]


@pytest.mark.parametrize(
    ("own", "workers"), [("tuples", 0), ("tuples", 2), ("one list", 0), ("one large list", 0), ("texts", 0)]
)
def test_what_a_sampler_of_the_scripts_gives(captured: Captured, own: str, workers: int) -> None:
    class Sampler:
        def __iter__(self) -> Iterator[Any]:
            filled: list[Any] = []
            large = 520 if own == "one large list" else 1
            for start in range(592, 640, BATCH):
                numbers = list(range(start, start + BATCH))
                filled[:] = [str(number) for number in numbers] if own == "texts" else numbers * large
                yield tuple(numbers) if own == "tuples" else filled

    class Named(Samples):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(int(index))

    script = Script()
    script.train(DataLoader(Named(math.nan), batch_sampler=Sampler(), num_workers=workers))
    captured.finish()
    (alarm,) = captured.of("alarm")
    assert alarm["step"] == script.step_with(POISONED)
    (used,) = script.used[alarm["step"]]
    last = alarm["batches"][-1]
    reason = {"texts": "gives str", "one large list": "again and again"}.get(own)
    assert last["indices"] == (used if reason is None else None)
    assert reason is None or reason in last["reason"]


def test_a_sampler_ends_and_fails_as_without_us(captured: Captured) -> None:
    ended = []

    class Own:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(4 * BATCH)
                raise KeyError("the script's own")
            finally:
                ended.append(True)

        def __len__(self) -> int:
            return 5 * BATCH

    iterator = iter(DataLoader(Samples(), batch_size=BATCH, sampler=Own()))
    next(iterator)
    del iterator
    assert ended == [True], "as soon as nobody asks any more"
    with pytest.raises(KeyError) as failed:
        list(DataLoader(Samples(), batch_size=BATCH, sampler=Own()))
    assert not [entry for entry in failed.traceback if "stepscope/record" in str(entry.path)]
    assert captured.of("probe_error") == []


@pytest.mark.parametrize(
    ("entries", "file"),
    [
        ([f"/data/{index}.png" for index in range(SAMPLES)], f"/data/{POISONED}.png"),
        (tuple((Path(f"{index}.wav"), 1) for index in range(SAMPLES)), f"{POISONED}.wav"),
        ([f"Number {index}. And/or another." for index in range(SAMPLES)], None),  # texts are no names
    ],
)
def test_a_data_set_may_call_its_list_of_files_as_it_likes(captured: Captured, entries: Any, file: str | None) -> None:
    data, script = Samples(math.nan), Script()
    del data.samples
    data.length, data.own_list = [SAMPLES], entries
    script.train(loader(data))
    captured.finish()
    (suspect,) = [batch for batch in captured.of("alarm")[0]["batches"] if batch["suspect"]]
    files = suspect.get("files") or [None] * len(suspect["indices"])
    assert files[suspect["indices"].index(POISONED)] == file


def test_large_batches_are_cut_and_names_are_masked(captured: Captured) -> None:
    secret = "https://me:hunter2@bucket/picture.png"
    data = Samples(math.nan)
    data.samples = [(secret, 0)] * SAMPLES
    script = Script()
    large = [list(range(SAMPLES)) * 10 for _ in range(2)]
    script.train(loader(data, batch_sampler=large, batch_size=1, shuffle=False))
    captured.finish()
    (alarm,) = captured.of("alarm")
    (batch,) = alarm["batches"]
    assert (len(batch["indices"]), batch["samples"]) == (10_000, 12_000)
    assert len(batch["files"]) == 1_000
    assert "hunter2" not in str(batch["files"])


def healthy(seed: int) -> list[float]:
    """A loss that falls and levels off; its noise is normal, heavy-tailed, of factors, or grows as it falls."""
    draw = random.Random(seed)
    values = []
    for step in range(1_500):
        level = 2.5 * math.exp(-step / (50 + 20 * seed)) + (0.02, 0.3, 1.0)[seed % 3]
        noise = draw.gauss(0, 1)
        if seed % 4 == 1:
            noise /= math.sqrt(draw.gammavariate(2.5, 0.4))  # Student's t with 5 degrees of freedom
        if seed % 4 == 2:
            values.append(level * math.exp(0.5 * noise))
        elif seed % 4 == 3:
            values.append(abs(level + 0.1 * noise) + draw.expovariate(20))
        else:
            values.append(level + 0.05 * noise)
    return values


@pytest.mark.parametrize("read_at_once", [1, 64])
def test_no_alarm_in_healthy_series(read_at_once: int) -> None:
    for seed in range(16):
        watched, values = alarms.Watched(), healthy(seed)
        found = []
        for at in range(0, len(values), read_at_once):
            found += watched.look(list(range(read_at_once)), values[at : at + read_at_once])
        assert found == [], seed
        top = max(values[-200:])
        assert watched.look([0], [1_000 * top]), seed  # though it would be heard


LEAPS: dict[str, tuple[int, int, Callable[[Any], list[float]]]] = {  # how many of 40 series have one
    "wrong labels, small batches": (30, 40, lambda draw: [
        *((0.1 + math.exp(-step / 60)) * draw.gammavariate(3, 1 / 3) for step in range(300)), 4.0
    ]),
    "first norms, a rare class": (0, 3, lambda draw: [
        draw.gauss(0.8, 0.02) + (draw.random() < 0.1) * draw.expovariate(2) for _ in range(80)
    ]),
    "a margin that is kept": (0, 0, lambda draw: [(draw.random() < 0.03) * draw.expovariate(500) for _ in range(300)]),
}  # fmt: skip


def test_on_the_way_and_afterwards_go_by_the_same_numbers() -> None:
    """The agent hands nothing to the analysis, so that they stand in both."""
    names = [name for name, value in vars(alarms).items() if isinstance(value, int | float) and hasattr(metrics, name)]
    assert {"SCORE", "LOG_SCORE", "TAIL", "WINDOW"} <= {*names}
    assert {name: getattr(alarms, name) for name in names} == {name: getattr(metrics, name) for name in names}


@pytest.mark.parametrize("name", LEAPS)
def test_a_leap_is_told_from_a_tail_on_the_way_as_afterwards(name: str) -> None:
    least, most, series = LEAPS[name]
    every = [series(random.Random(seed)) for seed in range(40)]
    on_the_way = [[one.time_ns for one in alarms.Watched().look(range(len(each)), each)] for each in every]
    for found in (on_the_way, [[leap.at for leap in spikes(numpy.array(each))] for each in every]):
        assert least <= sum(map(bool, found)) <= most
        assert not least or all(leaps in ([], [300]) for leaps in found)


@pytest.mark.parametrize("kind", ["plain", "accumulated", "adam", "tiny batches"])
def test_no_alarm_in_a_healthy_run(captured: Captured, kind: str) -> None:
    script = Script()
    if kind == "adam":
        script.optimizer = torch.optim.Adam(script.model.parameters(), lr=0.01)
    size = 1 if kind == "tiny batches" else BATCH
    for _ in range(2):
        for number, batch in enumerate(loader(Samples(), batch_size=size), 1):
            script.backward(batch)
            if kind != "accumulated" or number % 4 == 0:
                torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
                script.update()
    captured.finish()
    assert captured.of("metrics")
    assert captured.of("alarm") == []


def test_a_scaler_that_looks_for_its_scale_is_no_alarm(captured: Captured) -> None:
    script, scaler = Script(), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    norms = []
    for rows, targets, _ in loader(Samples()):
        loss = (script.model(rows).squeeze(1) - targets).abs().mean()
        scaler.scale(64 * loss).backward()
        scaler.unscale_(script.optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0))
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
    captured.finish()
    assert not math.isfinite(norms[0])
    assert math.isfinite(norms[-1])
    assert captured.of("alarm") == []


@pytest.mark.parametrize("fault", ["batches", "alarms"])
def test_a_defect_of_ours_costs_the_data_alone(tmp_path: Path, fault: str) -> None:
    captured = Captured(tmp_path, faults=fault)
    captured.agent.probes.install_all()
    try:
        script, _, _ = poisoned(0)
    finally:
        captured.finish()
    alarms_told = captured.of("alarm")
    assert [event["probe"] for event in captured.of("probe_error")] == [fault]
    assert [alarm["step"] for alarm in alarms_told] == ([script.step_with(POISONED)] if fault == "batches" else [])
    assert len(captured.of("loader")) == 1
    assert captured.of("metrics")


def test_a_lasting_trouble_is_one_alarm_and_a_run_has_few(captured: Captured) -> None:
    script = Script()
    for _ in range(4):
        for batch in loader(Samples()):
            script.backward(batch)
            script.update()
            if script.step == 200:
                script.model[2].bias.data += 4_000  # from here on all losses are large, until it is learnt
    for batch in loader(Samples()):
        script.model[0].weight.data[0, 0] = math.nan
        script.backward(batch)
        script.update()
    captured.finish()
    steps = [alarm["step"] for alarm in captured.of("alarm")]
    assert steps[0] == 200
    assert 600 in steps
    assert len(steps) <= 4
