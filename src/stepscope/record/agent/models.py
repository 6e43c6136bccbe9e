"""The models of a script, and how large their gradients, weights, updates and activations are.

Sizes are numbers that stay on their devices until they are read.
Of a tensor that is spread over ranks it is this rank's part. An update is told from the optimizer's state where that
is enough (Adam, AdamW, SGD), from a copy of the weights of a bounded number of them else. What is made on the way is
at most a few slices of `SLICE` elements.

Models are the outermost modules that are called in training, found by a global hook that is in place until the first
training step is over, and no longer: it would slow every module call down. Once torch.compile is used there is none at
all, for Dynamo would compile anew without it; what the script hands to torch.compile is a model then.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from threading import get_ident
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence
from weakref import ref

from stepscope.record.agent.metrics import Metrics
from stepscope.record.agent.patches import ModuleHook, Patches

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent


SLICE = 1 << 22  # elements that are worked on at once: 16 MB in single precision
COPIED = 1 << 24  # elements of weights that are copied for an update that no state tells: 64 MB
COUNTED = 1 << 26  # elements of an output of which zeros and what is not finite are counted: 16 slices


def quietly(torch: Any) -> ExitStack:
    """Without gradients, modes and autocast of the script: what runs inside is none of its business."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch._C.DisableTorchFunction())
    for device in ("cpu", "cuda"):
        try:
            casts = torch.is_autocast_enabled(device)
        except TypeError:  # before torch 2.4
            casts = torch.is_autocast_cpu_enabled() if device == "cpu" else torch.is_autocast_enabled()
        if casts:
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def obstacle(torch: Any, device_in_use: bool) -> str | None:
    """Why operators of ours must not run here."""
    if device_in_use and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    modes = getattr(torch._C, "_len_torch_dispatch_stack", int)()
    return "the script looks at every operator (a dispatch mode)" if modes else None


def measurable(value: Any) -> Any:
    """`value` as a plain tensor of floating-point numbers that can be read later, or None.

    Of a distributed tensor it is this rank's part: nothing is communicated.
    """
    torch: Any = sys.modules["torch"]
    if value.__class__ is not torch.Tensor:
        value = getattr(value, "_local_tensor", value)
        if not isinstance(value, torch.Tensor) or type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return None  # no tensor, a fake one, or one still on its way from other ranks
        with torch._C.DisableTorchFunctionSubclass():
            value = value.detach().as_subclass(torch.Tensor)
    if str(value.layout) != "torch.strided" or not value.is_floating_point() or not value.numel():
        return None
    wrapped = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
    if wrapped is not None and wrapped(value):
        return None
    return value.detach() if value.device.type in ("cpu", "cuda") else None


class Numbers:
    """Numbers in tensors of any devices; `read` has each device's copied once."""

    def __init__(self) -> None:
        self._kept: dict[Any, dict[Any, list[tuple[int, Any]]]] = {}  # device -> type -> (number, tensor)
        self._count = 0

    def put(self, tensor: Any) -> int:
        """Keep a tensor without dimensions; the place of its value in what `read` hands over."""
        self._kept.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append((self._count, tensor))
        self._count += 1
        return self._count - 1

    def read(self, metrics: Metrics, done: Callable[[list[float]], None]) -> None:
        """Have `done` called with all values once the last device has them."""
        torch: Any = sys.modules["torch"]
        values = [float("nan")] * self._count
        waiting = len(self._kept)

        def arrived(places: list[int], found: list[float]) -> None:
            nonlocal waiting
            for place, value in zip(places, found):
                values[place] = value
            waiting -= 1
            if not waiting:
                done(values)

        kept, self._kept = self._kept, {}
        for by_type in kept.values():
            places = [place for own in by_type.values() for place, _ in own]
            parts = [torch.stack([tensor for _, tensor in own]).to(torch.float64) for own in by_type.values()]
            metrics.keep_all(
                parts[0] if len(parts) == 1 else torch.cat(parts),
                lambda found, places=places: arrived(places, found),  # type: ignore[misc]
            )


def norms(torch: Any, tensors: Sequence[Any]) -> list[Any]:
    """The 2-norm of each, in single precision at least; one call per device and type where torch can."""
    found: list[Any] = [None] * len(tensors)
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    for (_, dtype), own in groups.items():
        rest = (torch.float32,) if dtype in (torch.float16, torch.bfloat16) else ()
        try:
            values = torch._foreach_norm([tensors[index] for index in own], 2, *rest)
        except (TypeError, RuntimeError, AttributeError):  # older versions have no type, or no such function
            values = [_norm(torch, tensors[index]) for index in own]
        for index, value in zip(own, values):
            found[index] = value
    return found


