"""Trains a small GPT on tokens made up on the spot, with a famous mistake in its loss.

    python train.py [--vectorized] [--steps N] [--batch-size N] [--lr X]

The loss is summed in a Python loop over the tokens of all sequences; `--vectorized` computes the same figure with one
call.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 256, 32, 2, 2, 4


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, both with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Token and position embeddings, `LAYERS` blocks, a linear head. (batch, length) to (batch, length, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def looped_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy, one token at a time."""
    loss = torch.zeros(())
    batch, length = targets.shape
    for b in range(batch):
        for t in range(length):
            loss = loss + F.cross_entropy(logits[b, t], targets[b, t])
    return loss / (batch * length)


def vectorized_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same figure in one call."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_text(length: int) -> torch.Tensor:
    """A sequence of token numbers with some structure: a noisy walk through the vocabulary."""
    moves = torch.randint(-2, 3, (length,))
    return moves.cumsum(0) % VOCABULARY


def train(steps: int, vectorized: bool, batch_size: int = BATCH, lr: float = 1e-3) -> None:
    """Runs `steps` training steps and prints the loss now and then."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # operators this small gain nothing from a second thread
    text = make_text(100_000)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loss_function = vectorized_loss if vectorized else looped_loss
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (batch_size,))
        window = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        loss = loss_function(model(window[:, :-1]), window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="train a small GPT")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--vectorized", action="store_true", help="compute the loss in one call")
    parser.add_argument("--batch-size", type=int, default=BATCH, help="sequences in a step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    args = parser.parse_args()
    train(args.steps, args.vectorized, args.batch_size, args.lr)


if __name__ == "__main__":
    main()
