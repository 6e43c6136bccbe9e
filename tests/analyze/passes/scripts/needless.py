"""Small training loops under torch.profiler, each with one kind of needless work or none: `needless.py FOLDER`.

Writes FOLDER/NAME.pt.trace.json for every function of `LOOPS`, four steps each.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

FEATURES, WIDTH, CLASSES, BATCH = 64, 256, 8, 64
Steps = Iterator[None]  # one step each


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))


def batch(size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, FEATURES), torch.randint(CLASSES, (size,))


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def accuracy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    scores = model(inputs)
    return float((scores.argmax(1) == labels).float().mean().item())


def evaluate(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    with torch.no_grad():
        return sum(accuracy(model, *one) for one in batches) / len(batches)


def plain() -> Steps:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        inputs, labels = batch()
        update(optimizer, F.cross_entropy(model(inputs), labels))
        yield


def validated() -> Steps:
    """Every step is followed by a validation that records gradients."""
    model, held = network(), batch(512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        inputs, labels = batch()
        update(optimizer, F.cross_entropy(model(inputs), labels))
        accuracy(model, *held)
        yield


def validated_without_gradients() -> Steps:
    """The same on two batches, without gradients, the inner module of a wrapper called alone."""
    inner = network()
    model = nn.Sequential(inner)
    held = [batch(256), batch(256)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        inputs, labels = batch()
        update(optimizer, F.cross_entropy(model(inputs), labels))
        evaluate(inner, held)
        yield


def validated_in_line() -> Steps:
    """The validation stands in the step itself, in front of the training."""
    model, held = network(), batch(512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        held_loss = F.cross_entropy(model(held[0]), held[1])
        held_loss.item()
        inputs, labels = batch()
        update(optimizer, F.cross_entropy(model(inputs), labels))
        yield


def thrown_away() -> Steps:
    """The model is called once more for nothing; and for a state that the next step begins with, which is needed."""
    model, cell, state = network(), nn.GRUCell(CLASSES, CLASSES), torch.zeros(BATCH, CLASSES)
    optimizer = torch.optim.SGD([*model.parameters(), *cell.parameters()], lr=0.1)
    while True:
        inputs, labels = batch()
        model(inputs)
        update(optimizer, F.cross_entropy(cell(model(inputs), state), labels))
        state = cell(state, state).detach()
        yield


def loss_of(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def logged() -> Steps:
    """One function makes the loss that is trained on, and once more what is logged."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        given = batch()
        update(optimizer, loss_of(model, given))
        loss_of(model, given).item()
        yield


def taught() -> Steps:
    """A teacher that is never trained, and a target of the same network without gradients: both are needed."""
    model, teacher = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        inputs, labels = batch()
        with torch.no_grad():
            target = teacher(inputs).softmax(1) + model(inputs).softmax(1)
        scores = model(inputs)
        update(optimizer, F.cross_entropy(scores, labels) + F.mse_loss(scores.softmax(1), target / 2))
        teacher(inputs).argmax(1).eq(labels).float().mean().item()
        yield


def adversaries() -> Steps:
    """Two networks trained against each other: the second is called three times, the first once without need of it."""
    maker, judge = nn.Sequential(nn.Linear(FEATURES, FEATURES)), nn.Sequential(nn.Linear(FEATURES, 1))
    of_maker = torch.optim.SGD(maker.parameters(), lr=0.1)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
    while True:
        real = torch.randn(BATCH, FEATURES)
        made = maker(torch.randn(BATCH, FEATURES))
        update(of_judge, judge(made.detach()).mean() - judge(real).mean())
        update(of_maker, -judge(made).mean())
        yield


def checkpointed(reentrant: bool = False) -> Steps:
    """Two blocks whose activations are computed again."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    while True:
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        update(optimizer, x.square().mean())
        yield


def second_order() -> Steps:
    """A penalty on gradients: the backward pass is itself differentiated, nothing is computed again."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        inputs, labels = batch()
        inputs.requires_grad_(True)
        loss = F.cross_entropy(model(inputs), labels)
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        update(optimizer, loss + gradient.square().mean())
        yield


