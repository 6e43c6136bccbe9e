"""amp.dtype: the forward pass and the loss in bfloat16 or float16, or without the autocast that the script has.

A real `torch.autocast` is entered at the first module call after a backward pass, an optimizer step or a fetch, and
left where the next of them begins: what the script would write around forward and loss. Once torch.compile is used it
is entered right after these instead, for a global module hook would make Dynamo compile anew. Where the script has an
autocast of its own, that one gets the type. Gradients of float16 are scaled (`Scaling`), and for one step it is looked
at what modules return (`Watch`).
"""

from __future__ import annotations

from threading import get_ident
from typing import Any
from weakref import ref

from stepscope.record.agent.frames import Place, user_place
from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.models import module_of
from stepscope.record.agent.patches import (
    ModuleHook,
    Patches,
    is_compiling_check,
    root_of,
    scaler_home,
    unless_compiling,
)
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.wrapper_importlib_bootstrap import Answer

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "off": None}


class AmpDtype(KnobBase):
    """The autocast of the training thread. `_entered` is the context it is in, None outside."""

    missed = "no module was called before a backward pass"
    _torch: Any = None  # once installed

    def install(self) -> None:
        import torch

        name = DTYPES[self.value]
        self._torch = torch
        self._dtype = None if name is None else getattr(torch, name)
        self._scaling = Scaling(self) if self.value == "fp16" else None
        self._thread = get_ident()  # until a thread trains: torch is imported by the one that will, as a rule
        self._entered: Any = None
        self._contexts: dict[tuple[str, bool], Any] = {}
        self._next_call = ModuleHook(self.guarded(self._called))
        self._busy = 0  # fetches and backward passes under way, in which nothing is entered
        self._in_backward = 0
        self._own_depth = 0  # autocast contexts of the script that are open
        self._own_seen = False
        self._without = False  # the script has opened a region without autocast
        self._device: str | None = None  # type of the device trained on
        self._model: Any = None  # weak reference to what was handed to torch.compile
        self._place: Place | None = None
        self._stopped = False
        self._watch = Watch(self, self._dtype)
        self._is_compiling = is_compiling_check()
        self._wrap_all(torch)
        self.agent.add_boundary_hook(self._leave_if_failed, "knob_autocast_left")
        self._ready()

    def uninstall(self) -> None:
        """Leave autocast, if we are in it on this thread, and take everything out."""
        super().uninstall()
        if self._torch is not None:
            self._stop()

    def at_end(self) -> None:
        """What is known by now, should no backward pass have told it."""
        if self.reported or self._stopped or self._own_seen:
            return
        if self._dtype is None:
            self.report(False, reason="the script uses no autocast that could be turned off")
        elif self._without:
            reason = "the script turns autocast off itself (enabled=False), and that is left as it is"
            self.report(False, reason=reason, place=self._place)

    def _wrap_all(self, torch: Any) -> None:
        from torch.optim import optimizer
        from torch.utils import checkpoint
        from torch.utils.data import dataloader

        look, autocast = self._patches.look, torch.amp.autocast_mode.autocast
        look(autocast, "__enter__", self._own_enters, self._own_entered)
        look(autocast, "__exit__", self._own_exits)
        look(torch.autograd, "backward", self._before_backward, self._after_backward)
        look(torch, "compile", self._before_compile, self._after_compile)
        if self._dtype is None:
            return
        for owner, name in (
            (dataloader._BaseDataLoaderIter, "__next__"),
            (dataloader.DataLoader, "_get_iterator"),  # workers must not be forked inside
            (dataloader._MultiProcessingDataLoaderIter, "_reset"),
        ):
            look(owner, name, self._before_fetch, self._after_fetch)
        # Weights cast while no gradient is recorded have none: they must not be found in the cache by a forward pass
        # that needs it.
        for owner, name in (
            (torch.no_grad, "__exit__"),
            (torch.inference_mode, "__exit__"),
            (torch.autograd.grad_mode.set_grad_enabled, "__init__"),
            (torch.autograd.grad_mode.set_grad_enabled, "__exit__"),
        ):
            look(owner, name, lambda *_args, **_kwargs: True, self._forget_casts)
        look(torch.cuda.graph, "__enter__", self._before_capture)
        look(checkpoint, "_get_autocast_kwargs", self._before_checkpoint)
        self._handles = [
            optimizer.register_optimizer_step_pre_hook(unless_compiling(self.guarded(self._before_step))),
            optimizer.register_optimizer_step_post_hook(unless_compiling(self.guarded(self._after_step))),
        ]

    def _here(self) -> bool:
        return get_ident() == (self.agent.training_thread or self._thread)

    def _before_fetch(self, *_args: Any, **_kwargs: Any) -> bool | None:
        if not self._here():
            return None
        self._leave()
        self._busy += 1
        return True

    def _after_fetch(self, _begun: bool, _result: Any, error: BaseException | None) -> None:
        self._busy -= 1
        self._ready(at_once=error is None)

    def _before_step(self, _optimizer: Any, args: Any, kwargs: Any) -> None:
        # The closure of an optimizer runs forward and backward inside the step.
        has_closure = len(args) > 1 or bool(kwargs)  # the first is the optimizer
        if self._here() and not self._busy and not (has_closure and self.agent.compile_used):
            self._leave()
            if has_closure:
                self._ready(at_once=False)

    def _after_step(self, *_step: Any) -> None:
        if self._here() and not self._busy:
            self._ready()

    def _before_backward(self, tensors: Any = None, *_args: Any, **_kwargs: Any) -> bool | None:
        if not self._here() or self._is_compiling():
            return None
        self._in_backward += 1
        self._busy += 1
        if self._in_backward == 1 and not self._stopped:
            answer = self._look()
            self._leave()
            refusal = self._scaling.before_backward(tensors) if self._scaling is not None else None
            if refusal is not None:
                self._give_up(refusal)
            elif answer is not None:
                self._tell(*answer)
        return True

    def _after_backward(self, _begun: bool, _result: Any, _error: BaseException | None) -> None:
        self._in_backward -= 1
        self._busy -= 1
        if self._in_backward == 0:
            if self._scaling is not None:
                self._scaling.after_backward()
            self._ready()

    def _forget_casts(self, *_call: Any) -> bool:
        entered = self._entered is not None and self._here()
        if entered:
            self._torch.clear_autocast_cache()
        return entered

    def _before_capture(self, *_args: Any, **_kwargs: Any) -> None:
        """A CUDA graph must make its casts itself: one from before would be the old weight at every replay."""
        if self._forget_casts():
            self._torch.set_autocast_cache_enabled(False)  # leaving sets it back

    def _before_checkpoint(self, *_args: Any, **_kwargs: Any) -> None:
        """Activation checkpointing is about to note whether autocast is on, for the time it computes again."""
        if self._next_call.is_in and not self._busy and self._here():
            self._next_call.remove()
            self._begin(self._device_of_model())

    def _ready(self, at_once: bool = True) -> None:
        """Enter at the next module call; or `at_once`, where no hook may be used."""
        if self._stopped or self._entered is not None or self._busy:
            return
        if self.agent.compile_used:
            if at_once and self._dtype is not None:
                self._enter(self._device_of_model())
        elif self._dtype is not None or not self._watch.over:
            self._next_call.add()

    def _called(self, module: Any) -> None:
        """The first module since: enter, on the device it is on."""
        if self._busy or not self._here():
            return
        parameter = next(module.parameters(), None)
        if parameter is None or self._device not in (None, parameter.device.type):
            return
        self._next_call.remove()
        self._begin(parameter.device.type)

    def _begin(self, device: str) -> None:
        self._place = self._place or user_place()
        if not self._watch.over:
            self._watch.hook.add()
        if self._dtype is not None:
            self._enter(device)

    def _enter(self, device: str) -> None:
        if self._own_depth:  # inside the script's own, which has the type already
            return
        # Nor may casts that a graph makes be found in the cache outside of it.
        key = (device, not (device == "cuda" and self._torch.cuda.is_current_stream_capturing()))
        context = self._contexts.get(key)
        if context is None:
            context = self._contexts[key] = self._torch.autocast(device, dtype=self._dtype, cache_enabled=key[1])
        if not context._enabled:
            self._give_up(f"this torch has no autocast to {self._dtype} on {device}")
            return
        self._entered = context
        context.__enter__()

    def _leave(self) -> None:
        """Leave, unless the script has entered an autocast of its own inside: contexts end in order."""
        if self._entered is not None and not self._own_depth:
            context, self._entered = self._entered, None
            context.__exit__(None, None, None)
        self._next_call.remove()

    def _device_of_model(self) -> str:
        """Of what was handed to torch.compile, while it is not known where training takes place."""
        model = self._model() if self._model is not None else None
        parameter = None if model is None else next(model.parameters(), None)
        of_model = "cuda" if self.agent.device.in_use else "cpu"
        return self._device or (of_model if parameter is None else str(parameter.device.type))

    def _before_compile(self, target: Any = None, *_args: Any, **_kwargs: Any) -> bool:
        was_ready = self._next_call.is_in
        self._next_call.remove()
        self._watch.hook.remove()
        module = module_of(self._torch, target)
        if self._model is None and module is not None:
            self._model = ref(module)
            self._place = self._place or user_place()
        return was_ready

    def _after_compile(self, was_ready: bool, _result: Any, _error: BaseException | None) -> None:
        if was_ready and self.agent.training_thread is not None and self._here():
            self._ready()

    def _own_enters(self, context: Any) -> Any:
        """Give it the type, or turn it off; its own regions without autocast stay without."""
        if self._stopped or context in self._contexts.values() or not self._here():
            return None
        self._own_depth += 1
        if not context._enabled:
            self._place = self._place or user_place()
            self._without = True
            return None
        if not self._in_backward and not self._own_seen:  # checkpoints enter contexts there
            self._own_seen = True
            self._place = user_place() or self._place
        if self._dtype is None:
            context._enabled = False
        elif context.device in ("cuda", "cpu"):
            context.fast_dtype = self._dtype
        return context

    def _own_entered(self, context: Any, _result: Any, error: BaseException | None) -> None:
        if error is None and not self._watch.over:
            self._watch.note_state(context.device)

    def _own_exits(self, context: Any, *_error: Any) -> None:
        if self._own_depth and context not in self._contexts.values() and self._here():
            self._own_depth -= 1

    def _leave_if_failed(self, _row: StepRow | None, _now_ns: int) -> None:
        """A defect turns all hooks off, the one that would leave included: not for longer than a step."""
        if not self._stopped and self.agent.guard.is_off(self.probe):
            self._own_depth = 0
            self._stop()

    def _look(self) -> tuple[bool, str] | None:
        """At the beginning of a backward pass, until it is known: what autocast has done to the forward pass."""
        entered, watch = self._entered, self._watch
        if entered is not None:
            self._device = entered.device
        if watch.over or (entered is None and not self._own_seen):
            return None
        if entered is not None:
            watch.note_state(entered.device)
        return watch.answer()

    def _tell(self, applied: bool, observed: str) -> None:
        self._watch.end()
        if self._own_seen:
            observed += f"; the script's own autocast {'is turned off' if self._dtype is None else 'got the type'}"
        if self._scaling is not None:
            observed += "; " + self._scaling.words()
        self.report(applied, observed, None if applied else "the modules do not heed it", self._place)

    def _give_up(self, reason: str) -> None:
        self.report(False, reason=reason, place=self._place)
        self._stop()

    def _stop(self) -> None:
        self._stopped = True
        if self._here():
            self._leave()
        self._next_call.remove()
        self._watch.end()
        if self._scaling is not None:
            self._scaling.stop()


