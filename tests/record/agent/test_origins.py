"""Where a value that is not finite was made: planted in scripts whose module is known, and never guessed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the check for torch
from torch.utils.checkpoint import checkpoint  # noqa: E402

from stepscope.record.agent import metrics, origins  # noqa: E402
from tests.record.agent.fake_agent import Captured  # noqa: E402
from tests.record.agent.processes import line_of, run_script  # noqa: E402

pytestmark = pytest.mark.torch

PLANTED, STEPS = 5, 12


class Lost(torch.autograd.Function):  # type: ignore[misc]
    """Hands on gradients that are no numbers."""

    @staticmethod
    def forward(_context: Any, values: Any) -> Any:
        return values.clone()

    @staticmethod
    def backward(_context: Any, gradient: Any) -> Any:
        return gradient * math.nan


class Root(nn.Module):
    """A module without parameters."""

    def forward(self, values: Any) -> Any:
        return torch.sqrt(values)


class Block(nn.Module):
    what = ""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.root = Root()
        self.second = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        h = self.norm(self.first(x))
        if self.what == "division":
            h = h / (h - h.detach())
        elif self.what == "logarithm":
            h = torch.log(h)
        elif self.what == "root":
            h = self.root(h)
        elif self.what == "half precision":
            h = (h * 60_000).half().float()
        elif self.what == "mask":  # that hides a whole row
            h = h.masked_fill(h.abs() >= 0, -math.inf)
            h = torch.softmax(h, -1)
        elif self.what == "choice":
            h = torch.softmax(torch.where(h.abs() < 0, h, -math.inf), -1)
        elif self.what == "gradient":
            h = Lost.apply(h)
        return x + self.second(h.relu())


class Net(nn.Module):
    checkpoints: bool | None = None  # reentrant or not

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.names = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.end = nn.Linear(8, 1)

    def forward(self, x: Any, which: Any) -> Any:
        x = self.start(x) + self.names(which)
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        return self.end(x).squeeze(1)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are heard of at the end of their step, and a look may take long on a machine with much to do."""
    monkeypatch.setattr(metrics, "EVERY_NS", 0)
    monkeypatch.setattr(origins, "LOOK_NS", 60_000_000_000)