def selected() -> Steps:
    """The loss of each of 48 positions alone."""
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        scores = model(torch.randn(BATCH, 48, FEATURES))
        loss = torch.zeros(())
        for position in range(48):
            loss = loss + scores[:, position].square().mean()
        update(optimizer, loss)
        yield


def unbound() -> Steps:
    """The same with all positions taken at once."""
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = torch.zeros(())
        for part in model(torch.randn(BATCH, 48, FEATURES)).unbind(1):
            loss = loss + part.square().mean()
        update(optimizer, loss)
        yield


def doubled() -> Steps:
    """A layer in float64 between two in float32, beside scalars in float64, which do not matter."""
    first, second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), weight], lr=0.1)
    scale = torch.tensor(2.0, dtype=torch.float64)
    while True:
        inputs, labels = batch()
        x = torch.relu(first(inputs))
        x = widened(x, weight)
        update(optimizer, F.cross_entropy(second(x), labels) * scale)
        yield


def widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(x.double(), weight.double())).float()


def averaged() -> Steps:
    """A copy of the model in every step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[nn.Module] = []
    while True:
        inputs, labels = batch()
        update(optimizer, F.cross_entropy(model(inputs), labels))
        kept[:] = [copy.deepcopy(model)]
        yield


class Adjoint(torch.autograd.Function):
    """A Function whose backward formula calls the layers itself, as that of an ODE's solution does."""

    @staticmethod
    def forward(ctx: Any, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.model, ctx.inputs = model, inputs
        return inputs.new_zeros(BATCH, CLASSES)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        with torch.enable_grad():
            made = ctx.model(ctx.inputs.detach().requires_grad_())
        made.backward(gradient)
        return None, torch.zeros_like(ctx.inputs)


def adjoint() -> Steps:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        update(optimizer, Adjoint.apply(model, batch()[0].requires_grad_()).square().mean())
        yield


def cached() -> Steps:
    """A loader that copies the items it hands out, none of which is a model."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    items = [torch.randn(FEATURES) for _ in range(BATCH * 8)]
    loader = DataLoader(items, BATCH, collate_fn=lambda rows: torch.stack(copy.deepcopy(rows)))  # type: ignore[arg-type]
    for inputs in loader:
        update(optimizer, model(inputs).square().mean())
        yield


def wasted(kind: str) -> Steps:
    """Distances of all pairs written out, a product with one-hot rows, a whole table's gradient, singular values."""
    table, layer = nn.Embedding(8192, FEATURES), nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD([*table.parameters(), *layer.parameters()], lr=0.1)
    while True:
        picked, weight = torch.randint(8192, (4, 16)), table.weight
        loss = layer(torch.randn(BATCH, FEATURES)).mean()
        if kind == "broadcast":
            loss = loss + (weight[:512, None] - weight[None, :128]).square().sum(-1).mean()
        elif kind == "one_hot":
            loss = loss + (F.one_hot(picked, 8192).float() @ weight).mean()
        elif kind == "dense_gradient":
            loss = loss + table(picked).mean()
        elif kind == "decomposition":
            loss = loss + torch.linalg.svdvals(weight[:128]).sum()
        else:  # the table is an output layer too
            loss = loss + (table(picked) @ weight.T).square().mean()
        update(optimizer, loss)
        yield


def updated(kind: str) -> Steps:
    """All is updated by an optimizer that takes lists, or by hand; else the biases, or the last layer of two alike."""
    base, head = network(), nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    everything = [*base.parameters(), *head.parameters()]
    trained = everything if kind == "in_lists" else [*head.parameters()]
    if kind == "biases":
        trained = [one for one in everything if one.dim() == 1]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)
    while True:
        inputs, labels = batch()
        update(optimizer, F.cross_entropy(head(base(inputs)), labels))
        with torch.no_grad():
            for one in base.parameters() if kind == "by_hand" else ():
                one.sub_(one.grad, alpha=0.1)
        base.zero_grad()
        yield


def remembered(*, kept: bool) -> Steps:
    """A state goes from step to step, with its graph where it is `kept`; weights are changed behind autograd's back."""
    cell, state = nn.GRUCell(FEATURES, WIDTH), torch.zeros(BATCH, WIDTH)
    while True:
        for _ in range(1 if kept else 3):
            state = cell(batch()[0], state)
        state.square().mean().backward(retain_graph=kept)
        state = state if kept else state.detach()
        for one in cell.parameters():
            one.data.sub_(one.grad, alpha=0.1)
            one.grad = None
        yield


