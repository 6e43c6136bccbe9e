"""What a training loop does: backward passes, optimizer steps and their closures, updates left out, the first module.

Of backward passes (`Tensor.backward` and `torch.autograd.backward`) nested calls are counted once.

In a script without an optimizer they are all there is to cut steps by. It is then told which line calls them, and
whether gradients were cleared since the last pass: the parameters were changed in between. Where not even `backward` is
called, `torch.autograd.grad` (and `torch.func`, which goes there) stands for it.

Beside the loss, the norm of the gradients is kept where they are clipped, and a GradScaler's scale. The functions that
clip stay traceable: Dynamo takes them into the user's graph as it would without us, and what runs compiled tells
nothing.
"""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from functools import partial
from threading import get_ident
from time import monotonic_ns
from types import FunctionType, MethodType
from typing import Any, Callable

from stepscope.record.agent import metrics
from stepscope.record.agent.agent import Agent
from stepscope.record.agent.frames import user_place
from stepscope.record.agent.guard import Pair
from stepscope.record.agent.models import graph_nodes
from stepscope.record.agent.patches import (
    ModuleHook,
    Patches,
    Probe,
    has_torch_modes,
    is_dynamo_compiling_check,
    is_whole,
    scaler_home,
    tell_torchscript,
)
from stepscope.record.agent.wrapper_importlib_bootstrap import make_traceable_wrapper, make_wrapper

VALUES = 8  # of a gradient on the CPU that was neither replaced nor written to in a way that torch counts


class Gradients:
    """Whether one parameter behind a root was given new gradients since the last backward pass from there."""

    def __init__(self) -> None:
        # root -> (which parameter, its gradient's state); not referred to, even weakly, lest torch cannot swap it
        self._seen: dict[int, tuple[int, Any]] = {}
        self._running: tuple[int, Any] | None = None

    def before(self, root: int, tensors: Any) -> bool | None:
        """Whether they were cleared; None where that cannot be told."""
        known, parameter = self._seen.get(root), _parameter(tensors)
        self._running = None if parameter is None else (root, parameter)
        return None if known is None or known[0] != id(parameter) else _state(parameter) != known[1]

    def after(self) -> None:
        """The backward pass has ended."""
        if self._running is not None:
            (root, parameter), self._running = self._running, None
            self._seen[root] = (id(parameter), _state(parameter))


def _state(parameter: Any) -> Any:
    gradient = parameter.grad
    if gradient is None:
        return None
    values = None
    if gradient.device.type == "cpu" and str(gradient.layout) == "torch.strided":
        row = gradient.detach()
        while row.dim() > 1 and len(row):
            row = row[0]
        values = (row[:VALUES] if row.dim() else row).tolist()
    return id(gradient), gradient._version, parameter._version, values


def _parameter(tensors: Any) -> Any:
    """A leaf that a backward pass over `tensors` gives a gradient to: it stands behind every branch."""
    first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
    leaves = (getattr(node, "variable", None) for node in graph_nodes(getattr(first, "grad_fn", None)))
    return next((leaf for leaf in leaves if leaf is not None), None)