def train(
    net: Any,
    plant: Callable[[Any, Any, dict[str, Any]], None],
    clips: bool = False,
    model: Any = None,
    lr: float = 0.01,
) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for step in range(STEPS):
        batch = {"x": torch.randn(4, 8), "which": torch.arange(4), "target": torch.randn(4)}
        if step == PLANTED:
            plant(net, optimizer, batch)
        loss = ((net if model is None else model)(batch["x"], batch["which"]) - batch["target"]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()


def told(captured: Captured) -> tuple[int, str, dict[str, Any]]:
    """(step, series, where it was made) of the one alarm."""
    captured.finish()
    (alarm,) = captured.of("alarm")
    origin = {name: value for name, value in alarm["origin"].items() if name not in ("file", "function")}
    return alarm["step"], alarm["series"], origin


def in_block(what: str) -> Callable[[Any, Any, Any], None]:
    return lambda net, _optimizer, _batch: setattr(net.blocks[1], "what", what)


def poison(name: str) -> Callable[[Any, Any, Any], None]:
    return lambda _net, _optimizer, batch: batch[name][1:2].fill_(math.nan)


def lose_embedding(net: Any, _optimizer: Any, _batch: Any) -> None:
    net.names.weight.data[2] = math.nan


def raise_rate(_net: Any, optimizer: Any, _batch: Any) -> None:
    optimizer.param_groups[0]["lr"] = 1e25


# What is planted, the step and the series that it shows in, what is told of it, and the line where it is told.
SCRIPTS: dict[str, tuple[Callable[..., None], int, str, dict[str, Any], str]] = {
    "a batch": (poison("x"), 5, "loss", {"where": "inputs", "module": "start"}, "self.start(x)"),
    "a target": (poison("target"), 5, "loss", {"where": "inputs", "operator": "sub", "behind": "end"}, ""),
    "a division": (in_block("division"), 5, "loss", {"where": "forward", "module": "blocks.1"}, "h / (h"),
    "a logarithm": (in_block("logarithm"), 5, "loss", {"where": "forward", "module": "blocks.1"}, "torch.log(h)"),
    "a module alone": (in_block("root"), 5, "loss", {"where": "forward", "module": "blocks.1.root"}, "torch.sqrt(v"),
    "an overflow": (in_block("half precision"), 5, "loss", {"where": "forward", "module": "blocks.1"}, ".half()"),
    "a mask": (in_block("mask"), 5, "loss", {"where": "forward", "module": "blocks.1", "operator": "softmax"}, ""),
    "a choice": (in_block("choice"), 5, "loss", {"where": "forward", "module": "blocks.1", "operator": "softmax"}, ""),
    "an embedding": (lose_embedding, 5, "loss", {"where": "parameters", "parameter": "names.weight"}, ""),
    "a rate": (raise_rate, 6, "loss", {"where": "forward", "operator": "addmm"}, ""),
    "a gradient": (in_block("gradient"), 6, "loss", {"where": "parameters", "module": "blocks.1.norm"}, ""),
    "a gradient, clipped": (
        in_block("gradient"),
        5,
        "grad_norm",
        {"where": "gradients", "module": "blocks.1.norm"},
        "",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_was_planted_is_named(captured: Captured, name: str) -> None:
    plant, step, series, expected, at = SCRIPTS[name]
    train(Net(), plant, clips="clipped" in name)
    found_step, found_series, origin = told(captured)
    assert (found_step, found_series) == (step, f"train/{series}")
    assert {key: origin.get(key) for key in expected} == expected
    if at:
        assert origin["line"] == line_of(Path(__file__).read_text(), at)
    assert [event["step"] for event in captured.of("monitor")] == [step]


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def convolutions() -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 9))


def overflow(net: Any, _batch: Any) -> None:
    net[1].layers[0].linear1.weight.data *= 1e38


def lose_mean(net: Any, _batch: Any) -> None:
    net[1].running_mean.fill_(math.nan)
    net[1].eval()


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any, Any], object], dict[str, Any]]] = {
    "variance": (encoder, lambda: torch.arange(6), overflow, {"where": "forward", "module": "1.layers.0.norm2"}),
    "no target": (encoder, lambda: torch.arange(6), lambda _net, batch: batch[1].fill_(-100), {"operator": "nll_loss"}),
    "image": (convolutions, lambda: torch.randn(6, 3, 6, 6), lambda _net, batch: batch[0][1:2].fill_(math.inf),
              {"where": "inputs", "module": "0"}),
    "running mean": (convolutions, lambda: torch.randn(6, 3, 6, 6), lose_mean,
                     {"where": "parameters", "parameter": "1.running_mean"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_in_usual_models(captured: Captured, name: str) -> None:
    make, inputs, plant, expected = MODELS[name]
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(STEPS):
        batch = [inputs(), torch.arange(6)]
        if step == PLANTED:
            plant(net, batch)
        loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    step, _, origin = told(captured)
    assert step == PLANTED
    assert {key: origin.get(key) for key in expected} == expected


def test_of_two_models_the_one_that_made_it(captured: Captured) -> None:
    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.bad = False

        def forward(self, x: Any) -> Any:
            return torch.log(self.layer(x) * 0) if self.bad else self.layer(x)

    maker, judge = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Judge()
    makers, judges = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (maker, judge))
    for step in range(STEPS):
        for optimizer, sign in ((judges, 1), (makers, -1)):
            judge.bad = step == PLANTED and optimizer is makers
            loss = sign * judge(maker(torch.randn(4, 4))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    captured.finish()
    origin = captured.of("alarm")[0]["origin"]
    assert (origin["where"], origin["operator"], origin["module"]) == ("forward", "log", "Judge")


@pytest.mark.parametrize("wrapper", ["DataParallel", "compiled as it is"])
def test_a_model_inside_another(captured: Captured, wrapper: str) -> None:
    net = Net()
    model = nn.DataParallel(net) if wrapper == "DataParallel" else torch.compile(net, backend="eager")
    train(net, in_block("logarithm"), model=model)
    _, _, origin = told(captured)
    assert origin["module"].partition(".")[2] == "blocks.1"


@pytest.mark.parametrize("kind", ["compiled", "reentrant checkpoints"])
def test_what_hides_its_modules_is_said_to(captured: Captured, kind: str) -> None:
    net = Net()
    if kind == "compiled":
        train(net, in_block("logarithm"), model=torch.compile(net, backend="aot_eager"))
    else:
        net.checkpoints = True
        train(net, in_block("logarithm"))
    _, _, origin = told(captured)
    name = "CompiledFunction" if kind == "compiled" else "CheckpointFunction"
    assert origin == {"reason": f"it was made inside {name}, which hides its modules from the graph"}


@pytest.mark.parametrize("everywhere", [True, False])
def test_hooks_of_the_scripts_are_not_called(captured: Captured, everywhere: bool) -> None:
    net, unpacked, calls = Net(), [], []
    net.checkpoints = False
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: (unpacked.append(1), one)[1])
    for _ in range(2):
        unpacked.clear()
        with hooks if everywhere else nullcontext():
            train(net, in_block("logarithm"))
        calls.append(len(unpacked))
        captured.agent.probes.uninstall_all()
    assert calls[0] == calls[1]
    _, _, origin = told(captured)
    assert origin.get("module") == (None if everywhere else "blocks.1")


def test_a_value_that_stays_is_found_by_what_modules_put_out(captured: Captured) -> None:
    class Late(Net):
        def forward(self, x: Any, which: Any) -> Any:
            return super().forward(x, which) + sum(one.sum() for one in self.parameters()) * 0

    net = Late()
    net.checkpoints = True

    def freeze(net: Any, optimizer: Any, batch: Any) -> None:
        in_block("logarithm")(net, optimizer, batch)
        for one in net.parameters():
            one.register_hook(lambda gradient: torch.zeros_like(gradient))  # as a scaler would leave the update out

    train(net, freeze)
    step, _, origin = told(captured)
    assert step == PLANTED
    assert (origin["where"], origin["module"]) == ("forward", "blocks.1")
    assert origin["again"] == PLANTED + 1
    assert [event["measured"] for event in captured.of("monitor")] == [["outputs"], ["search"]]


@pytest.mark.parametrize("limit", ["LOOK_NS", "the user's profiler", "a dispatch mode"])
def test_a_look_is_left_out_or_ends(captured: Captured, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    def plant(net: Any, optimizer: Any, batch: Any) -> None:
        in_block("logarithm")(net, optimizer, batch)
        captured.agent.user_profiler_active = limit == "the user's profiler"

    mode = nullcontext()
    if limit == "LOOK_NS":
        monkeypatch.setattr(origins, "LOOK_NS", -1)
    elif limit == "a dispatch mode":
        mode = torch.utils.flop_counter.FlopCounterMode(display=False)
    with mode:
        train(Net(), plant)
    _, _, origin = told(captured)
    assert list(origin) == ["reason"]


def test_there_are_few_looks(captured: Captured) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(400):
        loss = weight.sum() / (0.0 if step % 4 == 0 else 1.0)
        optimizer.zero_grad()
        loss.backward()
        weight.grad = None
        optimizer.step()
    captured.finish()
    assert len(captured.of("monitor")) <= 8


SCRIPT = """
import torch
torch.manual_seed(0)
nn = torch.nn
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(30):
    x = torch.randn(8, 4)
    loss = model(x).pow(2).mean()
    if step % 10 == 5:
        loss = loss / 0
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if step % 10 == 5:
        optimizer.zero_grad()
    optimizer.step()
    print(step, loss.item(), norm.item(), torch.rand(1).item(), flush=True)
print([one.double().sum().item() for one in model.state_dict().values()], torch.get_rng_state().sum().item())
"""


@pytest.mark.process
def test_nothing_changes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plain = run_script(tmp_path, script, recorded=False)
    for faults in (None, "search"):
        looked = run_script(tmp_path / str(faults), script, faults=faults)
        assert (looked.stdout, looked.stderr, looked.status) == (plain.stdout, plain.stderr, 0)
        alarms = looked.events("alarm")
        assert [alarm["step"] for alarm in alarms] == [5]
        assert alarms[0]["origin"].keys() & {"where", "reason"}
        assert [event["probe"] for event in looked.events("probe_error")] in ([], [faults])
