"""amp.dtype: the forward pass and the loss in bfloat16 or float16, or without the autocast that the script has.

A real `torch.autocast` is entered at the first module call after a backward pass, an optimizer step or a fetch, and
left where the next of them begins: what the script would write around forward and loss. Once torch.compile is used it
is entered right after these instead, for a global module hook would make Dynamo compile anew. Where the script has an
autocast of its own, that one gets the type.
"""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

from stepscope.record.agent.compiling import is_compiling_check
from stepscope.record.agent.frames import Place, user_place
from stepscope.record.agent.knobs.autocast_watch import Watch, autocast_state
from stepscope.record.agent.knobs.base import KnobBase
from stepscope.record.agent.knobs.scaling import Scaling
from stepscope.record.agent.probes.patch import PatchSet

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.knobs.base import Report
    from stepscope.record.agent.steps import StepRow

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "off": None}


class AmpDtype(KnobBase):
    """The autocast of the training thread. `_entered` is the context it is in, None outside."""

    missed = "no module was called before a backward pass"

    def install(self, agent: Agent, value: str, report: Report) -> None:
        """`value`: bf16, fp16 or off."""
        import torch

        name = DTYPES[value]
        self._torch: Any = torch
        self._agent, self._report = agent, report
        self._dtype = None if name is None else getattr(torch, name)
        self._scaling = Scaling(agent, self.name) if value == "fp16" else None
        self._thread = get_ident()  # until a thread trains: torch is imported by the one that will, as a rule
        self._entered: Any = None
        self._contexts: dict[tuple[str, bool], Any] = {}
        self._hook: Any = None
        self._busy = 0  # fetches and backward passes under way, in which nothing is entered
        self._in_backward = 0
        self._own_depth = 0  # autocast contexts of the script that are open
        self._own_seen = False
        self._device: str | None = None  # type of the device trained on
        self._model: Any = None  # weak reference to what was handed to torch.compile
        self._place: Place | None = None
        self._stopped = False
        self._watch: Watch | None = Watch(torch, self._dtype)
        self._is_compiling = is_compiling_check()
        self._patches = PatchSet()
        self._handles: list[Any] = []
        self._patches.install(partial(self._wrap_all, torch))
        self._wrap_optimizers()
        agent.add_boundary_hook(self._leave_if_failed, "knob_autocast_left")
        self._ready()

    def uninstall(self) -> None:
        """Leave autocast, if we are in it on this thread, and take everything out."""
        if not hasattr(self, "_handles"):
            return
        self._stop()
        self._patches.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def at_end(self) -> None:
        """What is known by now, should no backward pass have told it."""
        if self._report.made or self._stopped:
            return
        if self._dtype is None and not self._own_seen:
            self._report(False, reason="the script uses no autocast that could be turned off")

    # ------------------------------------------------------------------------------------------------ the places

    def _wrap_all(self, torch: Any) -> None:
        from torch.utils import checkpoint
        from torch.utils.data import dataloader

        around, pair = self._patches.around, partial(self._agent.guard.pair, "knob." + self.name)
        around(torch.amp.autocast_mode.autocast, "__enter__", pair(self._own_enters, self._own_entered))
        around(torch.amp.autocast_mode.autocast, "__exit__", pair(self._own_exits))
        around(torch.autograd, "backward", pair(self._before_backward, self._after_backward))
        around(torch, "compile", pair(self._before_compile, self._after_compile))
        if self._dtype is None:
            return
        fetch = pair(self._before_fetch, self._after_fetch)
        around(dataloader._BaseDataLoaderIter, "__next__", fetch)
        around(dataloader.DataLoader, "_get_iterator", fetch)  # workers must not be forked inside
        around(dataloader._MultiProcessingDataLoaderIter, "_reset", fetch)
        # Weights cast while no gradient is recorded have none: they must not be found in the cache by a forward pass
        # that needs it.
        forget = pair(_nothing, self._forget_casts)
        around(torch.no_grad, "__exit__", forget)
        around(torch.inference_mode, "__exit__", forget)
        around(torch.autograd.grad_mode.set_grad_enabled, "__init__", forget)
        around(torch.autograd.grad_mode.set_grad_enabled, "__exit__", forget)
        around(torch.cuda.graph, "__enter__", pair(self._before_capture))
        around(checkpoint, "_get_autocast_kwargs", pair(self._before_checkpoint))

    def _wrap_optimizers(self) -> None:
        if self._dtype is None:
            return
        from torch.optim import optimizer as module

        wrap, is_compiling = partial(self._agent.guard.wrap, "knob." + self.name), self._is_compiling
        leave, ready = wrap(self._before_step), wrap(self._after_step)

        def before_step(_optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                leave(bool(args) or bool(kwargs))

        def after_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not is_compiling():
                ready()

        self._handles = [
            module.register_optimizer_step_pre_hook(before_step),
            module.register_optimizer_step_post_hook(after_step),
        ]

    def _here(self) -> bool:
        """Whether this is the thread that trains."""
        return get_ident() == (self._agent.training_thread or self._thread)

    def _before_fetch(self, *_args: Any, **_kwargs: Any) -> bool:
        if not self._here():
            return False
        self._leave()
        self._busy += 1
        return True

    def _after_fetch(self, begun: bool | None, _result: Any, error: BaseException | None) -> None:
        if begun:
            self._busy -= 1
            self._ready(at_once=error is None)

    def _before_step(self, has_closure: bool) -> None:
        # The closure of an optimizer runs forward and backward inside the step.
        if self._here() and not self._busy and not (has_closure and self._agent.compile_used):
            self._leave()
            if has_closure:
                self._ready(at_once=False)

    def _after_step(self) -> None:
        if self._here() and not self._busy:
            self._ready()

    def _before_backward(self, tensors: Any = None, *_args: Any, **_kwargs: Any) -> bool:
        if not self._here() or self._is_compiling():
            return False
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

    def _after_backward(self, begun: bool | None, _result: Any, _error: BaseException | None) -> None:
        if begun:
            self._in_backward -= 1
            self._busy -= 1
            if self._in_backward == 0:
                if self._scaling is not None:
                    self._scaling.after_backward()
                self._ready()

    def _forget_casts(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        if self._entered is not None and self._here():
            self._torch.clear_autocast_cache()

    def _before_capture(self, *_args: Any, **_kwargs: Any) -> None:
        """A CUDA graph must make its casts itself: one from before would be the old weight at every replay."""
        if self._entered is not None and self._here():
            self._torch.clear_autocast_cache()
            self._torch.set_autocast_cache_enabled(False)  # leaving sets it back

    def _before_checkpoint(self, *_args: Any, **_kwargs: Any) -> None:
        """Activation checkpointing is about to note whether autocast is on, for the time it computes again."""
        if self._hook is not None and not self._busy and self._here():
            self._remove_hook()
            self._begin(self._device_of_model())

    # ----------------------------------------------------------------------------------------- entering, leaving

    def _ready(self, at_once: bool = True) -> None:
        """Enter at the next module call; or `at_once`, where no hook may be used."""
        if self._stopped or self._entered is not None or self._busy:
            return
        if self._agent.compile_used:
            if at_once and self._dtype is not None:
                self._enter(self._device_of_model())
        elif self._hook is None and (self._dtype is not None or self._watch is not None):
            from torch.nn.modules.module import register_module_forward_pre_hook

            is_compiling = self._is_compiling
            called = self._agent.guard.wrap("knob." + self.name, self._called)

            def before_forward(module: Any, _inputs: Any) -> None:
                if not is_compiling():
                    called(module)

            self._hook = register_module_forward_pre_hook(before_forward)

    def _called(self, module: Any) -> None:
        """The first module since: enter, on the device it is on."""
        if self._busy or not self._here():
            return
        parameter = next(module.parameters(), None)
        if parameter is None or self._device not in (None, parameter.device.type):
            return
        self._remove_hook()
        self._begin(parameter.device.type)

    def _begin(self, device: str) -> None:
        if self._place is None:
            self._place = user_place()
        if self._watch is not None:
            self._watch.start()
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
        self._remove_hook()

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _device_of_model(self) -> str:
        """Of what was handed to torch.compile, while it is not known where training takes place."""
        if self._device is not None:
            return self._device
        model = self._model() if self._model is not None else None
        parameter = None if model is None else next(model.parameters(), None)
        if parameter is not None:
            return str(parameter.device.type)
        return "cuda" if self._agent.device.in_use else "cpu"

    def _before_compile(self, target: Any = None, *_args: Any, **_kwargs: Any) -> bool:
        was_ready = self._hook is not None
        self._remove_hook()
        if self._watch is not None:
            self._watch.stop()
        module = target if isinstance(target, self._torch.nn.Module) else getattr(target, "__self__", None)
        if self._model is None and isinstance(module, self._torch.nn.Module):
            self._model = ref(module)
            self._place = self._place or user_place()
        return was_ready

    def _after_compile(self, was_ready: bool | None, _result: Any, _error: BaseException | None) -> None:
        if was_ready and self._agent.training_thread is not None and self._here():
            self._ready()

    # ------------------------------------------------------------------------------------ the script's own autocast

    def _own_enters(self, context: Any) -> Any:
        """Give it the type, or turn it off; its own regions without autocast stay without."""
        if self._stopped or context in self._contexts.values() or not self._here():
            return None
        self._own_depth += 1
        if not context._enabled:
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
        if context is not None and error is None and self._watch is not None:
            self._watch.note_state(*autocast_state(self._torch, context.device))

    def _own_exits(self, context: Any, *_error: Any) -> None:
        if self._own_depth and context not in self._contexts.values() and self._here():
            self._own_depth -= 1

    def _leave_if_failed(self, _row: StepRow | None, _now_ns: int) -> None:
        """A defect turns all hooks off, the one that would leave included: not for longer than a step."""
        if not self._stopped and self._agent.guard.is_off("knob." + self.name):
            self._own_depth = 0
            self._stop()

    # ------------------------------------------------------------------------------------------------ reporting

    def _look(self) -> tuple[bool, str] | None:
        """At the beginning of a backward pass, until it is known: what autocast has done to the forward pass."""
        if self._entered is not None:
            self._device = self._entered.device
        watch = self._watch
        if watch is None or (self._entered is None and not self._own_seen):
            return None
        if self._entered is not None:
            watch.note_state(*autocast_state(self._torch, self._entered.device))
        return watch.answer()

    def _tell(self, applied: bool, observed: str) -> None:
        self._end_watch()
        if self._own_seen:
            observed += f"; the script's own autocast {'is turned off' if self._dtype is None else 'got the type'}"
        if self._scaling is not None:
            observed += "; " + self._scaling.words()
        self._report(applied, observed, None if applied else "the modules do not heed it", self._place)

    def _give_up(self, reason: str) -> None:
        self._report(False, reason=reason, place=self._place)
        self._stop()

    def _stop(self) -> None:
        self._stopped = True
        if self._here():
            self._leave()
        self._remove_hook()
        self._end_watch()
        if self._scaling is not None:
            self._scaling.stop()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return
