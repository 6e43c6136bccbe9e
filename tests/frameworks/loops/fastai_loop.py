"""fastai's Learner with its own loader and optimizer, validation after each of two epochs."""

from __future__ import annotations

from typing import Any

import fastai.callback.progress  # noqa: F401  # gives Learner its `no_bar`
import torch
from control import Control, Vectors, network
from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, set_seed

BATCH = 64


class Timed(Learner):
    """Counts and times what it does."""

    control: Control

    def create_opt(self) -> None:
        super().create_opt()
        self.opt.step = self.control.timed(self.opt.step, "optimizer")

    def _backward(self) -> None:
        self.control.loss(torch.tensor(self.loss.item()))
        with self.control.phase("backward"):
            super()._backward()

    def _do_one_batch(self) -> None:
        # `one_batch` has moved the batch by now; predictions and the loss come next.
        if not self.training:
            self.control.evaluated(len(self.yb[0]))
            super()._do_one_batch()
            return
        self.control.batch(len(self.yb[0]))
        super()._do_one_batch()
        self.control.step()

    def _do_epoch_validate(self, *args: Any, **kwargs: Any) -> None:
        with self.control.evaluation():
            super()._do_epoch_validate(*args, **kwargs)


def main() -> None:
    set_seed(0)
    control = Control()
    train = DataLoader(Vectors(30 * BATCH, control), bs=BATCH, shuffle=True, num_workers=0)
    loaders = DataLoaders(train, DataLoader(Vectors(10 * BATCH), bs=BATCH, num_workers=0))
    model, criterion = network(), CrossEntropyLossFlat()
    learner = Timed(loaders, model, loss_func=control.timed(criterion, "forward"))
    learner.control = control
    model.forward = control.timed(model.forward, "forward")  # type: ignore[method-assign]
    with learner.no_bar(), learner.no_logging():
        learner.fit(2, 1e-4)
    control.tell(loss=float(torch.stack(learner.recorder.losses)[-1]), framework_step=learner.train_iter)


if __name__ == "__main__":
    main()
