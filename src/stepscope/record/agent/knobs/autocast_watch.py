"""What autocast has done to a forward pass: the type of what linear and convolution modules return."""

from __future__ import annotations

from typing import Any

from stepscope.record.agent.compiling import is_compiling_check

OUTPUTS_LIMIT = 10_000


class Watch:
    """Looks on from `start` to `stop`, by a global forward hook: for one step, not longer."""

    def __init__(self, torch: Any, wanted: Any) -> None:
        self._torch = torch
        self._wanted = wanted  # a torch.dtype; None for "not shortened"
        self._handle: Any = None
        self._seen: tuple[str, Any] | None = None  # (class, type) of an output, of the wanted type where there is one
        self._state: tuple[bool, Any] | None = None
        self._outputs = 0
        self._watched = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
        self._is_compiling = is_compiling_check()

    def start(self) -> None:
        """Begin to look, if not begun."""
        if self._handle is None:
            from torch.nn.modules.module import register_module_forward_hook

            def after_forward(module: Any, _inputs: Any, output: Any) -> None:
                if isinstance(module, self._watched) and not self._is_compiling():
                    self._look(module, output)

            self._handle = register_module_forward_hook(after_forward)

    def stop(self) -> None:
        """Take the hook out. What was seen stays known."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def note_state(self, enabled: bool, dtype: Any) -> None:
        """What torch said of autocast inside a context."""
        if self._state is None or not self._fits_state():
            self._state = (enabled, dtype)

    def answer(self) -> tuple[bool, str] | None:
        """Whether it is as wanted, and what was seen; None when nothing was."""
        if self._seen is not None:
            kind, dtype = self._seen
            return self._fits(dtype), f"{kind} returns {dtype}"
        if self._state is None:
            return None
        enabled, dtype = self._state
        return self._fits_state(), f"autocast is on, to {dtype}" if enabled else "autocast is off"

    def _look(self, module: Any, output: Any) -> None:
        self._outputs += 1
        found = self._seen is not None and (self._wanted is None or self._fits(self._seen[1]))
        if found or self._outputs > OUTPUTS_LIMIT:
            self.stop()
        elif output.__class__ is self._torch.Tensor and output.is_floating_point():
            self._seen = (type(module).__name__, output.dtype)

    def _fits(self, dtype: Any) -> bool:
        if self._wanted is None:
            return dtype not in (self._torch.bfloat16, self._torch.float16)
        return bool(dtype == self._wanted)

    def _fits_state(self) -> bool:
        if self._state is None:
            return False
        enabled, dtype = self._state
        return not enabled if self._wanted is None else enabled and self._fits(dtype)


def autocast_state(torch: Any, device: str) -> tuple[bool, Any]:
    """Whether autocast is on for `device` in this thread, and to which type."""
    if hasattr(torch, "get_autocast_dtype"):  # from torch 2.4 on, for every device
        return bool(torch.is_autocast_enabled(device)), torch.get_autocast_dtype(device)
    if device == "cuda":
        return bool(torch.is_autocast_enabled()), torch.get_autocast_gpu_dtype()
    return bool(torch.is_autocast_cpu_enabled()), torch.get_autocast_cpu_dtype()
