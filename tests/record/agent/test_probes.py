"""Probes go in and come out without a trace, and see what they are for; real torch, fake neighbours."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.record.agent import core, marks  # noqa: E402 - after the check for torch
from stepscope.record.agent.agent import Agent  # noqa: E402
from stepscope.record.agent.probes.loader import batch_content, batch_rows, batch_tokens  # noqa: E402
from stepscope.record.agent.probes.side_events import short_repr  # noqa: E402

from .fake_agent import Captured  # noqa: E402

pytestmark = pytest.mark.torch


def surface() -> list[Any]:
    """Everything of torch a probe may touch."""
    import torch.autograd.profiler as low
    import torch.profiler.profiler as high
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    owners = [
        *(low, low.profile, low.KinetoStepTracker, high._KinetoProfile, torch.nn.utils.clip_grad, torch.nn.utils),
        *(torch, torch.autograd, torch.cuda.nvtx, torch.amp.GradScaler, torch.optim.Optimizer, torch.profiler.profile),
        *(dataloader.DataLoader, dataloader._BaseDataLoaderIter, dataloader._MultiProcessingDataLoaderIter),
    ]
    hooks = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    hooks.append(torch.nn.modules.module._global_forward_pre_hooks)
    return [dict(vars(owner)) for owner in owners] + [dict(hook) for hook in hooks]


@pytest.fixture
def agent(captured: Captured) -> Agent:
    return captured.agent


def test_uninstalling_leaves_torch_exactly_as_it_was(tmp_path: Path) -> None:
    before = surface()
    agent = Captured(tmp_path).agent
    agent.probes.install_all()
    assert surface() != before
    agent.probes.uninstall_all()
    assert surface() == before


def test_a_wrapper_someone_wrapped_goes_quiet_instead_of_away(captured: Captured, agent: Agent) -> None:
    ours = torch.save
    torch.save = lambda *args, **kwargs: ours(*args, **kwargs)
    theirs = torch.save
    try:
        agent.probes.suspend("x")
        assert torch.save is theirs
        torch.save({}, "/dev/null")
        assert captured.of("save") == []
        agent.probes.resume()
        torch.save({}, "/dev/null")
        assert len(captured.of("save")) == 1
    finally:
        agent.probes.uninstall_all()
        torch.save = ours.__wrapped__


def test_a_loader_is_accelerates_by_who_asks_it_for_an_iterator(agent: Agent) -> None:
    """The same loader iterated by a script does not look ahead."""
    told: list[bool] = []
    agent.steps.loader_created = lambda *made: told.append(made[3])  # type: ignore[method-assign]
    accelerate = ModuleType("accelerate.data_loader")
    exec("def ask(loader): return iter(loader)", vars(accelerate))
    loader = torch.utils.data.DataLoader(range(2))
    for ask in (iter, accelerate.ask):
        ask(loader)
    assert told == [False, True]


def test_a_profilers_steps_are_marks_but_not_those_of_ours(agent: Agent) -> None:
    marked: list[str] = []
    agent.steps.mark = lambda source, _now: marked.append(source)  # type: ignore[method-assign]
    schedule = torch.profiler.schedule(wait=100, warmup=1, active=1)
    user = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule)
    agent.own_profiler_active = True
    ours = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule)
    agent.own_profiler_active = False
    ours.schedule(1)
    assert marked == []
    assert user.schedule(1) == schedule(1)
    assert marked == ["profiler_step"]
    agent.probes.suspend("x")
    assert user.schedule is schedule
    agent.probes.resume()
    user.schedule(2)
    assert marked == ["profiler_step"] * 2


def test_an_xla_sync_is_one_mark_however_deep(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[str] = []
    agent.steps.mark = lambda source, _now: marked.append(source)  # type: ignore[method-assign]
    xla, model = ModuleType("torch_xla"), ModuleType("torch_xla.core.xla_model")
    xla.sync = lambda **_options: "synced"  # type: ignore[attr-defined]
    model.mark_step = lambda: xla.sync()
    monkeypatch.setitem(sys.modules, "torch_xla", xla)
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    monkeypatch.setattr(core, "_agent", agent)
    core.imported("torch_xla")
    assert (xla.sync(wait=True), model.mark_step()) == ("synced", "synced")
    assert marked == ["xla_sync"] * 2


def test_construction_sites_name_the_line_and_hide_secrets(captured: Captured) -> None:
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    site = next(event for event in captured.of("site") if event["what"] == "AdamW")
    assert site["file"] == __file__
    assert site["function"].endswith("test_construction_sites_name_the_line_and_hide_secrets")
    assert site["arguments"]["lr"] == "0.0003"
    assert short_repr("hf_abcdefghijklmnopqrst") == "***"
    assert short_repr(torch.zeros(2)) == "Tensor"


def test_nvtx_ranges_are_regions(captured: Captured, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.probes.uninstall_all()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda _name: 0)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: 0)
    agent.probes.install_all()
    for _ in range(60):
        with torch.cuda.nvtx.range("attention"):
            pass
    agent.flush_regions()
    regions = captured.of("region")
    assert {(region["name"], region["source"]) for region in regions} == {("attention", "nvtx")}
    assert len(regions) == 51
    assert regions[-1]["count"] == 10
    agent.probes.uninstall_all()


def test_metrics_of_a_strange_device_are_left_out_and_said_so_once(captured: Captured) -> None:
    meta = torch.zeros((), device="meta")
    for value in (1, torch.tensor(2.5), float("nan"), meta, meta, "text", None, torch.zeros(3)):
        marks.log("loss", value)
    captured.finish()
    assert captured.curves() == [("log", "loss", [1.0, 2.5, "nan"], {})]
    assert len(captured.of("mark")) == 1


def test_a_mode_of_the_script_hears_what_it_would_without_us(captured: Captured) -> None:
    heard: list[str] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(function.__name__)
            return function(*args, **(kwargs or {}))

    def train() -> list[str]:
        heard.clear()
        model, scaler = torch.nn.Linear(2, 1), torch.amp.GradScaler("cpu")
        with Mode():
            for (rows,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), batch_size=2):
                torch.autograd.backward(scaler.scale(model(rows).sum()))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.update(1.0)
        return list(heard)

    recorded = train()
    captured.agent.probes.uninstall_all()
    assert recorded == train()
    captured.finish()
    assert {name for _, name, _, _ in captured.curves()} == {"train/loss", "train/grad_norm_scaled", "train/scale"}


def test_a_data_set_is_asked_for_its_length_only_where_that_does_nothing(captured: Captured) -> None:
    class Told(torch.utils.data.Dataset):  # type: ignore[type-arg]
        rows = (0,) * 8
        asked = 0

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> int:
            return index

    class Counted(Told):
        def __len__(self) -> int:
            self.asked += 1
            return 8

    class Wrapped(Told):
        def __init__(self, rows: Any) -> None:
            self.rows = rows

    class Named(Wrapped):
        @property
        def size(self) -> int:
            return self.rows.size  # type: ignore[no-any-return]

        def __len__(self) -> int:
            return self.size

    counted = Counted()
    named = Named(torch.zeros(8).numpy())
    for data in (Told(), counted, Wrapped(Told()), Wrapped(counted), torch.utils.data.Subset(counted, [1, 2]), named):
        iter(torch.utils.data.DataLoader(data, batch_size=2, shuffle=data is not counted))
    asked = counted.asked
    captured.agent.probes.uninstall_all()
    for data in (counted, Wrapped(counted)):
        iter(torch.utils.data.DataLoader(data, batch_size=2, shuffle=data is not counted))
    assert counted.asked == 2 * asked
    told = captured.of("loader")
    assert [(event["length"], event["iterable"]) for event in told] == [(n, False) for n in (4, None, 4, None, 1, 4)]


def test_a_loader_of_a_stream_is_told_as_such(captured: Captured) -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(X)

    list(torch.utils.data.DataLoader(Stream()))
    assert [event["iterable"] for event in captured.of("loader")] == [True]


def test_iterators_that_a_framework_makes_itself_are_loaders_of_their_data_set(captured: Captured) -> None:
    """As fastai does, whose loaders are none of torch's."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=2)
    for _ in range(2):
        list(torch.utils.data.dataloader._SingleProcessDataLoaderIter(loader))
    told = captured.of("loader")
    assert [event["num_workers"] for event in told] == [0, 0]
    assert {event["id"] for event in told} == {event["id"] for event in captured.of("batch")} == {told[0]["dataset"]}