OUTPUTS_LIMIT = 10_000


class Watch:
    """Looks on while its `hook` is in, a global one of forward calls: for one step, not longer."""

    def __init__(self, knob: AmpDtype, wanted: Any) -> None:
        torch = self._torch = knob._torch
        self._wanted = wanted  # a torch.dtype; None for "not shortened"
        self.hook = ModuleHook(knob.guarded(self._look), after=True)
        self.over = False
        # (whether it is as wanted, in words): of an output, and of torch's own state inside a context
        self._output: tuple[bool, str] | None = None
        self._state: tuple[bool, str] | None = None
        self._outputs = 0
        self._watched = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)

    def end(self) -> None:
        """All is known that will be."""
        self.over = True
        self.hook.remove()

    def note_state(self, device: str) -> None:
        """Keep what torch says of autocast inside a context."""
        if self._state is None or not self._state[0]:
            enabled, dtype = autocast_state(self._torch, device)
            fits = not enabled if self._wanted is None else enabled and self._fits(dtype)
            self._state = fits, f"autocast is on, to {dtype}" if enabled else "autocast is off"

    def answer(self) -> tuple[bool, str] | None:
        """Whether it is as wanted, and what was seen; None when nothing was."""
        return self._output or self._state

    def _look(self, module: Any, _inputs: Any, output: Any) -> None:
        if not isinstance(module, self._watched):
            return
        self._outputs += 1
        found = self._output is not None and (self._wanted is None or self._output[0])
        if found or self._outputs > OUTPUTS_LIMIT:
            self.hook.remove()
        elif output.__class__ is self._torch.Tensor and output.is_floating_point():
            self._output = self._fits(output.dtype), f"{type(module).__name__} returns {output.dtype}"

    def _fits(self, dtype: Any) -> bool:
        if self._wanted is None:
            return dtype not in (self._torch.bfloat16, self._torch.float16)
        return bool(dtype == self._wanted)


