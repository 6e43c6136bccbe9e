"""Trains a small convolutional network on a folder of PNG files, the way an introductory course does it.

    python make_data.py && python train.py [--workers N] [--epochs N] [--steps N] [--batch-size N] [--data DIR]

Plain PyTorch and Pillow. Every picture is opened, augmented and turned into a tensor in `__getitem__`.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps
from torch import nn
from torch.utils.data import DataLoader, Dataset

MEAN = torch.tensor([0.49, 0.48, 0.45]).view(3, 1, 1)
STD = torch.tensor([0.25, 0.24, 0.26]).view(3, 1, 1)


class PngFolder(Dataset):
    """Pictures in `root/<class>/*.png`; an item is (image, label)."""

    def __init__(self, root: Path) -> None:
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        self.files = [
            (path, label) for label, name in enumerate(self.classes) for path in sorted((root / name).glob("*.png"))
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        image = Image.open(path).convert("RGB")
        width, height = image.size
        # random crop from a picture padded by 4
        padded = ImageOps.expand(image, border=4)
        left, top = random.randint(0, 8), random.randint(0, 8)
        image = padded.crop((left, top, left + width, top + height))
        # random flip and a small rotation
        if random.random() < 0.5:
            image = ImageOps.mirror(image)
        image = image.rotate(random.uniform(-10, 10), resample=Image.Resampling.BICUBIC)
        # brightness, contrast, saturation and sharpness
        for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, ImageEnhance.Sharpness):
            image = enhance(image).enhance(random.uniform(0.7, 1.3))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, 3)
        return (pixels.permute(2, 0, 1).float() / 255 - MEAN) / STD, label


class Net(nn.Module):
    """Four convolutions, each followed by a pooling, then a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.conv3 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv4 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc = nn.Linear(64 * 2 * 2, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.fc(x.flatten(1))


def train(args: argparse.Namespace) -> None:
    """Trains for `--epochs` epochs or `--steps` steps, whichever ends first."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # layers this small gain nothing from a second thread
    dataset = PngFolder(args.data)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers)
    model = Net(len(dataset.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    steps = 0
    for epoch in range(args.epochs):
        loss_sum, correct, seen = 0.0, 0, 0
        for images, labels in loader:
            output = model(images)
            loss = F.cross_entropy(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(labels)
            correct += int((output.argmax(1) == labels).sum())
            seen += len(labels)
            steps += 1
            if steps == args.steps:
                break
        print(f"epoch {epoch + 1}: loss {loss_sum / seen:.3f}, accuracy {correct / seen:.1%}", flush=True)
        if steps == args.steps:
            break


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="train a small CNN on a folder of PNG files")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "train")
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=None, help="stop after this many steps")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    if not args.data.is_dir():
        parser.error(f"{args.data} does not exist; run make_data.py first")
    train(args)


if __name__ == "__main__":
    main()
