"""Takes the pictures of the dashboard in README.md and docs/: findings, steps, timeline and flame graph of the demo.

    python scripts/screenshots.py            # records the demo first (about a minute), into a temporary folder
    python scripts/screenshots.py RUN        # of a run that is there

It needs Chromium, Playwright and Pillow (the group `test` of pyproject.toml) and the built front end. The pictures are
written into docs/images with as few colours as they need, so that together they stay below 600 KB.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
IMAGES = REPOSITORY / "docs" / "images"
DEMO = Path("examples") / "cifar_png"
PAGES = ("findings", "steps", "timeline", "flame")
SIZE = {"width": 1280, "height": 800}
COLOURS = 256
LIMIT_BYTES = 600_000
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_MS = 120_000
_ADDRESS = re.compile(r"http://\S+[?&]token=\S+")
_READY = "main[aria-busy='false'] .block"
# what is drawn after a page is there
_DRAWN = {"steps": ".plot canvas", "timeline": ".block canvas", "flame": ".block svg, .block canvas"}
# where the picture begins, if not at the top of the page; what stays there is above it
_BEGINS = {"steps": "section.chart"}
_TO_TOP = "part => window.scrollBy(0, part.getBoundingClientRect().top - 60)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", nargs="?", type=Path, help="a run folder; without one the demo is recorded")
    parser.add_argument("--out", type=Path, default=IMAGES, help="where the pictures go (docs/images)")
    parser.add_argument("--dark", action="store_true", help="in the dark theme, as NAME-dark.png")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or record(Path(folder) / "train")
        with dashboard(run) as address:
            sizes = take(address, arguments.out, dark=arguments.dark)
    for path, size in sizes.items():
        print(f"{path} {size / 1000:.0f} KB")
    if sum(sizes.values()) > LIMIT_BYTES:
        print(f"together more than {LIMIT_BYTES / 1000:.0f} KB", file=sys.stderr)
        return 1
    return 0


def record(folder: Path) -> Path:
    """The demo, recorded as its README says; returns the run folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path}
    subprocess.run(["python", DEMO / "make_data.py"], cwd=REPOSITORY, env=environment, check=True)
    command = ["python", (DEMO / "train.py").as_posix()]
    subprocess.run(
        [sys.executable, "-m", "stepscope", "run", "--out", folder, "--name", "train", "--", *command],
        cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return folder


@contextmanager
def dashboard(run: Path) -> Iterator[str]:
    """The address of a dashboard that shows `run` as long as the block runs."""
    command = [sys.executable, "-m", "stepscope", "view", "--no-browser", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = next(filter(None, map(_ADDRESS.search, server.stdout)), None)
            if found is None:
                raise SystemExit("stepscope view printed no address")
            yield found.group()
        finally:
            server.terminate()


def take(address: str, out: Path, *, dark: bool) -> dict[Path, int]:
    """Takes all pictures; returns their sizes in bytes."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise SystemExit(f"needs one of {', '.join(PROGRAMS)}")
    sizes = {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        context = browser.new_context(viewport=SIZE, color_scheme="dark" if dark else "light", reduced_motion="reduce")
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(address)
        for name in PAGES:
            picture = small(shot(page, name))
            path = out / f"{name}{'-dark' if dark else ''}.png"
            path.write_bytes(picture)
            sizes[path] = len(picture)
        browser.close()
    return sizes


def shot(page: Any, name: str) -> bytes:
    """Opens the page by its link, waits until it is drawn, and takes the upper part of it."""
    link = page.locator(f'nav a[href*="/{name}"]').first
    link.wait_for()
    link.click()
    page.wait_for_timeout(200)
    page.locator(_READY).first.wait_for()
    if name in _DRAWN:
        page.locator(_DRAWN[name]).first.wait_for()
    page.evaluate("() => { document.activeElement?.blur(); window.scrollTo(0, 0); }")
    if name in _BEGINS:
        page.locator(_BEGINS[name]).first.evaluate(_TO_TOP)
    page.mouse.move(SIZE["width"] - 2, SIZE["height"] - 2)
    page.wait_for_timeout(800)  # boxes grow into their widths, and hovers fade
    return bytes(page.screenshot(animations="disabled"))


def small(picture: bytes) -> bytes:
    """The same picture as a PNG with a palette: its most frequent colours stay exactly what they are."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    colours, place, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    kept = colours[np.argsort(-counts)[:COLOURS]].astype(int)
    nearest = np.concatenate([np.abs(kept - part).sum(axis=2).argmin(axis=1) for part in _parts(colours.astype(int))])
    reduced = Image.fromarray(nearest.astype(np.uint8)[place].reshape(pixels.shape[:2]), "P")
    reduced.putpalette(kept.astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    reduced.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _parts(colours: Any, size: int = 1_000) -> Iterator[Any]:
    """Colours of shape (n, 1, 3), so many at a time that their distances to all kept ones fit in memory."""
    for first in range(0, len(colours), size):
        yield colours[first : first + size, None, :]


if __name__ == "__main__":
    sys.exit(main())
