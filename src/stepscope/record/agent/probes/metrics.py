"""What is known beside the loss: the norm of the gradients where they are clipped, and a GradScaler's scale.

The functions that clip stay traceable: Dynamo takes them into the user's graph as it would without us, and what runs
compiled tells nothing.
"""

from __future__ import annotations

import inspect
import math
import sys
from threading import get_ident
from time import monotonic_ns
from typing import Any

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.imports import when_imported
from stepscope.record.agent.metrics import NAME
from stepscope.record.agent.patches import Probe, is_dynamo_compiling_check, scaler_home
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
        was_told = takes_norm and not is_inside  # the norm was taken before, most often by a function that told it
        agent, metrics, known = self._agent, self._metrics, self._series
        keep, offset_ns = metrics.keep_norm, agent.clock.epoch_offset_ns

        def told(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            # In every step of a script that clips, so in one piece and by what is found at the first look.
            if get_ident() != agent.training_thread:
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