@pytest.mark.parametrize(("size", "samples"), [(2, [2, 2]), (1, [5, 5, 5, 5])])  # one item may be a batch
def test_no_batch_has_more_samples_than_its_loader_gives_it(agent: Agent, size: int, samples: list[int]) -> None:
    """As the nodes of two graphs side by side."""
    told: list[int | None] = []
    agent.steps.fetch_end = lambda _token, rows, _now: told.append(rows)  # type: ignore[method-assign]
    nodes = torch.zeros(5, 3)
    list(torch.utils.data.DataLoader([nodes] * 4, batch_size=size, collate_fn=lambda items: [torch.cat(items), nodes]))
    assert told == samples


@pytest.mark.usefixtures("agent")
def test_no_code_in_python_runs_when_a_loader_goes() -> None:
    """What a signal's handler raises there is lost."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X))
    for _ in loader:
        pass
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    del loader
    sys.setprofile(None)
    assert not called


def test_marks_do_nothing_without_an_agent() -> None:
    marks.deactivate()
    marks.step()
    marks.mark("x")
    marks.log({"loss": object()})
    with marks.region("x") as region:
        assert region.name == "x"
    assert marks.region("y")(lambda a, b=2: a + b)(1) == 3


@pytest.mark.usefixtures("agent")
def test_functions_that_are_wrapped_are_found_by_their_names() -> None:
    """As pools of processes hand them on; what reads them needs nothing of ours."""
    clip, nvtx = torch.nn.utils.clip_grad, torch.cuda.nvtx
    functions = [torch.save, torch.set_num_threads, torch.compile, torch.autograd.backward, nvtx.range_push, os.system]
    for function in (*functions, os.posix_spawn, clip.clip_grad_norm_, torch.nn.utils.get_total_norm):
        text = pickle.dumps(function)
        assert pickle.loads(text) is function  # noqa: S301 - just written
        assert b"stepscope" not in text
    assert inspect.getfullargspec(torch.optim.Optimizer.__init__).args == ["self", "params", "defaults"]


@pytest.mark.usefixtures("agent")
def test_torchscript_knows_what_is_wrapped() -> None:
    @torch.jit.script  # type: ignore[untyped-decorator]
    def slope(x: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward([(x * x).sum()])
        found = torch.autograd.grad([(x**3).sum()], [x])[0]
        assert found is not None
        return found

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert slope(x).tolist() == [3.0, 12.0]
    assert x.grad.tolist() == [2.0, 4.0]


class WithModel(torch.optim.SGD):  # type: ignore[misc]
    def step(self, closure: Any) -> Any:
        self.given = closure
        return super().step(closure) if closure.__class__ in (FunctionType, MethodType, partial) else None


class Closures:
    def closure(self, loss: float = 1.0) -> float:
        return loss


@pytest.mark.usefixtures("agent")
def test_an_optimizer_is_given_what_the_script_gave_it() -> None:
    """A model or an object with methods as it is, a closure as one of its type, with what it holds."""
    model, held = torch.nn.Linear(1, 1), Closures()
    optimizer = WithModel(model.parameters(), lr=0.1)
    optimizer.step(model)
    assert optimizer.given is model
    assert optimizer.step(partial(held.closure, 2.0)) == 2.0
    assert (optimizer.given.func.__self__, optimizer.given.args) == (held, (2.0,))
    assert optimizer.step(held.closure) == 1.0
    assert optimizer.given.__self__ is held
    assert optimizer.step(closure=lambda: 3.0) == 3.0


IMAGE, X, Y = torch.zeros(3, 8, 8), torch.zeros(4, 2), torch.zeros(4)


@pytest.mark.usefixtures("agent")
def test_parameters_can_be_swapped_without_an_optimizer() -> None:
    """torch refuses where anybody has a reference, weak ones too."""
    one, two = (torch.nn.Parameter(torch.ones(2) * number) for number in (1, 2))
    for _ in range(2):
        (one * two).sum().backward()
        one.grad = two.grad = None
    torch.utils.swap_tensors(one, two)
    assert one.tolist() == [2.0, 2.0]


class Lazy(dict[str, Any]):
    """What is asked of a batch is made then, or cannot be."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(name)

    values = __len__ = __contains__ = __iter__ = __getattr__  # type: ignore[assignment]


