"""Hugging Face's Trainer on a small GPT-2 whose tokens are in memory: its time is the model's."""

from __future__ import annotations

import tempfile

import torch
from common import Watch, parse
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH, BATCH = 48, 8


class Tokens(Dataset):
    def __init__(self, items: int) -> None:
        self.rows = torch.randint(0, 256, (items, LENGTH))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    options, watch = parse(steps=120), Watch()
    set_seed(0)
    torch.set_num_threads(1)
    size = {"n_positions": LENGTH, "n_embd": 192, "n_layer": 3, "n_head": 4}
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
        Trainer(model, arguments, train_dataset=Tokens(256 * BATCH), optimizers=(optimizer, None)).train()
    watch.report()


if __name__ == "__main__":
    main()