def joined(kind: str) -> Steps:
    """A history that grows from step to step, a cache within each step; or layers that read all before them, and parts
    that are joined to equal sizes in every step.
    """
    model, history = nn.Linear(FEATURES, FEATURES), torch.zeros(0, FEATURES)
    layers = nn.ModuleList(nn.Conv1d(FEATURES * number, FEATURES, 1) for number in range(1, 12))
    optimizer = torch.optim.SGD([*model.parameters(), *layers.parameters()], lr=0.1)
    while True:
        x, outputs = torch.randn(BATCH, FEATURES, 2), torch.zeros(BATCH, 0, FEATURES)
        for number in range(1, 12):
            if kind == "dense":
                x = torch.cat([x, layers[number - 1](x)], 1)
            elif kind == "grown_within":
                outputs = torch.cat([outputs, model(torch.randn(BATCH, 1, FEATURES))], 1)
        made = model(torch.randn(BATCH, FEATURES))
        if kind == "grown":
            history = torch.cat([history, made.detach()])
        elif kind == "rejoined":
            longer = torch.cat([torch.randn(BATCH + 1, FEATURES), made])
            made = torch.cat([made[: BATCH // 2], made[: BATCH // 2 + 1]]) + longer.mean()
        update(optimizer, x.mean() + outputs.sum() + made.square().mean())
        yield


class Factored(torch.optim.SGD):
    """Scales a gradient by what it keeps of its rows and columns, as Adafactor does, and looks how large that came."""

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            square = parameter.grad.square()
            scale = torch.mul(square.mean(-1).rsqrt().unsqueeze(-1), square.mean(-2).rsqrt().unsqueeze(-2))
            if scale.mul_(parameter.grad).norm(2) > 0:
                parameter.data.add_(scale, alpha=-1e-3)


def factored() -> Steps:
    model = nn.Linear(640, 640, bias=False)
    optimizer = Factored(model.parameters())
    while True:
        update(optimizer, model(torch.randn(BATCH, 640)).square().mean())
        yield


def threaded() -> Steps:
    """Each forward pass runs in a thread of its own, as `DataParallel` has them: nodes are numbered anew."""
    model, head, made = network(), nn.Linear(CLASSES, CLASSES), list[torch.Tensor]()
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    while True:
        inputs, labels = batch()
        thread = Thread(target=lambda given: made.append(model(given)), args=(inputs,))
        thread.start()
        thread.join()
        update(optimizer, F.cross_entropy(head(made.pop()), labels))
        yield


UPDATED = ("in_lists", "by_hand", "unused_gradient", "biases")
JOINED = ("grown", "grown_within", "dense", "rejoined")
WASTED = ("broadcast", "one_hot", "dense_gradient", "decomposition", "tied")

LOOPS: dict[str, Steps] = {
    **{kind: wasted(kind) for kind in WASTED},
    **{kind: updated(kind) for kind in UPDATED},
    **{kind: joined(kind) for kind in JOINED},
    **{
        make.__name__: make()
        for make in (plain, validated, validated_without_gradients, validated_in_line, thrown_away, logged)
    },
    **{
        make.__name__: make()
        for make in (taught, adversaries, second_order, selected, unbound, doubled, averaged, cached, adjoint)
    },
    "threaded": threaded(),
    "factored": factored(),
    "history": remembered(kept=True),
    "truncated": remembered(kept=False),
    "checkpointed": checkpointed(),
    "checkpointed_reentrant": checkpointed(reentrant=True),
}


def main() -> None:
    torch.set_num_threads(1)
    for name, steps in LOOPS.items():
        next(steps)
        with profile(
            activities=[ProfilerActivity.CPU],
            with_stack=True,
            record_shapes=True,
            schedule=schedule(wait=0, warmup=1, active=4),
            on_trace_ready=lambda done, name=name: done.export_chrome_trace(f"{sys.argv[1]}/{name}.pt.trace.json"),
        ) as profiler:
            for _ in range(5):
                next(steps)
                profiler.step()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main()