class LazyObject:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    @property
    def shape(self) -> Any:
        raise AssertionError("shape")

    __getattr__ = Lazy.__getattr__


class LazyList(list[Any]):
    __getitem__ = __len__ = __iter__ = Lazy.__getattr__  # type: ignore[assignment]


def test_no_code_of_a_batch_is_called() -> None:
    for batch in (Lazy(input_ids=torch.zeros(4, 3).long()), LazyObject(data={"x": X}), LazyList([X])):
        assert batch_rows(batch) == 4
        assert batch_content(batch)[0] == 1
        assert batch_tokens(batch) == (12 if batch.__class__ is Lazy else 0)


IDS = torch.zeros(4, 16, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": IDS, "labels": IDS}, 64),
        ((IDS.int(), IDS), 64),
        (IDS, 64),
        ((IDS, torch.zeros(4, dtype=torch.int64)), 0),  # columns of categories
        ((IDS, IDS.float()), 64),
        ((IDS.float(), IDS), 0),
        ({"x": IDS}, 0),
        ([], 0),
        ("text", 0),
    ],
)
def test_tokens_of_a_batch(batch: Any, tokens: int) -> None:
    assert batch_tokens(batch) == tokens


def test_tokens_are_written_when_their_number_changes(captured: Captured) -> None:
    lengths = [8, 8, 5, 8]
    rows = torch.utils.data.DataLoader(lengths, batch_size=None, collate_fn=lambda n: {"input_ids": IDS[:2, :n]})
    assert [batch["input_ids"].numel() for batch in rows] == [2 * length for length in lengths]
    captured.finish()
    assert captured.curves() == [("loader", "perf/batch_tokens", [16, 10, 16], {})]


@pytest.mark.parametrize(
    ("batch", "size", "rows"),
    [
        (X, None, 4),
        ([X, Y], None, 4),
        ({"meta": "text", "x": X}, None, 4),
        (([X, X], Y), 4, 4),
        (([IMAGE, IMAGE], [{"boxes": torch.zeros(7, 4)}] * 2), 2, 2),
        (([IMAGE], [{}]), 2, 1),
        ("text", None, None),
        ([1, 2], None, None),
        (torch.tensor(3), None, None),
    ],
)
def test_rows_of_a_batch(batch: Any, size: int | None, rows: int | None) -> None:
    assert batch_rows(batch, size) == rows


def test_the_prefetching_thread_does_not_own_the_steps(agent: Agent) -> None:
    import threading

    agent.journal.claim = lambda: True  # type: ignore[method-assign]
    seen: dict[str, bool] = {}
    thread = threading.Thread(target=lambda: seen.update(fetcher=agent.accepts()))
    thread.start()
    thread.join()
    assert seen == {"fetcher": True}
    assert not agent.accepts()
    assert agent.accepts(strong=True)
    assert agent.accepts()
    thread = threading.Thread(target=lambda: seen.update(late=agent.accepts(strong=True)))
    thread.start()
    thread.join()
    assert seen["late"] is False
