"""Hugging Face's Trainer with a small GPT-2, evaluation every ten updates: `[--accumulation N] [--item-ms MS]`."""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from control import Control, Vectors
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH, BATCH, UPDATES = 32, 8, 30


class Tokens(Vectors):
    """Rows of tokens."""

    def __init__(self, items: int, control: Control | None = None, *, item_s: float = 0.0) -> None:
        super().__init__(items, control, item_s=item_s)
        self.rows = torch.randint(0, 256, (items, LENGTH), generator=torch.Generator().manual_seed(items))

    def item(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Timed(Trainer):
    """Counts and times what it does."""

    control: Control

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        return self.control.optimizer(super().create_optimizer(*args, **kwargs))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            self.control.batch(len(inputs["input_ids"]))
        with self.control.phase("forward"):
            found = super().compute_loss(model, inputs, *args, **kwargs)
        self.known_ns = time.time_ns()
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.control.loss(loss, at_ns=self.known_ns)  # its part of the step's
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.control.clipped(norm, model.parameters())
        return norm

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.control.evaluated(len(inputs["input_ids"]))
        return super().prediction_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.control.evaluation():
            return super().evaluation_loop(*args, **kwargs)


def model() -> GPT2LMHeadModel:
    """About 2.5 million parameters."""
    set_seed(0)
    size = {"n_positions": 64, "n_embd": 256, "n_layer": 3, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **size))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--item-ms", type=float, default=0.0)
    options = parser.parse_args()
    control = Control()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=16,
            gradient_accumulation_steps=options.accumulation,
            max_steps=UPDATES,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        # Two epochs and a bit: the last update of an epoch has fewer micro-batches where they do not divide.
        items = BATCH * options.accumulation * (UPDATES // 2 - 1) + BATCH
        train = Tokens(items, control, item_s=options.item_ms / 1e3)
        trainer = Timed(model(), arguments, train_dataset=train, eval_dataset=Tokens(80))
        trainer.control = control
        trainer.accelerator.backward = control.timed(trainer.accelerator.backward, "backward")
        result = trainer.train()
    for entry in trainer.state.log_history:
        control.logs({name: value for name, value in entry.items() if name != "step"})
    control.tell(loss=result.training_loss, framework_step=trainer.state.global_step)


if __name__ == "__main__":
    main()
