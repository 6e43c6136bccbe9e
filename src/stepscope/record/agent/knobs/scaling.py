"""Gradient scaling for float16, where the script has none: a GradScaler of torch's, used from outside.

Not the loss is scaled but the gradient that flows into it, by a hook on the tensor that backward is called on: the
script's loss stays what it is. Gradients are unscaled right after each backward pass, so that clipping and logging see
them as they are; those that stay for the next one are scaled again before it. An optimizer step whose gradients hold
infinities is left out, as GradScaler.step would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator
from weakref import ref

from stepscope.record.agent.knobs.calls import Answer, CallPatches
from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent


class Scaling:
    """Works between `before_backward` and `after_backward`, and at every optimizer step."""

    def __init__(self, agent: Agent, knob: str) -> None:
        import torch

        self._torch: Any = torch
        self._agent = agent
        self._knob = knob
        self._optimizers: list[ref[Any]] = []
        self._patched: set[type] = set()
        self._scaler: Any = None
        self._theirs = False  # the script scales its losses itself
        self._stepped = False  # an optimizer has stepped, or was kept from it, since the scale was updated
        self._closure = False
        self._scaled = False  # a backward pass of ours is under way
        self._unscaled_inside: set[int] = set()  # optimizers that stepped within it
        self._hook: Any = None
        self._stopped = False
        self._looks, self._steps = PatchSet(), CallPatches(agent, knob)
        made, scale = agent.guard.pair("knob." + knob, self._note), agent.guard.pair("knob." + knob, self._their_scale)
        self._home = torch.amp if hasattr(torch.amp, "GradScaler") else torch.cuda.amp

        def make() -> None:
            self._looks.around(torch.optim.Optimizer, "__init__", made)
            self._looks.around(self._home.GradScaler, "scale", scale)

        self._looks.install(make)

    def stop(self) -> None:
        """Take everything out; gradients are unscaled between two backward passes, so nothing is left to undo."""
        self._stopped = True
        self._looks.remove()
        self._steps.remove()
        self._optimizers.clear()

    def words(self) -> str:
        """What scales gradients, for the report."""
        if self._theirs:
            return "gradients are scaled by the script's own GradScaler"
        return f"gradients are scaled, by {self._scaler.get_scale():g} at first"

    # ------------------------------------------------------------------------------------------------- backward

    def before_backward(self, tensors: Any) -> str | None:
        """Have the gradient into the loss scaled; says why when that cannot be done."""
        if self._stopped or self._theirs:
            return None
        if tensors.__class__ in (list, tuple) and len(tensors) == 1:
            tensors = tensors[0]
        if not isinstance(tensors, self._torch.Tensor):
            return "backward is called on several tensors, which gradient scaling cannot follow"
        if not tensors.requires_grad:
            return None  # torch will say so
        if self._scaler is None or self._closure:
            refusal = self._refusal(tensors.device)
            if refusal is not None:
                return refusal
            self._make(tensors.device)
        scaler = self._scaler
        if self._stepped:
            self._stepped = False
            if any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values()):
                scaler.update()
        with self._torch.no_grad():
            for optimizer in self._living():
                for gradient in _gradients(optimizer):
                    gradient.mul_(self._factor(gradient.device))
        self._scaled = True
        self._hook = tensors.register_hook(lambda gradient: gradient.mul(self._factor(gradient.device)).to(gradient))
        return None

    def after_backward(self) -> None:
        """Unscale what there is now."""
        if not self._scaled:
            return
        self._scaled = False
        self._hook.remove()
        self._hook = None
        for optimizer in self._living():
            if id(optimizer) not in self._unscaled_inside:
                self._unscale(optimizer)
        self._unscaled_inside.clear()

    def _unscale(self, optimizer: Any) -> None:
        if next(_gradients(optimizer), None) is not None:
            self._scaler._per_optimizer_states.pop(id(optimizer), None)  # it may be unscaled once per update only
            self._scaler.unscale_(optimizer)

    def _factor(self, device: Any) -> Any:
        return self._scaler._scale.to(device, non_blocking=True)

    # -------------------------------------------------------------------------------------------- optimizer steps

    def _note(self, optimizer: Any, *_args: Any, **_kwargs: Any) -> None:
        """An optimizer is being made: its class's `step` goes through us from now on."""
        self._optimizers = [one for one in self._optimizers if one() is not None]
        self._optimizers.append(ref(optimizer))
        home = next((kind for kind in type(optimizer).__mro__ if "step" in vars(kind)), None)
        if home is not None and home not in self._patched:
            self._patched.add(home)
            self._steps.change(home, "step", self._before_step)

    def _before_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Answer | None:
        if self._stopped or self._theirs:
            return None
        if any(callable(one) for one in (*args, *kwargs.values())):
            self._closure = True
        if self._closure or self._scaler is None:
            return None
        if self._scaled:  # an optimizer that steps inside the backward pass
            self._unscale(optimizer)
            self._unscaled_inside.add(id(optimizer))
        state = self._scaler._per_optimizer_states.get(id(optimizer))
        found = state["found_inf_per_device"] if state is not None else {}
        if not found:
            return None
        self._stepped = True
        if not sum(value.item() for value in found.values()):
            return None
        agent = self._agent
        now = agent.clock.now()
        if agent.accepts(strong=True):
            agent.events.write("scaler_skip", now)
            agent.steps.optimizer_skipped(id(optimizer), now)
        return Answer()

    def _living(self) -> Iterator[Any]:
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    # ------------------------------------------------------------------------------------------------ beginning

    def _their_scale(self, scaler: Any, *_args: Any, **_kwargs: Any) -> None:
        if scaler is not self._scaler and scaler.is_enabled():
            self._theirs = True

    def _refusal(self, device: Any) -> str | None:
        """Why gradients cannot be scaled here; None when they can."""
        torch = self._torch
        if self._closure:
            return "the optimizer's step runs the backward pass in a closure, which gradient scaling cannot follow"
        if device.type not in ("cuda", "cpu") or (device.type == "cpu" and self._home is not torch.amp):
            return f"this torch cannot scale gradients on {device.type}"
        groups = [group for optimizer in self._living() for group in optimizer.param_groups]
        parameters = [one for group in groups for one in group["params"]]
        if not parameters:
            return "no optimizer of torch.optim holds the parameters, so gradients could not be unscaled"
        if any(one.dtype in (torch.float16, torch.bfloat16) for one in parameters):
            return "parameters are in half precision already, whose gradients cannot be unscaled"
        if any(hasattr(one, "_local_tensor") or type(one).__name__ == "FlatParameter" for one in parameters):
            return "parameters are sharded, which needs a GradScaler that knows of the shards"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is captured, in which no step can be left out"
        return None

    def _make(self, device: Any) -> None:
        torch, kind = self._torch, self._home.GradScaler
        self._scaler = kind(device.type) if self._home is torch.amp else kind()
        one = torch.ones((), device=device)
        self._scaler.scale(one)  # makes the scale, on the device
        # What unscaling calls: if this device lacks it, it must be known before anything is scaled.
        torch._amp_foreach_non_finite_check_and_unscale_([one], torch.zeros_like(one), torch.ones_like(one))


def _gradients(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad
