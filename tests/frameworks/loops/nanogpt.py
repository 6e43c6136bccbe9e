"""nanoGPT's train loop: `get_batch` from a memmap, accumulation over two micro-batches, `estimate_loss`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from control import Control
from torch import nn
from torch.nn import functional as F

VOCABULARY, BLOCK, WIDTH, BATCH = 128, 64, 192, 4
MAX_ITERATIONS, EVAL_INTERVAL, EVAL_BATCHES, ACCUMULATION = 40, 20, 3, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = self.attention(self.before(x)).view(rows, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.wide(self.between(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits = self.head(self.blocks(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    torch.manual_seed(0)
    control = Control(loader=False, evaluation_seen=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        np.random.default_rng(0).integers(0, VOCABULARY, 100_000, dtype=np.uint16).tofile(path)

        def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
            data = np.memmap(path, dtype=np.uint16, mode="r")
            starts = torch.randint(len(data) - BLOCK, (BATCH,))
            x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in starts])
            y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts])
            return x, y

        @torch.no_grad()
        def estimate_loss() -> float:
            model.eval()
            losses = [model(*get_batch())[1].item() for _ in range(EVAL_BATCHES)]
            model.train()
            return sum(losses) / len(losses)

        model = Gpt()
        optimizer = control.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        x, y = get_batch()
        iteration = 0
        while True:
            if iteration % EVAL_INTERVAL == 0:
                with control.evaluation():
                    print(f"step {iteration}: loss {estimate_loss():.6f}")
            for _ in range(ACCUMULATION):
                with control.phase("forward"):
                    _, loss = model(x, y)
                    control.loss(loss, ACCUMULATION)
                    loss = loss / ACCUMULATION
                x, y = get_batch()  # while the device computes, on a machine with one
                with control.phase("backward"):
                    loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            control.clipped(norm, model.parameters())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            iteration += 1
            if iteration >= MAX_ITERATIONS:
                break
    control.tell(loss=loss.item() * ACCUMULATION)


if __name__ == "__main__":
    main()
