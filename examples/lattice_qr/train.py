"""Trains a flow for lattice gauge fields, with samples that take longer to draw than to train on.

    python train.py [--gram-schmidt] [--steps N] [--batch N] [--device cuda]

Every step draws ten batches of evenly distributed fields. `haar_qr` draws them by a QR decomposition of each link's
matrix; `--gram-schmidt` draws from the same distribution without one.
"""

from __future__ import annotations

import argparse

import torch
from flow import PLANES, Flow, haar_gram_schmidt, haar_qr, reverse_kl

DRAWS, BETA = 10, 2.0


def train(steps: int, batch: int, gram_schmidt: bool, device: str) -> None:
    """Runs `steps` training steps and prints the loss now and then."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    draw = haar_gram_schmidt if gram_schmidt else haar_qr
    flow = Flow().to(device)
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(DRAWS):
            plane = int(torch.randint(len(PLANES), ()))
            loss = reverse_kl(*flow(draw(batch, device), plane), BETA) / DRAWS
            loss.backward()
            total += loss.item()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {total:.4f}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="train a flow for lattice gauge fields")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch", type=int, default=64, help="fields in a batch")
    parser.add_argument("--device", default="cpu", help="where to draw and train")
    parser.add_argument("--gram-schmidt", action="store_true", help="draw fields without a QR decomposition")
    args = parser.parse_args()
    train(args.steps, args.batch, args.gram_schmidt, args.device)


if __name__ == "__main__":
    main()
