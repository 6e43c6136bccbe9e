"""Keras with torch below it: its own optimizer, a DataLoader, validation after each of two epochs."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

from typing import Any

import keras
import torch
from control import CLASSES, FEATURES, WIDTH, Control, Vectors
from torch.utils.data import DataLoader

BATCH = 64


class Timed(keras.Sequential):
    """Counts and times what it does. The backward pass is what lies between scaling the loss and the optimizer."""

    control: Control

    def train_step(self, data: Any) -> Any:
        self.control.batch(len(data[1]))
        logs = super().train_step(data)
        self.control.step()
        return logs

    def test_step(self, data: Any) -> Any:
        self.control.evaluated(len(data[1]))
        with self.control.evaluation():
            return super().test_step(data)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.control.phase("forward"):
            return super().__call__(*args, **kwargs)


class TimedAdam(keras.optimizers.Adam):
    control: Control

    def scale_loss(self, loss: Any) -> Any:
        self.control.loss(loss)
        self.passing = self.control.phase("backward")
        scaled = super().scale_loss(loss)
        self.passing.__enter__()
        return scaled

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        self.passing.__exit__(None, None, None)
        with self.control.phase("optimizer"):
            return super().apply(*args, **kwargs)


def main() -> None:
    keras.utils.set_random_seed(0)
    control = Control()
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
    model = Timed([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])
    optimizer = TimedAdam(1e-4)
    model.control = optimizer.control = control
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    train = DataLoader(Vectors(30 * BATCH, control), batch_size=BATCH, shuffle=True)
    held_out = DataLoader(Vectors(10 * BATCH), batch_size=BATCH)
    torch.manual_seed(0)
    history = model.fit(train, validation_data=held_out, epochs=2, verbose=0)
    control.tell(loss=history.history["loss"][-1], framework_step=int(optimizer.iterations))


if __name__ == "__main__":
    main()
