"""A Trainer with a callback that keeps the embedding's weights as text after every update. `--fixed`: without it."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import torch
from common import Watch, parse
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

LENGTH, BATCH = 32, 8


class Tokens(Dataset):
    def __init__(self, items: int) -> None:
        self.rows = torch.randint(0, 256, (items, LENGTH))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def as_text(weights: torch.Tensor) -> str:
    return json.dumps([[round(value, 4) for value in row] for row in weights.tolist()])  # planted


class KeepsWeights(TrainerCallback):
    def __init__(self) -> None:
        self.last = ""

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.last = as_text(model.transformer.wte.weight.detach())


def main() -> None:
    options, watch = parse(steps=120), Watch()
    set_seed(0)
    torch.set_num_threads(1)
    size = {"n_positions": LENGTH, "n_embd": 192, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watch.after(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=options.steps,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        callbacks = [] if options.fixed else [KeepsWeights()]
        data = Tokens(256 * BATCH)
        Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=callbacks).train()
    watch.report()


if __name__ == "__main__":
    main()
