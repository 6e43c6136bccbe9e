"""What is known beside the loss: the norm of the gradients where they are clipped, and a GradScaler's scale.

The functions that clip stay traceable: Dynamo takes them into the user's graph as it would without us, and what runs
compiled tells nothing.
"""

from __future__ import annotations

import inspect
import math
import sys
from threading import get_ident
from typing import Any

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.compiling import is_compiling_check
from stepscope.record.agent.imports import when_imported
from stepscope.record.agent.metrics import NAME
from stepscope.record.agent.patches import Probe, bound, scaler_home
from stepscope.record.agent.wrapper_importlib_bootstrap import make_traceable_wrapper

FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"


class MetricsProbe(Probe):
    """Tells `agent.metrics` of norms, scales and scaled losses."""

    name = NAME

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._metrics = agent.metrics
        self._told: Any = None  # the norm that was taken last, and not clipped by yet

    def _wrap_all(self) -> None:
        import torch
        from torch.nn import utils

        for owner in (utils, utils.clip_grad):
            for name in ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_"):
                self._clipping(owner, name)
        if FSDP in sys.modules:
            self._clipping(sys.modules[FSDP].FullyShardedDataParallel, "clip_grad_norm_")
        else:
            when_imported(FSDP, self._agent.guard.wrap(self.name, self._fsdp_imported, inject=False))
        scaler = scaler_home(torch).GradScaler
        self._around(scaler, "scale", lambda _scaler, outputs=None, *_, **__: outputs, self._after_scale)
        self._around(scaler, "unscale_", lambda *_args, **_kwargs: True, self._after_unscale)
        self._around(scaler, "update", lambda scaler, *_args, **_kwargs: scaler, self._after_update)

    def _fsdp_imported(self) -> None:
        if self._patches.enabled:
            self._clipping(sys.modules[FSDP].FullyShardedDataParallel, "clip_grad_norm_")

    def _clipping(self, owner: Any, name: str) -> None:
        function = getattr(owner, name, None)
        if function is None:
            return
        signature = inspect.signature(function)

        def after(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            given = bound(signature, args, kwargs)
            if given is not None and get_ident() == self._agent.training_thread:
                self._clipped(given.arguments, result)

        pair = self._agent.guard.pair(self.name, after)
        is_compiling = is_compiling_check()
        self._patches.replace(
            owner, name, lambda original: make_traceable_wrapper(self._patches, original, pair, is_compiling)
        )

    def _clipped(self, given: dict[str, Any], result: Any) -> None:
        """A norm was taken (`result`), or gradients were clipped by one that was taken before."""
        norm = given.get("total_norm") if result is None else result
        most = given.get("max_norm")
        about: dict[str, Any] = {"max_norm": most if isinstance(most, (int, float)) and math.isfinite(most) else None}
        if result is None and norm is self._told:
            about["again"] = True
        self._told = norm if most is None else None
        name = "train/grad_norm_scaled" if self._metrics.is_scaled else "train/grad_norm"
        self._metrics.keep(self._metrics.series(name, "clipping", **about), self._agent.clock.now(), norm)

    def _after_scale(self, outputs: Any, result: Any, error: BaseException | None) -> None:
        if error is None and get_ident() == (self._agent.training_thread or get_ident()):
            self._metrics.scaled(outputs, result)

    def _after_unscale(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            self._metrics.is_scaled = False

    def _after_update(self, scaler: Any, _result: Any, error: BaseException | None) -> None:
        scale = getattr(scaler, "_scale", None)
        if error is None and scale is not None:
            self._metrics.keep(self._metrics.series("train/scale", "scaler"), self._agent.clock.now(), scale)