def _norm(torch: Any, tensor: Any) -> Any:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(tensor, dtype=torch.float32 if half else None)


def slices(*tensors: Any) -> Iterator[tuple[Any, ...]]:
    """Tensors of one shape in parts of about `SLICE` elements, none of them copied."""
    first = tensors[0]
    if first.numel() <= SLICE:
        return iter([tensors])
    rows = max(1, SLICE * len(first) // first.numel())
    return zip(*(tensor.split(rows) for tensor in tensors))


# ------------------------------------------------------------------------------------------------------ updates


class Updates:
    """Of one optimizer step: made before it, where weights may be copied, and asked after it."""

    def __init__(self, torch: Any, optimizer: Any, parameters: Sequence[Any]) -> None:
        self._torch = torch
        self._skipped = getattr(optimizer, "found_inf", None)  # a fused step leaves out what has overflowed
        kind = type(optimizer)
        optim = torch.optim
        self._how = _of_adam if kind in (optim.Adam, optim.AdamW) else _of_sgd if kind is optim.SGD else None
        self._decoupled = kind is optim.AdamW
        self._state = optimizer.state
        self._copies: dict[int, Any] = {}
        left = COPIED
        for parameter in parameters if self._how is None else ():
            weight = measurable(parameter)
            if weight is not None and weight.numel() <= left:
                left -= weight.numel()
                self._copies[id(parameter)] = weight.clone()

    def of(self, group: dict[str, Any], parameter: Any) -> list[Any]:
        """The norms of the parts of what was added to `parameter`; [] where it is not known."""
        torch, weight = self._torch, measurable(parameter)
        copy = self._copies.pop(id(parameter), None)
        if weight is None:
            return []
        if self._how is None:
            parts = [] if copy is None else [_norm(torch, now - before) for now, before in slices(weight, copy)]
        else:
            decoupled = self._decoupled or bool(group.get("decoupled_weight_decay"))
            parts = self._how(torch, group, self._state.get(parameter, {}), parameter, weight, decoupled)
        return parts if self._skipped is None else [part * (1 - self._skipped) for part in parts]


def _of_adam(torch: Any, group: Any, state: Any, _parameter: Any, weight: Any, decoupled: bool) -> list[Any]:
    """Adam's formula again, from the averages that it stepped with."""
    first, second = (
        measurable(state.get(name)) for name in ("exp_avg", "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq")
    )
    if first is None or second is None or group.get("differentiable"):
        return []
    step, rate, (beta1, beta2) = _number(state["step"]), _number(group["lr"]), map(_number, group["betas"])
    root = (1 - beta2**step) ** 0.5
    scale = rate / (1 - beta1**step)
    decoupled = decoupled and bool(group["weight_decay"])
    decay = rate * _number(group["weight_decay"])
    half = first.dtype in (torch.float16, torch.bfloat16)
    parts = []
    for mean, square, now in slices(first, second, weight):
        change = (square.float() if half else square).sqrt()
        change.div_(root).add_(group["eps"])
        torch.div(mean, change, out=change)
        change.mul_(scale)
        # It was decayed first: new = (1 - decay) * old - change.
        parts.append(_norm(torch, change.add_(now * decay).div_(1 - decay) if decoupled else change))
    return parts


def _of_sgd(torch: Any, group: Any, state: Any, parameter: Any, weight: Any, _decoupled: bool) -> list[Any]:
    """SGD's step is the rate times what it kept as momentum, or the gradient with the weights' decay."""
    rate, momentum = _number(group["lr"]), _number(group["momentum"])
    buffer = measurable(state.get("momentum_buffer"))
    if group.get("differentiable") or (momentum and buffer is None):
        return []
    if momentum and not group["nesterov"]:
        return [part * abs(rate) for part in norms(torch, [buffer])]
    gradient = measurable(parameter.grad)
    if gradient is None:
        return []
    decay, sign = _number(group["weight_decay"]), -1.0 if group["maximize"] else 1.0
    parts = []
    for now, slope, kept in slices(weight, gradient, gradient if buffer is None else buffer):
        change = slope * sign
        if momentum:
            change.add_(kept * momentum)
        # The decay was that of the weights before: change = slope + decay * (new + rate * change).
        change.add_(now * decay).div_(1 - rate * decay)
        parts.append(_norm(torch, change.mul_(rate)))
    return parts


def _number(value: Any) -> Any:
    """As a number where the host has it, else as a tensor without dimensions on its device."""
    if not hasattr(value, "device"):
        return value
    plain = value.detach().reshape(())
    return float(plain.numpy()) if plain.device.type == "cpu" else plain.double()


# -------------------------------------------------------------------------------------------------- activations


def activation(torch: Any, numbers: Numbers, output: Any) -> Callable[[list[float]], dict[str, float]]:
    """Measure a module's output; what is returned makes figures, by kind, of the values of `numbers`.

    Counts are left out where there are too many elements to count.
    """
    elements, put = output.numel(), numbers.put
    ends = [put(end) for end in torch.aminmax(output)]
    norm = put(_norm(torch, output))
    parts = [part for (part,) in slices(output)] if elements <= COUNTED else []
    nonzero = [put(torch.count_nonzero(part)) for part in parts]
    strange = [put(torch.count_nonzero(part - part)) for part in parts]  # infinity and NaN leave NaN

    def figures(values: list[float]) -> dict[str, float]:
        least, most = (values[place] for place in ends)
        found = {
            "largest": max(-least, most) if least == least and most == most else float("nan"),
            "mean_square": values[norm] ** 2 / elements,
        }
        if nonzero:
            found["zeros"] = 1 - sum(values[place] for place in nonzero) / elements
            found["not_finite"] = sum(values[place] for place in strange)
        return found

    return figures


def first_tensor(output: Any) -> Any:
    """What a module returned, or the first tensor in it, to be measured; None where there is none."""
    if isinstance(output, dict):
        output = tuple(output.values())
    for value in output if isinstance(output, (tuple, list)) else (output,):
        found = measurable(value)
        if found is not None:
            return found
    return None


NAME = "knob_roots"


class RootFinder:
    """Listens until `close`. `owner` is a knob, which all knobs share it with, or another part of `owner.agent`."""

    def __init__(self, owner: Any) -> None:
        import torch

        agent: Agent = owner.agent
        self._agent = agent
        self._torch: Any = torch
        self._inner: set[int] = set()  # ids of the roots and all that is inside them
        self._listeners: list[Callable[[Any], Any]] = []
        self._roots: list[ref[Any]] = []
        self._patches = Patches(agent.guard, NAME)
        self._patches.look(torch, "compile", self._before_compile)
        self._hook = ModuleHook(agent.guard.wrap(NAME, self._called))
        self._hook.add()

    def listen(self, listener: Callable[[Any], Any]) -> None:
        """Call `listener(module)`, which must not raise, right before the first call of each root."""
        self._listeners.append(listener)

    def close(self) -> list[Any]:
        """End the search. Returns the models found that still exist, in order; may be asked again."""
        self._hook.remove()
        self._patches.remove()
        self._inner.clear()
        self._listeners.clear()
        return [module for module in (reference() for reference in self._roots) if module is not None]

    def _called(self, module: Any) -> None:
        thread = self._agent.training_thread
        if id(module) in self._inner or (thread is not None and thread != get_ident()):
            return
        if module.training and self._torch.is_grad_enabled():
            self._note(module)

    def _note(self, module: Any) -> None:
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._roots.append(ref(module))
            self._inner.update(map(id, module.modules()))
            for listener in self._listeners:
                listener(module)

    def _before_compile(self, target: Any = None, *_args: Any, **_kwargs: Any) -> None:
        self._hook.remove()
        module = module_of(self._torch, target)
        if module is not None and id(module) not in self._inner:
            self._note(module)


def module_of(torch: Any, target: Any) -> Any:
    """The module that is handed to torch.compile, or whose method is; None where it is a function."""
    module = target if isinstance(target, torch.nn.Module) else getattr(target, "__self__", None)
    return module if isinstance(module, torch.nn.Module) else None


def named(roots: list[Any], what: str) -> Iterator[tuple[str, Any]]:
    """Parameters or modules of all roots; of several, the name of a root's class goes before. Names are told once."""
    seen: set[str] = set()
    for root in roots:
        for name, one in getattr(root, what)():
            parts = ([type(root).__name__] if len(roots) > 1 or not name else []) + ([name] if name else [])
            full = unique = ".".join(parts)
            number = 1
            while unique in seen:
                number += 1
                unique = f"{full}~{number}"
            seen.add(unique)
            yield unique, one
