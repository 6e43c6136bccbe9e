"""Stochastic gradient descent as an optimizer of torch's, without the second that torch's own takes at its start:
those import the compiler when they are made, and most of what is tested here has nothing to do with one."""

from __future__ import annotations

from typing import Any

import torch


class PlainSGD(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append({**self.defaults, **param_group, "params": list(param_group["params"])})

    def zero_grad(self, *_: Any, **__: Any) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self, *_: Any) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
