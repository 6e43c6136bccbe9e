"""Takes the pictures of docs/images: every page, 1280 x 720 and 390 x 844, light and dark.

    python -m tests.dashboard.screenshots            records the demo first, a small one (half a minute)
    python -m tests.dashboard.screenshots RUN        of a run that is there

Pages that the demo leaves empty, for it has one process and no GPU, are those of the run `small` of `served_runs`,
whose values are made up. It needs Chromium, Playwright, Pillow (the group `test` of pyproject.toml) and the built front
end.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stepscope.dashboard.pages import PAGES
from tests.browser_page import PROGRAMS
from tests.dashboard import served_runs
from tests.dashboard.client import Dashboard

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGES = REPOSITORY / "docs" / "images"
DEMO = REPOSITORY / "examples" / "cifar_png"
IMAGES_OF_DEMO, EPOCHS = "640", "14"  # ten batches an epoch
SIZES = ((1280, 720), (390, 844))
THEMES = ("light", "dark")
QUALITY = 72  # of WebP: text is sharp, and all pictures together stay below the limit
LIMIT_BYTES = 3_000_000
PATIENCE_MS = 120_000
SETTLE_MS = 700  # boxes grow into their widths
_READY = "main[aria-busy='false'] .block"
# what is drawn after a page is there
_DRAWN = {"overview": ".plot canvas", "steps": ".plot canvas", "timeline": ".block canvas", "flame": ".block svg"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", nargs="?", type=Path, help="a run folder; without one the demo is recorded")
    parser.add_argument("--out", type=Path, default=IMAGES, help="where the pictures go (docs/images)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        served_runs.small(runs)
        served_runs.link((arguments.run or record(Path(folder))).resolve(), runs / "train")
        with Dashboard.start(runs) as shown:
            total = sum(taken(shown, arguments.out))
    print(f"{arguments.out}: {total / 1e6:.1f} MB")
    return int(total > LIMIT_BYTES)


def record(folder: Path) -> Path:
    """The demo with a small data set; returns the run folder."""
    work = shutil.copytree(DEMO, folder / "demo")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    environment["PYTHONPATH"] = str(REPOSITORY / "src")
    make = ["python", "make_data.py", "--data", "data", "--images", IMAGES_OF_DEMO]
    train = ["python", "train.py", "--data", "data", "--epochs", EPOCHS]
    tool = [sys.executable, "-m", "stepscope", "run", "--out", str(folder / "train"), "--name", "train", "--", *train]
    for command in (make, tool):
        subprocess.run(command, cwd=work, env=environment, check=True, stdout=subprocess.DEVNULL)
    return folder / "train"


def taken(shown: Dashboard, out: Path) -> list[int]:
    """Takes all pictures; returns their sizes in bytes."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise SystemExit(f"needs one of {', '.join(PROGRAMS)}")
    runs = {name: shown.id(name) for name in ("train", "small")}
    sizes = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width, height in SIZES:
            context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
            context.set_default_timeout(PATIENCE_MS)
            page = context.new_page()
            page.goto(shown.page(runs["train"], "overview"))
            page.locator(_READY).first.wait_for()
            empty = {link.get_attribute("href").rpartition("/")[2] for link in page.locator("nav .empty a").all()}
            for key in PAGES:
                other = {"with": runs["small"]} if key == "compare" else {}
                page.emulate_media(color_scheme=THEMES[0])  # before, for while a page loads it hears of no change
                page.goto(shown.page(runs["small" if key in empty else "train"], key, **other))
                page.locator(_READY).first.wait_for()
                for theme in THEMES:
                    page.emulate_media(color_scheme=theme)
                    page.locator(f"html[data-theme={theme}]").wait_for(state="attached")
                    path = out / f"{key}-{width}-{theme}.webp"
                    path.write_bytes(small(shot(page, key)))
                    sizes.append(path.stat().st_size)
        browser.close()
    return sizes


def shot(page: Any, key: str) -> bytes:
    """What is seen of the page once it is drawn."""
    page.locator(f'nav li a[aria-current][href*="/{key}"]').first.wait_for(state="attached")
    page.locator(_READY).first.wait_for()
    if key in _DRAWN:
        page.locator(_DRAWN[key]).first.wait_for()
    page.evaluate("() => { document.activeElement?.blur(); window.scrollTo(0, 0); }")
    page.wait_for_timeout(SETTLE_MS)
    return bytes(page.screenshot(animations="disabled"))


def small(picture: bytes) -> bytes:
    """The same picture as WebP."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").save(buffer, "WEBP", quality=QUALITY, method=6)
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(main())
