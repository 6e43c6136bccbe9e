"""A Trainer whose collator masks tokens one at a time in Python. `--fixed`: all of a batch at once."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence

import torch
from common import Watch, parse
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

LENGTH, BATCH, MASK, IGNORED = 128, 32, 255, -100
Batch = dict[str, torch.Tensor]


class Tokens(Dataset):
    def __init__(self, items: int) -> None:
        self.rows = torch.randint(0, 255, (items, LENGTH))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def collate_each(rows: Sequence[torch.Tensor]) -> Batch:
    inputs, labels = torch.empty(2, len(rows), LENGTH, dtype=torch.long)
    for number, row in enumerate(rows):  # planted
        for column, token in enumerate(row):
            chosen = random.random() < 0.15
            inputs[number, column] = MASK if chosen else token
            labels[number, column] = token if chosen else IGNORED
    return {"input_ids": inputs, "labels": labels}


def collate_at_once(rows: Sequence[torch.Tensor]) -> Batch:
    tokens = torch.stack(list(rows))
    chosen = torch.rand(tokens.shape) < 0.15
    return {"input_ids": tokens.masked_fill(chosen, MASK), "labels": tokens.masked_fill(~chosen, IGNORED)}


def main() -> None:
    options, watch = parse(steps=100), Watch()
    set_seed(0)
    torch.set_num_threads(1)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForMaskedLM(BertConfig(vocab_size=256, max_position_embeddings=LENGTH, **size))
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
            remove_unused_columns=False,
        )
        collate = collate_at_once if options.fixed else collate_each
        data = Tokens(64 * BATCH)
        Trainer(model, arguments, collate, train_dataset=data, optimizers=(optimizer, None)).train()
    watch.report()


if __name__ == "__main__":
    main()
