"""As much of torch as the agent needs to wake up and to keep what a script logs."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

__version__ = "2.13.0+stub"


class Tensor:
    pass


class GradScaler:
    def scale(self, outputs: object) -> object:
        return outputs

    unscale_ = update = scale


_C = SimpleNamespace(DisableTorchFunction=nullcontext)
amp = SimpleNamespace(GradScaler=GradScaler)
nn = sys.modules["torch.nn"] = ModuleType("torch.nn")
nn.utils = ModuleType("torch.nn.utils")  # type: ignore[attr-defined]
nn.utils.clip_grad_norm_ = lambda *_: None
nn.utils.clip_grad = nn.utils
