"""Twenty small trainings: `harmless.py NAME` prints losses and a digest of the parameters, and ends with status 3."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

STEPS = 12
Losses = Iterator[float]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def data() -> TensorDataset:
    inputs = torch.randn(4 * STEPS, 8)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def trained(net: nn.Module, optimizer: Any, batches: Any) -> Losses:
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        yield loss.item()


def sgd(net: nn.Module) -> Losses:
    yield from trained(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data(), batch_size=4))


def adam_shuffled(net: nn.Module) -> Losses:
    batches = DataLoader(data(), batch_size=4, shuffle=True)
    yield from trained(net, torch.optim.Adam(net.parameters()), batches)


def workers(net: nn.Module) -> Losses:
    batches = DataLoader(data(), batch_size=4, num_workers=1)
    yield from trained(net, torch.optim.SGD(net.parameters(), lr=0.1), batches)


def without_a_loader(net: nn.Module) -> Losses:
    batches = [data()[:4] for _ in range(STEPS)]
    yield from trained(net, torch.optim.SGD(net.parameters(), lr=0.1), batches)


def iterable(net: nn.Module) -> Losses:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            yield from data()

    yield from trained(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(Stream(), batch_size=4))


def accumulated(net: nn.Module) -> Losses:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, batch in enumerate(DataLoader(data(), batch_size=4)):
        loss = loss_of(net, batch) / 3
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def closure(net: nn.Module) -> Losses:
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    for batch in DataLoader(data(), batch_size=4):

        def again(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            return loss

        yield float(optimizer.step(again))


def by_hand(net: nn.Module) -> Losses:
    for batch in DataLoader(data(), batch_size=4):
        loss = loss_of(net, batch)
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        yield loss.item()


def functional(net: nn.Module) -> Losses:
    values = dict(net.named_parameters())
    for batch in DataLoader(data(), batch_size=4):

        def value(chosen: Any, batch: Any = batch) -> torch.Tensor:
            return nn.functional.mse_loss(torch.func.functional_call(net, chosen, (batch[0],)), batch[1])

        gradients, loss = torch.func.grad_and_value(value)(values)
        with torch.no_grad():
            for name, parameter in values.items():
                parameter -= 0.1 * gradients[name]
        yield loss.item()


def of_autograd(net: nn.Module) -> Losses:
    for batch in DataLoader(data(), batch_size=4):
        loss = loss_of(net, batch)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        yield loss.item()


def scaled(net: nn.Module) -> Losses:
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for batch in DataLoader(data(), batch_size=4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss.item()


def evaluated(net: nn.Module) -> Losses:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        yield from trained(net, optimizer, DataLoader(data(), batch_size=16))
        net.eval()
        with torch.no_grad():
            yield from (loss_of(net, batch).item() for batch in DataLoader(data(), batch_size=16))
        net.train()


def hooked(net: nn.Module) -> Losses:
    seen: list[int] = []
    net.register_forward_hook(lambda *_: seen.append(1))
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    yield from sgd(net)
    yield float(len(seen))


def checkpointed(net: nn.Module) -> Losses:
    from torch.utils.checkpoint import checkpoint

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in DataLoader(data(), batch_size=4):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(checkpoint(net, batch[0], use_reentrant=False), batch[1])
        loss.backward()
        optimizer.step()
        yield loss.item()


def saved(net: nn.Module) -> Losses:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for loss in trained(net, optimizer, DataLoader(data(), batch_size=4)):
        file = io.BytesIO()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file)["optimizer"])
        yield loss


def profiled(net: nn.Module) -> Losses:
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=2)) as profiler:
        for loss in sgd(net):
            profiler.step()
            yield loss


def threaded(net: nn.Module) -> Losses:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(sgd(net)))
    thread.start()
    thread.join()
    yield from found


def forked(net: nn.Module) -> Losses:
    yield from sgd(net)
    child = os.fork()
    if child == 0:
        sys.exit(7)
    yield float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    yield from sgd(net)


def two_networks(net: nn.Module) -> Losses:
    other = model()
    first = torch.optim.SGD(net.parameters(), lr=0.1)
    second = torch.optim.Adam(other.parameters())
    for batch in DataLoader(data(), batch_size=4):
        yield from trained(net, first, [batch])
        yield from trained(other, second, [(batch[0], net(batch[0]).detach())])


def raising(net: nn.Module) -> Losses:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, loss in enumerate(trained(net, optimizer, DataLoader(data(), batch_size=4))):
        try:
            if number % 4 == 3:
                net(torch.randn(4, 9))
        except RuntimeError as error:
            yield float(len(str(error)))
        yield loss


SCRIPTS: dict[str, Callable[[nn.Module], Losses]] = {
    each.__name__: each
    for each in (
        *(sgd, adam_shuffled, workers, without_a_loader, iterable, accumulated, closure, by_hand, functional),
        *(of_autograd, scaled, evaluated, hooked, checkpointed, saved, profiled, threaded, forked, two_networks),
        raising,
    )
}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = model()
    for loss in SCRIPTS[sys.argv[1]](net):
        print(repr(loss))
    parameters = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    print(hashlib.sha256(parameters.numpy().tobytes()).hexdigest())
    sys.stdout.flush()
    sys.exit(3)


if __name__ == "__main__":
    main()
