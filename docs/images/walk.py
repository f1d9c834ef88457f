"""Makes the pictures of the walk in ``docs/tutorials/explosion.md``, and the moving one.

    python docs/images/walk.py [--runs FOLDER]

Two real runs of a small residual network on scikit-learn's digits; in the second, one block has a
learning rate of 3 from step 200 on. Then TensorBoard in Chromium, and clicks. Needs Chromium and
Playwright.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "tests" / "helpers"))
browser: Any = import_module("browser")

SIZE = {"width": 1280, "height": 800}
MOVING_WIDTH = 960
CAPTION_HEIGHT = 46


# The page has the only copy of the code.
TUTORIAL = HERE.parent / "tutorials" / "explosion.md"
names: dict[str, Any] = {}
exec(re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)[0], names)
Block, train = names["Block"], names["train"]


class Film:
    """Collects frames: the page, with the pointer where the next click will be, and a caption."""

    def __init__(self, page: Any, scratch: Path) -> None:
        self._page = page
        self._shot = scratch / "shot.png"
        self._frames: list[tuple[Image.Image, int]] = []

    def still(self, name: str) -> None:
        """The page as it is now, as a picture of the docs."""
        self._picture().save(HERE / f"{name}.webp", quality=82, method=6)

    def click(self, locator: Any, caption: str) -> None:
        """A frame that shows where, and the click."""
        box = locator.bounding_box()
        at = box["x"] + min(box["width"] / 2, 60), box["y"] + min(box["height"] / 2, 40)
        self.frame(caption, at=at, ms=1600)
        self._page.page.mouse.click(*at)

    def frame(self, caption: str, *, at: tuple[float, float] | None = None, ms: int) -> None:
        """What is seen now, with a caption, for so many milliseconds."""
        picture = self._picture()
        if at is not None:
            pen = ImageDraw.Draw(picture)
            x, y = at
            pen.ellipse((x - 22, y - 22, x + 22, y + 22), outline="#e8710a", width=5)
        height = SIZE["height"] * MOVING_WIDTH // SIZE["width"]
        frame = Image.new("RGB", (MOVING_WIDTH, height + CAPTION_HEIGHT), "#202124")
        small = picture.resize((MOVING_WIDTH, height), Image.Resampling.LANCZOS)
        frame.paste(small, (0, CAPTION_HEIGHT))
        middle = MOVING_WIDTH / 2, CAPTION_HEIGHT / 2
        font = ImageFont.load_default(24)
        ImageDraw.Draw(frame).text(middle, caption, "#ffffff", font, "mm")
        self._frames.append((frame, ms))

    def save(self, name: str) -> None:
        frames, times = zip(*self._frames, strict=True)
        frames[0].save(
            HERE / f"{name}.webp", save_all=True, append_images=frames[1:], duration=list(times),
            loop=0, quality=75, method=6,
        )  # fmt: skip

    def _picture(self) -> Image.Image:
        self._page.page.screenshot(path=self._shot)
        with Image.open(self._shot) as shot:
            return shot.convert("RGB")


def settle(page: Any) -> None:
    page.wait()
    page.page.wait_for_timeout(400)  # the page draws in the next frame


def walk(page: Any, film: Film) -> None:
    """From opening the page to knowing what changed."""
    page.open()
    settle(page)
    film.still("walk-open")
    film.frame("The page opens with the newest run", ms=2400)
    alert = page.locator(".alerts .alert").last
    film.click(alert, "1. The first alert: when, and why?")
    page.locator(".onsets li").first.wait_for()
    settle(page)
    film.still("walk-alert")
    film.frame("Step, cause, and which layers changed first", ms=3200)
    film.click(page.locator(".onsets li button").first, "2. Which layer was first?")
    page.locator(".detail[data-loaded=true]").wait_for()
    settle(page)
    film.frame("Its numbers, histograms and curves", ms=2800)
    film.click(page.locator("button.reset"), "3. Is it still so?")
    settle(page)
    film.still("walk-still")
    film.frame("To the end of the run", ms=2800)
    film.save("walk")
    page.page.mouse.move(0, 0)
    page.open()
    page.locator("button[aria-label='Compare with: none']").click()
    before = page.locator(".runs tr:has-text('before')")
    before.wait_for()
    settle(page)
    film.still("walk-runs")
    before.click()
    page.locator(".panel").nth(1).wait_for()
    settle(page)
    film.still("walk-compare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, help="folder of the runs, if they are there already")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        runs = args.runs or scratch / "runs"
        for name, late_lr in (("before", 0.02), ("exploded", 3.0)):
            if not (runs / name).exists():
                train(runs / name, late_lr)
        serve: Callable[..., Any] = browser.serve
        log = scratch / "log"
        with browser.open_browser() as chromium, serve(runs, log, fast=True, wanted=2) as address:
            page = browser.TelemetryPage(chromium.new_page(viewport=SIZE), address)
            walk(page, Film(page, scratch))


if __name__ == "__main__":
    main()
