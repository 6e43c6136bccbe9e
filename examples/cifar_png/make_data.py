"""Writes a small image data set: one 32x32 RGB PNG file per picture, ten classes of coloured shapes on noise.

    python make_data.py [--data DIR] [--images N] [--seed S]

Files are named `DIR/<class>/<number>.png`, like many course data sets. The same arguments give the same pixels. A
folder that already holds the asked number of pictures is left alone.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

SIZE = 32

Box = tuple[int, int, int, int]  # left, top, right, bottom
Colour = tuple[int, ...]
Draw = ImageDraw.ImageDraw


def cross(draw: Draw, box: Box, colour: Colour) -> None:
    left, top, right, bottom = box
    draw.line([(left, (top + bottom) // 2), (right, (top + bottom) // 2)], fill=colour, width=4)
    draw.line([((left + right) // 2, top), ((left + right) // 2, bottom)], fill=colour, width=4)


def bars(draw: Draw, box: Box, colour: Colour) -> None:
    left, top, right, bottom = box
    for x in range(left, right, (right - left) // 3):
        draw.line([(x, top), (x, bottom)], fill=colour, width=3)


def stripes(draw: Draw, box: Box, colour: Colour) -> None:
    left, top, right, bottom = box
    for y in range(top, bottom, (bottom - top) // 3):
        draw.line([(left, y), (right, y)], fill=colour, width=3)


def dots(draw: Draw, box: Box, colour: Colour) -> None:
    left, top, right, bottom = box
    for x in range(left, right, (right - left) // 3):
        for y in range(top, bottom, (bottom - top) // 3):
            draw.ellipse((x, y, x + 3, y + 3), fill=colour)


def arrow(draw: Draw, box: Box, colour: Colour) -> None:
    left, top, right, bottom = box
    head = (right - left) // 3
    draw.line([(left, bottom), (right, top)], fill=colour, width=3)
    draw.polygon([(right, top), (right - head, top), (right, top + head)], fill=colour)


SHAPES: dict[str, Callable[[Draw, Box, Colour], None]] = {
    "disc": lambda draw, box, colour: draw.ellipse(box, fill=colour),
    "ring": lambda draw, box, colour: draw.ellipse(box, outline=colour, width=3),
    "square": lambda draw, box, colour: draw.rectangle(box, fill=colour),
    "frame": lambda draw, box, colour: draw.rectangle(box, outline=colour, width=3),
    "triangle": lambda draw, box, colour: draw.polygon([(box[0], box[3]), (box[2], box[3]), box[:2]], fill=colour),
    "cross": cross,
    "bars": bars,
    "stripes": stripes,
    "dots": dots,
    "arrow": arrow,
}
CLASSES = tuple(SHAPES)


def make_image(label: str, rng: random.Random) -> Image.Image:
    """One picture: soft noise, a shape of random place, size and colour."""
    noise = Image.frombytes("RGB", (SIZE, SIZE), rng.randbytes(SIZE * SIZE * 3))
    image = noise.filter(ImageFilter.GaussianBlur(rng.uniform(0.6, 1.6)))
    edge = rng.randint(14, 24)
    left, top = rng.randint(1, SIZE - edge - 2), rng.randint(1, SIZE - edge - 2)
    colour = tuple(rng.randint(60, 255) for _ in range(3))
    SHAPES[label](ImageDraw.Draw(image), (left, top, left + edge, top + edge), colour)
    return image


def make_data(folder: Path, images: int, seed: int = 0) -> int:
    """Writes the pictures that are missing from `folder`; returns how many were written."""
    rng = random.Random(seed)
    written = 0
    for index in range(images):
        label = CLASSES[index % len(CLASSES)]
        path = folder / label / f"{index // len(CLASSES):05d}.png"
        image = make_image(label, rng)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
            written += 1
    return written


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="write a small image data set, one PNG file per picture")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "train")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if len(list(args.data.glob("*/*.png"))) >= args.images:
        print(f"{args.data} already holds {args.images} pictures")
        return
    written = make_data(args.data, args.images, args.seed)
    print(f"wrote {written} pictures to {args.data}")


if __name__ == "__main__":
    main()
