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
from stepscope.record.agent.metrics import NAME, scalar_of
from stepscope.record.agent.patches import Probe, scaler_home
from stepscope.record.agent.wrapper_importlib_bootstrap import make_traceable_wrapper

CLIPS = "_clip_grads_with_norm_"  # what `clip_grad_norm_` calls
FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"


class MetricsProbe(Probe):
    """Tells `agent.metrics` of norms, scales and scaled losses."""

    name = NAME

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
        takes_most, is_inside = name != "get_total_norm", name == CLIPS
        takes_norm = is_inside or name == "clip_grads_with_norm_"

        def told(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            if get_ident() == self._agent.training_thread:
                most = (args[1] if len(args) > 1 else kwargs.get("max_norm")) if takes_most else None
                norm = (args[2] if len(args) > 2 else kwargs.get("total_norm")) if takes_norm else result
                self._clipped(norm, most, takes_norm and not is_inside, args[0] if is_inside else ())

        pair = self._agent.guard.pair(self.name, told)
        is_compiling = is_compiling_check()
        self._patches.replace(
            owner, name, lambda original: make_traceable_wrapper(self._patches, original, pair, is_compiling, is_inside)
        )

    def _clipped(self, norm: Any, most: Any, was_told: bool, parameters: Any) -> None:
        """A norm was taken, or was before (`was_told`); gradients are clipped by it where there is a largest.

        Those of `parameters` are not yet.
        """
        most = float(most) if isinstance(most, (int, float)) and math.isfinite(most) else None
        key = (self._metrics.is_scaled, most, was_told and norm is self._told)
        if key not in self._series:
            name = "train/grad_norm_scaled" if key[0] else "train/grad_norm"
            self._series[key] = self._metrics.series(
                name, "clipping", max_norm=most, **{"again": True} if key[2] else {}
            )
        self._told = None if was_told else norm
        value = norm if isinstance(norm, (int, float)) else scalar_of(norm)
        now_ns = self._agent.clock.now()
        self._metrics.keep(self._series[key], now_ns, value)
        if value.__class__ is float and value - value != 0.0 and parameters and not key[0]:
            self._metrics.norm_lost(parameters, now_ns)

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
