"""Values that are kept: the very ones the script sees, read without waiting for a device and without their graph."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stepscope.record.agent import marks  # noqa: E402 - after the check for torch
from stepscope.record.agent.metrics import EVERY_NS, RINGS_LIMIT, SIZE, Ring  # noqa: E402

from .fake_agent import Captured  # noqa: E402

pytestmark = pytest.mark.torch


def kept(captured: Captured) -> dict[str, list[Any]]:
    """What was written, by name."""
    return {name: values for (_, name), values in captured.kept().items()}


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def test_nothing_is_read_one_by_one_and_no_device_is_waited_for(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    calls: list[str] = []
    waits = ("item", "cpu", "tolist", "numpy", "__float__", "__bool__", "__int__", "to")
    for owner, names in (
        (torch.Tensor, waits),
        (torch.cuda, ("synchronize",)),
        (torch.cuda.Stream, ("synchronize",)),
        (torch.cuda.Event, ("synchronize",)),
    ):
        for name in names:
            original = getattr(owner, name)
            monkeypatch.setattr(
                owner,
                name,
                lambda *args, _name=name, _of=original, **more: (calls.append(_name), _of(*args, **more))[1],
            )
    captured.agent.probes.uninstall_all()
    train(model, optimizer)
    usual, calls[:] = list(calls), []
    captured.agent.probes.install_all()
    train(model, optimizer)
    marks.log({"a": torch.tensor(1.0)})
    captured.agent.metrics.finish()
    assert calls == usual


def test_a_value_is_kept_without_its_graph_and_without_a_larger_storage(captured: Captured) -> None:
    class Node(torch.autograd.Function):  # type: ignore[misc]  # one that can be referred to weakly
        @staticmethod
        def forward(context: Any, values: Any) -> Any:
            context.save_for_backward(values)
            return values.clone()

        @staticmethod
        def backward(_context: Any, gradient: Any) -> Any:
            return gradient

    weight = torch.ones(1000, requires_grad=True)
    activations = weight * 2
    each = Node.apply(activations)
    node, saved = weakref.ref(each.grad_fn), weakref.ref(activations)
    each[7].backward(retain_graph=True)
    assert node() is not None
    del each, activations
    gc.collect()
    assert (node(), saved()) == (None, None)
    assert kept(captured) == {"train/loss": [2.0]}


def test_roots_of_many_kinds(captured: Captured) -> None:
    class Named(torch.Tensor):  # type: ignore[misc]  # as fastai's are
        pass

    class Sharded:  # as a distributed tensor names its own part
        def __init__(self, local: Any) -> None:
            self._local_tensor = local

    weight = torch.ones(3, requires_grad=True)
    weight.sum().as_subclass(Named).backward()
    (weight.sum(dim=0, keepdim=True).reshape(1, 1) * 2).backward()
    weight.to(torch.bfloat16).sum().mul(3).backward()
    weight.double().prod().mul(float("inf")).backward()
    (weight * 2).backward(torch.ones(3))
    torch.autograd.backward([weight.sum(), weight.prod()])
    torch.autograd.backward([weight.sum(), weight * 2], [None, torch.ones(3)])  # a part alone would be no loss
    torch.autograd.backward((weight.sum() * 5,))
    with pytest.raises(RuntimeError, match="grad can be implicitly created"):
        (weight * 2).backward()
    marks.log("part", Sharded(weight.sum() * 7))
    assert kept(captured) == {"train/loss": [3.0, 6.0, 9.0, "inf", 3.0, 1.0, 15.0], "part": [21.0]}


def test_lines_in_any_turn_keep_their_own_losses_and_are_not_heard(captured: Captured) -> None:
    """A loss of the line that it is the turn of is read at once: as it would be by a look in full."""

    def one(loss: Any) -> None:
        loss.backward()

    def other(loss: Any) -> None:
        torch.autograd.backward(loss)

    def by_one_line(loss: Any) -> None:
        one(loss)

    def by_another(loss: Any) -> None:
        one(loss)

    class Hears(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(function)
            return function(*args, **kwargs or {})

    asked: list[Any] = []
    lines = [other, by_one_line, by_another, torch.Tensor.backward]
    types = [torch.float32] * 12 + [torch.float64, torch.bfloat16]
    random = Random(0)
    weight, made = torch.ones(1, requires_grad=True), {}  # type: ignore[var-annotated]
    turns = [turn for count in (9, 2, 9) for turn in [0] * count + [1, 2] * count + [3] * count] * 2
    for number, turn in enumerate(turns + random.choices(range(len(lines)), k=60)):
        loss = (weight * (number + 1)).sum().to(random.choice(types))
        loss = loss * float("inf") if random.random() < 0.03 else loss.reshape(1) if random.random() < 0.1 else loss
        made.setdefault(f"line {turn}", []).append("inf" if loss.isinf() else loss.item())
        with Hears() if turn == 0 and random.random() < 0.3 else contextlib.nullcontext():
            lines[turn](loss)
        weight.grad = torch.full((1,), float(number))
        largest = random.choice([1.0, 1.0, 1.0, 2])
        with Hears() if random.random() < 0.1 else contextlib.nullcontext():
            norm = torch.nn.utils.clip_grad_norm_([weight], largest)
        made.setdefault(float(largest), []).append(norm.item())
        loss.detach().zero_()
        norm.zero_()
    captured.finish()
    found: dict[Any, list[Any]] = {}
    for source, _name, values, about in captured.curves():
        key = (about["line"], *(about["caller"] or ())) if source == "backward" else about["max_norm"]
        found.setdefault(key, []).extend(values)
    assert sorted(map(str, found.values())) == sorted(map(str, made.values()))
    assert not {torch.Tensor.numel, torch.Tensor.data_ptr, torch.Tensor.is_cpu.__get__} & set(asked)


def test_an_optimizer_that_is_gone_makes_room_for_another(captured: Captured) -> None:
    """In a cross-validation there are many, one after the other, and some get the number of one before in memory."""
    weight = torch.ones(1, requires_grad=True)
    for number in range(12):
        weight.grad = torch.ones(1)
        torch.optim.SGD([weight], lr=1.0 + number).step()
        gc.collect()
    kept = captured.kept()
    told = [values for (source, _), values in kept.items() if source == "optimizer"]
    assert told == [[1.0 + number] for number in range(12)]


def test_passes_of_a_pipeline_are_known_to_be_scaled(captured: Captured) -> None:
    def pipeline(loss: Any) -> None:
        torch.autograd.backward(loss)

    code = pipeline.__code__.replace(co_filename="/venv/torch/distributed/pipelining/_backward.py")
    weight = torch.ones(2, requires_grad=True)
    pipeline(weight.mean())
    type(pipeline)(code, {"torch": torch})(weight.mean())
    captured.finish()
    assert [about.get("scaled") for *_, about in captured.curves()] == [None, True]


def test_a_pass_inside_another_is_none_and_other_threads_are_not_the_trainings(captured: Captured) -> None:
    weight = torch.ones(2, requires_grad=True)

    class Inner(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_context: Any, values: Any) -> Any:
            return values.clone()

        @staticmethod
        def backward(_context: Any, gradient: Any) -> Any:
            with torch.enable_grad():
                (torch.ones(1, requires_grad=True) * 100).sum().backward()
            return gradient

    Inner.apply(weight).sum().backward()
    thread = threading.Thread(target=lambda: (weight * 50).sum().backward())
    thread.start()
    thread.join()
    (weight * 3).sum().backward()
    assert kept(captured)["train/loss"] == [2.0, 6.0]


def test_rates_are_written_when_they_change(captured: Captured) -> None:
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    rate = torch.tensor(0.3, dtype=torch.float64)
    groups = [{"params": [first.weight], "lr": 0.1}, {"params": [first.bias], "lr": 0.2, "name": "bias"}]
    one, two = torch.optim.SGD(groups), torch.optim.SGD(second.parameters(), lr=rate)
    for step in range(4):
        if step == 2:
            one.param_groups[0]["lr"] = 1e-1 / 3
            rate.mul_(0.5)
        one.step()
        two.step()
    assert kept(captured) == {
        "train/lr/0": [0.1, 1e-1 / 3],
        "train/lr/bias": [0.2],
        "train/lr/1.0": [0.3, 0.15],
    }


def test_each_of_many_groups_has_its_rate(captured: Captured) -> None:
    torch.optim.SGD([{"params": [torch.ones(1)], "lr": 1.0 + number} for number in range(100)]).step()
    assert kept(captured) == {f"train/lr/{number}": [1.0 + number] for number in range(100)}


def test_norms_scales_and_the_loss_before_scaling(captured: Captured) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    norms = []
    for is_unscaled in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.tensor([[3.0, 4.0]])).sum()).backward()
        if is_unscaled:
            scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        scaler.step(optimizer)
        scaler.update()
    total = torch.nn.utils.get_total_norm([model.weight.grad])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 2.0, total)
    seen = kept(captured)
    assert (seen["train/loss"], seen["train/scale"]) == ([7.0, 7.0], [2048.0, 4096.0])
    assert seen["train/grad_norm"][:1] == norms[:1] == pytest.approx([5.0])
    assert seen["train/grad_norm_scaled"] == norms[1:] == pytest.approx([5.0 * 2048.0])
    # what it was clipped by, of a norm that is there already
    ((again, about),) = ((values, about) for *_, values, about in captured.curves() if about.get("again"))
    assert (about["max_norm"], again) == (2.0, [total.item()])


def test_a_norm_before_any_backward_pass(captured: Captured) -> None:
    """`torch.autograd.grad` made the gradients, and nothing else has told of a training yet."""
    weight = torch.nn.Parameter(torch.ones(2))
    torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.tensor([3.0, 4.0])
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0) == 5.0
    assert kept(captured)["train/grad_norm"] == [5.0]


def test_a_loss_that_does_not_lie_in_memory_as_it_is(captured: Captured) -> None:
    weight = torch.nn.Parameter(torch.tensor([1 + 2j]))
    for _ in range(3):
        loss = weight.conj().imag[0]  # a view that is negated when it is read
        assert loss.is_neg()
        loss.backward()
    assert kept(captured)["train/loss"] == [-2.0] * 3


@pytest.mark.usefixtures("captured")
def test_what_a_clipping_call_raises_and_warns_of_is_the_scripts() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
    with pytest.warns(UserWarning, match="empty generator") as seen:
        torch.nn.utils.clip_grad_norm_((each for each in ()), 1.0)
    assert seen[0].filename == __file__
    assert torch.nn.utils.clip_grad_norm_.__name__ == "clip_grad_norm_"


def test_a_compiled_function_that_clips_stays_whole(captured: Captured) -> None:
    graphs: list[Any] = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    weight = torch.nn.Parameter(torch.ones(3))

    @torch.compile(backend=count, fullgraph=True)  # type: ignore[untyped-decorator]
    def clip() -> Any:
        return torch.nn.utils.clip_grad_norm_([weight], 1.0)

    weight.grad = torch.ones(3) * 4
    assert clip().item() == pytest.approx(48**0.5)
    assert len(graphs) == 1
    assert kept(captured) == {}


class FakeEvent:
    """An event of a device that is done when told so."""

    done = False

    def record(self, _stream: Any) -> None:
        """Nothing runs anywhere."""

    def query(self) -> bool:
        return FakeEvent.done


def cuda_ring(monkeypatch: pytest.MonkeyPatch) -> tuple[Ring, list[str]]:
    """A ring as it is on a CUDA device, in memory of the host; the streams others waited for."""
    waited: list[str] = []
    now = SimpleNamespace(cuda_stream=1, wait_stream=lambda other: waited.append(other.cuda_stream))
    streams = iter([SimpleNamespace(cuda_stream=2), *[now] * 10_000])
    cuda = SimpleNamespace(
        is_current_stream_capturing=lambda: False, current_stream=lambda _device: next(streams), Event=FakeEvent
    )
    monkeypatch.setattr(Ring, "_new", lambda _: (buffer := torch.zeros(SIZE).double(), list(buffer), buffer.clone()))
    ring = Ring(torch.device("cpu"), torch.float64)
    ring._cuda, ring._raw_stream = cuda, None  # the one seam: everything else is the ring's own
    FakeEvent.done = False
    return ring, waited


def test_a_device_is_asked_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, waited = cuda_ring(monkeypatch)
    total = SIZE * (RINGS_LIMIT + 2)
    taken = [ring.take(torch.tensor(float(number)), (0, number, None, 0)) for number in range(total)]
    assert taken == [number < SIZE * RINGS_LIMIT for number in range(total)]  # a device far behind: the rest is lost
    assert waited == [2]  # on the device: a value was made on another stream
    assert ring.collect() == []
    FakeEvent.done = True
    read = ring.collect()
    assert list(zip(read[1::4], read[2::4], strict=True)) == [(n, float(n)) for n in range(SIZE * RINGS_LIMIT)]
    assert ring.take(torch.tensor(5.0), (0, 9, None, 0))
    ring.drain()
    assert ring.collect()[2::4] == [5.0]


def test_a_ring_that_waits_is_not_followed_by_one_of_each_step(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the limit of rings is reached after as many steps as a device may be behind, and values are lost."""
    ring, _ = cuda_ring(monkeypatch)
    metrics = captured.agent.metrics
    metrics._rings["cuda:0", torch.float64] = ring
    series = metrics.series("a", "log")
    for step in range(SIZE + 3 * RINGS_LIMIT):
        assert ring.take(torch.tensor(float(step)), (series, step, None, 0))
        captured.agent._at_boundary.call(None, step)
    assert len(ring.waiting) == 1
    FakeEvent.done = True
    captured.agent._at_boundary.call(None, EVERY_NS)
    assert ring.waiting == []