class AutogradProbe(Probe):
    """Tells the step cutter where backward begins and ends."""

    name = "autograd"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        # On `torch.autograd.grad`, until the script trains otherwise, or compiles: Dynamo knows it by identity.
        self._functional = Patches(agent.guard, self.name)
        agent.before_compile.append(self._functional.remove)

    def install(self) -> None:
        """Wrap `torch.autograd.backward`, which `Tensor.backward` calls, and `grad` while it may stand for it."""
        super().install()
        if not self._agent.compile_used and not self._agent.steps.optimizers_exist:
            self._functional.install(self._wrap_functional)

    def uninstall(self) -> None:
        self._functional.remove()
        super().uninstall()

    def _wrap_all(self) -> None:
        import torch

        agent = self._agent
        steps, offset_ns = agent.steps, agent.clock.epoch_offset_ns
        gradients = Gradients()
        loss_switch, keep_loss, _ = agent.guard.pair(metrics.NAME, agent.metrics.loss)
        unheard = torch._C.DisableTorchFunction  # by modes and tensors of the script, which hear what a tensor is asked
        tensor, has_modes = torch.Tensor, has_torch_modes()
        depth = 0  # backward passes inside one another, as reentrant checkpoints make them

        # Closures: what they need is at hand, where every attribute would be looked up with cold caches.
        def before(*args: Any, **kwargs: Any) -> bool | None:
            nonlocal depth
            if get_ident() != agent.training_thread and not agent.accepts(strong=True):
                return None
            now = monotonic_ns() + offset_ns
            depth += 1
            if depth == 1 and not loss_switch.off:
                try:
                    loss = args[0] if args else kwargs.get("tensors")
                    if loss.__class__ is tensor and not has_modes():  # nobody hears; `unheard` takes a microsecond
                        keep_loss(loss, now)
                    else:
                        with unheard():
                            keep_loss(loss, now)
                except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                    loss_switch.trip(defect)
            if agent.framework_steps is not None:
                agent.framework_steps.sample(now)
            if self._functional.enabled:
                self._functional.remove()
            wants_roots = steps.wants_roots
            if wants_roots:
                root = hash(user_place(2)) or 1
                with unheard():
                    cleared = gradients.before(root, args[0] if args else kwargs.get("tensors"))
                steps.backward_start(monotonic_ns() + offset_ns, root, cleared)
            else:
                steps.backward_start(now)
            return wants_roots

        def after(wanted_roots: bool, _result: Any, _error: BaseException | None) -> None:
            nonlocal depth
            depth = max(0, depth - 1)
            steps.backward_end(monotonic_ns() + offset_ns)
            if wanted_roots:
                with unheard():
                    gradients.after()

        self._around(torch.autograd, "backward", before, after)
        tell_torchscript(torch.autograd.backward)

    def _wrap_functional(self) -> None:
        import torch

        agent, steps = self._agent, self._agent.steps

        def before(*_args: Any, **_kwargs: Any) -> bool | None:
            if steps.optimizers_exist:
                self._functional.remove()
                return None
            if get_ident() != agent.training_thread and not agent.accepts(strong=True):
                return None
            steps.backward_start(agent.clock.now(), (hash(user_place(2)) or 1) if steps.wants_roots else 0)
            return True

        def after(_begun: bool, _result: Any, _error: BaseException | None) -> None:
            steps.backward_end(agent.clock.now())

        self._functional.look(torch.autograd, "grad", before, after)
        tell_torchscript(torch.autograd.grad)


