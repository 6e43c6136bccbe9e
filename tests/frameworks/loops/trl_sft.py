"""TRL's SFTTrainer with LoRA and accumulation over two micro-batches."""

from __future__ import annotations

import random
import tempfile
from typing import Any

from control import Control
from datasets import Dataset
from hf_trainer import Timed, model
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = [f"w{number}" for number in range(200)]


class TimedSFT(Timed, SFTTrainer):
    """Counts and times as `Timed` does; Timed comes first and hands on to TRL's trainer."""


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def main() -> None:
    random.seed(0)
    control = Control()
    rows = Dataset.from_dict({"text": [" ".join(random.choices(WORDS, k=random.randint(20, 40))) for _ in range(160)]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_steps=30,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_length=64,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        trainer = TimedSFT(
            model(),
            args=arguments,
            train_dataset=rows,
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True),
        )
        trainer.control = control
        trainer.accelerator.backward = control.timed(trainer.accelerator.backward, "backward")
        collate: Any = trainer.data_collator
        trainer.data_collator = control.timed(collate, "data")
        result = trainer.train()
    control.tell(loss=result.training_loss, framework_step=trainer.state.global_step)


if __name__ == "__main__":
    main()