def autocast_state(torch: Any, device: str) -> tuple[bool, Any]:
    """Whether autocast is on for `device` in this thread, and to which type."""
    if hasattr(torch, "get_autocast_dtype"):  # from torch 2.4 on, for every device
        return bool(torch.is_autocast_enabled(device)), torch.get_autocast_dtype(device)
    if device == "cuda":
        return bool(torch.is_autocast_enabled()), torch.get_autocast_gpu_dtype()
    return bool(torch.is_autocast_cpu_enabled()), torch.get_autocast_cpu_dtype()


class Scaling:
    """Works between `before_backward` and `after_backward`, and at every optimizer step."""

    def __init__(self, knob: AmpDtype) -> None:
        torch = self._torch = knob._torch
        self._agent = knob.agent
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
        self._home = scaler_home(torch)
        self._patches = Patches(knob.agent.guard, knob.probe)
        self._patches.look(torch.optim.Optimizer, "__init__", self._note)
        self._patches.look(self._home.GradScaler, "scale", self._their_scale)

    def stop(self) -> None:
        """Take everything out; gradients are unscaled between two backward passes, so nothing is left to undo."""
        self._stopped = True
        self._patches.remove()
        self._optimizers.clear()

    def words(self) -> str:
        """What scales gradients, for the report."""
        if self._theirs:
            return "gradients are scaled by the script's own GradScaler"
        return f"gradients are scaled, by {self._scaler.get_scale():g} at first"

    def before_backward(self, tensors: Any) -> str | None:
        """Have the gradient into the loss scaled; says why when that cannot be done."""
        if self._stopped or self._theirs:
            return None
        tensors = root_of(tensors)
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
                    gradient.mul_(self._factor(gradient))
        self._scaled = True
        self._hook = tensors.register_hook(lambda gradient: gradient.mul(self._factor(gradient)).to(gradient))
        return None

    def after_backward(self) -> None:
        """Unscale what there is now."""
        if not self._scaled:
            return
        self._scaled = False
        self._hook.remove()
        for optimizer in self._living():
            if id(optimizer) not in self._unscaled_inside:
                self._unscale(optimizer)
        self._unscaled_inside.clear()

    def _unscale(self, optimizer: Any) -> None:
        if _gradients(optimizer):
            self._scaler._per_optimizer_states.pop(id(optimizer), None)  # it may be unscaled once per update only
            self._scaler.unscale_(optimizer)

    def _factor(self, gradient: Any) -> Any:
        return self._scaler._scale.to(gradient.device, non_blocking=True)

    def _note(self, optimizer: Any, *_args: Any, **_kwargs: Any) -> None:
        """An optimizer is being made: its class's `step` goes through us from now on."""
        self._optimizers = [one for one in self._optimizers if one() is not None]
        self._optimizers.append(ref(optimizer))
        home = next((kind for kind in type(optimizer).__mro__ if "step" in vars(kind)), None)
        if home is not None and home not in self._patched:
            self._patched.add(home)
            self._patches.change(home, "step", self._before_step)

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
            agent.journal.write("scaler_skip", now)
            agent.steps.optimizer_skipped(id(optimizer), now)
        return Answer()

    def _living(self) -> list[Any]:
        return [one for one in (reference() for reference in self._optimizers) if one is not None]

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


def _gradients(optimizer: Any) -> list[Any]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