def test_names_without_end_are_bounded(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.record.agent.metrics.SERIES_LIMIT", 5)
    for step in range(9):
        marks.log(f"{step}/loss", step)
    assert len(kept(captured)) == 5
    assert captured.of("metrics_lost")[0]["number"] == 4


SCRIPT = """
import sys, time, torch
from plain_sgd import PlainSGD
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = PlainSGD(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4000, 4)), batch_size=4)
for step, (x,) in enumerate(data):
    loss = model(x).pow(2).mean()
    if step == 3:
        loss = loss * float("inf")
    optimizer.zero_grad()
    loss.backward()
    print(loss.item(), flush=True)
    if step == 3:
        optimizer.zero_grad()
    optimizer.step()
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.process
def test_a_killed_run_has_lost_a_second_at_most(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "stepscope", "run", "--quiet", "--no-window", "--no-report", "--out", "run", "--"]
    process = subprocess.Popen(
        [*line, sys.executable, "-u", "train.py", "0.02"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    printed: list[tuple[float, float]] = []
    for text in process.stdout:
        printed.append((time.monotonic(), float(text)))
        if printed[-1][0] > printed[0][0] + 3:
            break
    killed_at = printed[-1][0]
    agents = (tmp_path / "run").glob("host-*/agents.jsonl")
    pid = int(next(agents).read_text().split('"pid":')[1].split(",")[0])
    os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    from stepscope.api import open_run

    table = open_run(tmp_path / "run").tables.metrics
    values = table.filter(name="train/loss")["value"].to_list()
    assert values == pytest.approx([value for _, value in printed][: len(values)], abs=0.0, nan_ok=True)
    assert values[3] == float("inf")
    assert len(values) >= sum(at < killed_at - 1.0 for at, _ in printed)
