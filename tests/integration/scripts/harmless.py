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


def loader(batch_size: int = 4, **options: Any) -> Any:
    return DataLoader(data(), batch_size, **options)


def plain(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, **options)


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def trained(net: nn.Module, optimizer: Any, batches: Any, loss_of: Any = loss_of) -> Losses:
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        yield loss.item()


def descend(parameters: Any, gradients: Any) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 0.1 * gradient


def sgd(net: nn.Module) -> Losses:
    yield from trained(net, plain(net), loader())


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        yield from data()


def accumulated(net: nn.Module) -> Losses:
    optimizer = plain(net)
    for number, batch in enumerate(loader()):
        loss = loss_of(net, batch) / 3
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def closure(net: nn.Module) -> Losses:
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    for batch in loader():

        def again(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            return loss

        yield float(optimizer.step(again))


def by_hand(net: nn.Module) -> Losses:
    for batch in loader():
        loss = loss_of(net, batch)
        net.zero_grad()
        loss.backward()
        descend(net.parameters(), [parameter.grad for parameter in net.parameters()])
        yield loss.item()


def functional(net: nn.Module) -> Losses:
    values = dict(net.named_parameters())
    for batch in loader():

        def value(chosen: Any, batch: Any = batch) -> torch.Tensor:
            return nn.functional.mse_loss(torch.func.functional_call(net, chosen, (batch[0],)), batch[1])

        gradients, loss = torch.func.grad_and_value(value)(values)
        descend(values.values(), [gradients[name] for name in values])
        yield loss.item()


def of_autograd(net: nn.Module) -> Losses:
    for batch in loader():
        loss = loss_of(net, batch)
        descend(net.parameters(), torch.autograd.grad(loss, list(net.parameters())))
        yield loss.item()


def scaled(net: nn.Module) -> Losses:
    optimizer, scaler = plain(net), torch.amp.GradScaler("cpu")
    for batch in loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss.item()


def evaluated(net: nn.Module) -> Losses:
    optimizer = plain(net)
    for _ in range(3):
        yield from trained(net, optimizer, loader(16))
        net.eval()
        with torch.no_grad():
            yield from (loss_of(net, batch).item() for batch in loader(16))
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

    def loss_again(net: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(checkpoint(net, batch[0], use_reentrant=False), batch[1])

    yield from trained(net, plain(net), loader(), loss_again)


def saved(net: nn.Module) -> Losses:
    optimizer = plain(net, momentum=0.9)
    for loss in trained(net, optimizer, loader()):
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
    first = plain(net)
    second = torch.optim.Adam(other.parameters())
    for batch in loader():
        yield from trained(net, first, [batch])
        yield from trained(other, second, [(batch[0], net(batch[0]).detach())])


def raising(net: nn.Module) -> Losses:
    optimizer = plain(net)
    for number, loss in enumerate(trained(net, optimizer, loader())):
        try:
            if number % 4 == 3:
                net(torch.randn(4, 9))
        except RuntimeError as error:
            yield float(len(str(error)))
        yield loss


SCRIPTS: dict[str, Callable[[nn.Module], Losses]] = {
    "adam_shuffled": lambda net: trained(net, torch.optim.Adam(net.parameters()), loader(shuffle=True)),
    "workers": lambda net: trained(net, plain(net), loader(num_workers=1)),
    "without_a_loader": lambda net: trained(net, plain(net), [data()[:4] for _ in range(STEPS)]),
    "iterable": lambda net: trained(net, plain(net), DataLoader(Stream(), batch_size=4)),
    **{
        each.__name__: each
        for each in (
            *(sgd, accumulated, closure, by_hand, functional, of_autograd, scaled, evaluated, hooked, checkpointed),
            *(saved, profiled, threaded, forked, two_networks, raising),
        )
    },
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