class OptimizerProbe(Probe):
    """Tells the step cutter where an optimizer step begins and ends."""

    name = "optimizer"

    def install(self) -> None:
        from torch.optim import optimizer as module

        agent = self._agent
        steps, offset_ns = agent.steps, agent.clock.epoch_offset_ns
        faults = agent.page_faults
        rates_switch, keep_rates, _ = agent.guard.pair(metrics.NAME, agent.metrics.update_begins)

        def start(optimizer: Any) -> None:
            if get_ident() == agent.training_thread or agent.accepts(strong=True):
                agent.optimizer_events += 1
                now = monotonic_ns() + offset_ns
                steps.optimizer_start(id(optimizer), now)
                if not rates_switch.off:
                    try:
                        keep_rates(optimizer, now)
                    except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                        rates_switch.trip(defect)
                if agent.around_update is not None:
                    agent.around_update[0](optimizer)

        def end(optimizer: Any, _result: Any, _error: BaseException | None) -> None:
            if get_ident() == agent.training_thread or agent.accepts(strong=True):
                if agent.around_update is not None:
                    agent.around_update[1](optimizer)
                now = monotonic_ns() + offset_ns
                faults.optimizer_ended(now)
                agent.metrics.update_ended(id(optimizer))
                steps.optimizer_end(id(optimizer), now)

        def closure_starts(*_args: Any, **_kwargs: Any) -> bool | None:
            if not agent.accepts(strong=True):
                return None
            steps.closure_start(agent.clock.now())
            return True

        def closure_ends(_begun: bool, _result: Any, _error: BaseException | None) -> None:
            steps.closure_end(agent.clock.now())

        self._in_closure = agent.guard.pair(self.name, closure_starts, closure_ends)
        self._patches.enabled = True  # nothing in torch is replaced: they switch the wrappers of closures
        before_step, after_step = self._hooks(agent.guard.pair(self.name, start, end))
        self._handles = (
            module.register_optimizer_step_pre_hook(before_step),
            module.register_optimizer_step_post_hook(after_step),
        )

    def _hooks(self, pair: Pair) -> tuple[Callable[..., Any], Callable[..., None]]:
        """What torch calls before and after an optimizer's step, outside of what Dynamo traces."""
        switch, before, after = pair
        is_compiling = is_dynamo_compiling_check()

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
            if is_compiling() or switch.off:
                return None
            try:
                before(optimizer)
                return self._with_closure(args, kwargs) if kwargs or len(args) > 1 else None
            except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                switch.trip(defect)
            return None

        def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling() and not switch.off:
                try:
                    after(optimizer, None, None)
                except Exception as defect:  # noqa: BLE001 - the guard, see `Pair`
                    switch.trip(defect)

        return before_step, after_step

    def _with_closure(self, args: Any, kwargs: Any) -> Any:
        """The arguments with the closure timed: forward and backward inside it are none of the optimizer's time."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        timed = self._timed(closure)
        if timed is closure:
            return None
        return ((args[0], timed, *args[2:]), kwargs) if len(args) > 1 else (args, dict(kwargs, closure=timed))

    def _timed(self, closure: Any) -> Any:
        """`closure` timed, of the same type; any other object that can be called, such as a model, is left alone."""
        if closure.__class__ is FunctionType:
            return make_wrapper(self._patches, closure, self._in_closure)
        if closure.__class__ is MethodType:
            return MethodType(self._timed(closure.__func__), closure.__self__)
        if closure.__class__ is partial:
            timed = self._timed(closure.func)
            return closure if timed is closure.func else partial(timed, *closure.args, **closure.keywords)
        return closure


class ScalerProbe(Probe):
    """Tells the step cutter of optimizer steps a GradScaler left out, and writes `scaler_skip`."""

    name = "scaler"

    def _wrap_all(self) -> None:
        import torch

        agent = self._agent

        def before(_scaler: Any, optimizer: Any, *_args: Any, **_kwargs: Any) -> tuple[int, int]:
            return id(optimizer), agent.optimizer_events

        def after(token: tuple[int, int], _result: Any, error: BaseException | None) -> None:
            is_skipped = error is None and agent.optimizer_events == token[1]
            if is_skipped and agent.accepts(strong=True) and not agent.guard.is_off("optimizer"):
                now = agent.clock.now()
                agent.journal.write("scaler_skip", now)
                agent.steps.optimizer_skipped(token[0], now)

        self._around(scaler_home(torch).GradScaler, "step", before, after)


# Calls of an evaluation's modules that are heard while the first one with gradients is waited for.
CALLS_LIMIT = 20_000


class ModuleForwardProbe(Probe):
    """Listens for the next module call at the boundaries of steps that had no loader, and on request."""

    name = "module_forward"

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._hook = ModuleHook(agent.guard.wrap(self.name, self._called))
        self._calls = 0
        agent.before_compile.append(self._hook.remove)
        ask = agent.guard.wrap(self.name, self._ask)
        agent.steps.ask_use = lambda: ask() or False

    def install(self) -> None:
        super().install()
        self._ask()

    def uninstall(self) -> None:
        super().uninstall()
        self._hook.remove()

    def _ask(self) -> bool:
        if not self._patches.enabled or self._agent.compile_used:
            return False
        if not self._hook.is_in:
            self._calls = 0
            self._hook.add()
        return True

    def _called(self, module: Any) -> None:
        agent = self._agent
        if not agent.observes():
            return
        gradients = sys.modules["torch"].is_grad_enabled()
        if gradients and agent.first_model is None:
            agent.first_model = weakref.ref(module)
        self._calls += 1
        if self._calls > 1 and not gradients and self._calls < CALLS_LIMIT:
            return  # an evaluation goes on
        again = agent.steps.module_forward(agent.page_faults.now(), gradients, id(module))
        if not again or self._calls >= CALLS_LIMIT:
            self._hook.remove()


CLIPS = "_clip_grads_with_norm_"  # what `clip_grad_norm_` calls
FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"


class MetricsProbe(Probe):
    """Tells `agent.metrics` of norms, scales and scaled losses."""

    name = metrics.NAME

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._metrics = agent.metrics
        self._told: Any = None  # the norm that was taken last
        self._series: dict[tuple[bool, float | None, bool], int | None] = {}

    def _wrap_all(self) -> None:
        import torch
        from torch.nn import utils

        # What is clipped by a norm that is not finite is lost as a whole: where the norm is handed to a function
        # before, as since torch 2.6, the gradients can still be looked at.
        clips_inside = CLIPS in inspect.unwrap(utils.clip_grad_norm_).__code__.co_names
        if clips_inside:
            self._clipping(utils.clip_grad, CLIPS)
        for owner in (utils, utils.clip_grad):
            for name in ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_")[clips_inside:]:
                self._clipping(owner, name)
        if is_whole(FSDP):
            self.module_imported(FSDP)
        agent, kept = self._agent, self._metrics

        def scaled(outputs: Any, result: Any, error: BaseException | None) -> None:
            if error is None and get_ident() == (agent.training_thread or get_ident()):
                kept.scaled(outputs, result)

        def unscaled(_token: Any, _result: Any, error: BaseException | None) -> None:
            if error is None:
                kept.is_scaled = False

        def updated(scaler: Any, _result: Any, error: BaseException | None) -> None:
            scale = getattr(scaler, "_scale", None)
            if error is None and scale is not None:
                kept.keep(kept.series("train/scale", "scaler"), agent.clock.now(), scale)

        scaler = scaler_home(torch).GradScaler
        self._around(scaler, "scale", lambda _scaler, outputs=None, *_, **__: outputs, scaled)
        self._around(scaler, "unscale_", lambda *_args, **_kwargs: True, unscaled)
        self._around(scaler, "update", lambda scaler, *_args, **_kwargs: scaler, updated)

    def module_imported(self, name: str) -> None:
        """FSDP clips by a method of its own."""
        if name == FSDP:
            self._clipping(sys.modules[FSDP].FullyShardedDataParallel, "clip_grad_norm_")

    def _clipping(self, owner: Any, name: str) -> None:
        function = getattr(owner, name, None)
        if function is None:
            return
        takes_most, is_inside = name != "get_total_norm", name == CLIPS
        takes_norm = is_inside or name == "clip_grads_with_norm_"
        was_told = takes_norm and not is_inside  # the norm was taken before, most often by a function that told it
        agent, metrics, known = self._agent, self._metrics, self._series
        keep, offset_ns = metrics.keep_norm, agent.clock.epoch_offset_ns
        torch: Any = sys.modules["torch"]
        unheard, tensor, has_modes = torch._C.DisableTorchFunction, torch.Tensor, has_torch_modes()

        def told(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            # In every step of a script that clips, so in one piece and by what is found at the first look.
            if agent.training_thread not in (None, get_ident()):
                return
            now_ns = monotonic_ns() + offset_ns
            most = (args[1] if len(args) > 1 else kwargs.get("max_norm")) if takes_most else None
            norm = (args[2] if len(args) > 2 else kwargs.get("total_norm")) if takes_norm else result
            again = was_told and norm is self._told
            self._told = None if was_told else norm
            is_scaled = metrics.is_scaled
            try:
                series = known[is_scaled, most, again]
            except (KeyError, TypeError):
                series = self._new_series(is_scaled, most, again)
            if norm.__class__ is tensor and not has_modes():
                value = keep(series, now_ns, norm)
            else:
                with unheard():
                    value = keep(series, now_ns, norm)
            # Of what is about to be clipped, the gradients can still be looked at.
            if is_inside and value is not None and value - value != 0.0 and args and not is_scaled:
                metrics.norm_lost(args[0], now_ns)

        pair = self._agent.guard.pair(self.name, told)
        is_compiling = is_dynamo_compiling_check()
        self._patches.replace(
            owner, name, lambda original: make_traceable_wrapper(self._patches, original, pair, is_compiling, is_inside)
        )

    def _new_series(self, is_scaled: bool, most: Any, again: bool) -> int | None:
        """The series of norms that are clipped by `most`, kept for the next time where that is a number."""
        largest = float(most) if isinstance(most, (int, float)) and math.isfinite(most) else None
        if (is_scaled, largest, again) not in self._series:
            name = "train/grad_norm_scaled" if is_scaled else "train/grad_norm"
            more = {"again": True} if again else {}
            self._series[is_scaled, largest, again] = self._metrics.series(name, "clipping", max_norm=largest, **more)
        return self._series[is_scaled, largest, again]
