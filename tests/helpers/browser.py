"""A real TensorBoard in a real Chromium."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
import pytest
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FloatRect, Frame, Locator, Page, ViewportSize

PATIENCE_S = 60
SIZE: ViewportSize = {"width": 1400, "height": 900}
DARKEST, LIGHTEST = "#440154", "#fde725"  # viridis


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Chromium; skips where it or Playwright is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@contextmanager
def serve(logdir: Path, log: Path, *, fast: bool, wanted: int = 1) -> Iterator[str]:
    """TensorBoard's address, once it has loaded ``wanted`` runs."""
    command = [sys.executable, str(Path(__file__).with_name("serve.py"))]
    flags = ["--logdir", str(logdir), "--port", "0", "--load_fast", "true" if fast else "false"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *flags, "--reload_interval", "1"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            address = wait_for(lambda: _address(log), "TensorBoard's address")
            runs = f"{address}data/plugin/telemetry/runs"
            wait_for(lambda: _get(runs).count('"lastStep"') >= wanted, "the runs")
            yield address
        finally:
            server.terminate()
            server.wait()


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)  # another process: nothing signals it
    raise TimeoutError(f"waited {PATIENCE_S} s for {what}")


def _address(log: Path) -> str | None:
    found = re.search(r"at (http://localhost:\d+/)", log.read_text())
    return found[1] if found else None


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            text: str = response.read().decode()
            return text
    except OSError:
        return ""


def box_of(element: Locator) -> FloatRect:
    """Rectangle of a visible element in the window."""
    box = element.bounding_box()
    assert box is not None
    return box


_TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


DRAWN = "new Promise(requestAnimationFrame)"


def pixels_of(
    frame: Frame | Page, selector: str, *, nth: int = 0, after: str = DRAWN
) -> np.ndarray:
    """Return the pixels of a canvas, ``[height, width, 4]``, once what was to be drawn is drawn."""
    read = "document.querySelectorAll(selector)[nth].toDataURL()"
    url = frame.evaluate(f"async ([selector, nth]) => (await {after}, {read})", [selector, nth])
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
        return np.asarray(image.convert("RGBA"))


def has_color(pixels: np.ndarray, color: str) -> np.ndarray:
    """Whether each pixel is opaque and has a color ``#rrggbb``."""
    wanted = np.frombuffer(bytes.fromhex(f"{color[1:]}ff"), np.uint8)
    found: np.ndarray = (pixels == wanted).all(axis=-1)
    return found


def plot_box(canvas: Locator) -> tuple[float, float, float, float]:
    """Left, top, width and height of a plot within its canvas, in CSS pixels."""
    left, top, width, height = map(float, (canvas.get_attribute("data-plot") or "").split(","))
    return left, top, width, height


def pixel_at(frame: Frame | Page, row: float, column: float, panel: int = 0) -> str:
    """Color of a picture, ``#rrggbb``; ``row`` and ``column`` as shares, 0 to 1."""
    pixels = pixels_of(frame, "canvas.cells", nth=panel)  # a CSS pixel is a pixel
    left, top, width, height = plot_box(frame.locator("canvas.cells").nth(panel))
    red, green, blue, _ = pixels[int(top + height * row), int(left + width * column)]
    return f"#{red:02x}{green:02x}{blue:02x}"


class TelemetryPage:
    """The Telemetry page inside of TensorBoard.

    Attributes:
        page: The browser's tab.
        errors: Errors in its console.
    """

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.errors: list[str] = []
        self._is_light = False  # open, and not in dark mode
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type == "error" else None,
        )

    def open(self, *, dark: bool = False, ready: str = "true", **link: str) -> TelemetryPage:
        """Opens the page with a link's values, and waits until it has drawn.

        If TensorBoard is open, only the page's frame is loaded again, because TensorBoard itself
        takes most of the time.
        """
        values = [f"&p.telemetry.{name}={quote(text, safe='')}" for name, text in link.items()]
        query = "?darkMode=true" if dark else ""
        address = f"{self.address}{query}#telemetry{''.join(values)}"
        if self._is_light and not dark:
            self.page.evaluate("(url) => history.replaceState(history.state, '', url)", address)
            with self.frame.expect_navigation():
                self.frame.evaluate("location.reload()")
        else:
            self.page.goto("about:blank")  # else the same document only changes its fragment
            self.page.goto(address)
        self._is_light = not dark
        return self.wait(ready)

    def set_dark(self, dark: bool) -> None:
        """Switch the theme like TensorBoard's own button."""
        self.page.evaluate("(dark) => document.body.classList.toggle('dark-mode', dark)", dark)
        self.locator(f"html{'.dark' if dark else ':not(.dark)'}").wait_for(state="attached")

    def forget(self) -> None:
        """Undo what a test has changed around the page."""
        if self._is_light:
            self.set_dark(False)
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.set_viewport_size(SIZE)
        self.page.mouse.move(0, 0)
        self.errors.clear()

    def wait(self, ready: str = "true") -> TelemetryPage:
        self.locator(f"html[data-ready='{ready}']").wait_for(state="attached")
        return self

    def locator(self, selector: str, **options: Any) -> Locator:
        return self.page.frame_locator('iframe[src*="name=telemetry"]').locator(selector, **options)

    @property
    def frame(self) -> Frame:
        return next(frame for frame in self.page.frames if "name=telemetry" in frame.url)

    def keys(self, *names: str) -> None:
        for name in names:
            self.page.keyboard.press(name)

    def detail(self) -> Locator:
        """The details of the selected layer, once they are complete."""
        detail = self.locator(".detail[data-loaded=true]")
        detail.wait_for()
        return detail

    def open_table(self, run: str = "boom") -> Locator:
        """Open the table of runs from the button that has the name of the current run."""
        self.locator(f"button[aria-label='Run: {run}']").click()
        return self.table()

    def table(self) -> Locator:
        """The table of runs, once it is open."""
        table = self.locator(".runs")
        table.wait_for()
        return table

    def search(self, words: str) -> None:
        """Filter the table of runs."""
        self.locator(".runs input[type=search]").fill(words)

    def save(self, element: Locator, path: Path) -> str:
        """Click what starts a download; return the suggested name."""
        with self.page.expect_download() as started:
            element.click()
        started.value.save_as(path)
        return started.value.suggested_filename

    def run_names(self) -> list[str]:
        """The runs in the table, from above."""
        names: list[str] = self.locator(".run-link").all_inner_texts()
        return names

    def pixel(self, row: float, column: float, panel: int = 0) -> str:
        """Color of the picture, ``#rrggbb``; ``row`` and ``column`` as shares, 0 to 1."""
        return pixel_at(self.frame, row, column, panel)

    def color(self, name: str) -> str:
        """A color of the style sheet, ``#rrggbb``."""
        style = "getComputedStyle(document.documentElement)"
        color: str = self.frame.evaluate(f"{style}.getPropertyValue('--{name}').trim()")
        return color

    def point(self, row: float, column: float, panel: int = 0) -> dict[str, float]:
        """The same place in the coordinates of :attr:`heatmap`."""
        self.frame.evaluate(_TWO_FRAMES)  # on a busy machine it is drawn again after its resize
        x, y, width, height = plot_box(self.locator("canvas.cells").nth(panel))
        return {"x": x + width * column, "y": y + height * row}

    @property
    def heatmap(self) -> Locator:
        return self.locator(".heatmap").first

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drags a rectangle between two places, each (row, column) as shares."""
        box = box_of(self.heatmap)
        for place, act in ((start, self.page.mouse.down), (end, self.page.mouse.up)):
            at = self.point(*place)
            self.page.mouse.move(box["x"] + at["x"], box["y"] + at["y"], steps=4)
            act()

    def link(self) -> dict[str, str]:
        """The page's state in the address."""
        parts = self.page.evaluate("location.hash").lstrip("#").split("&")
        pairs = (part.split("=", 1) for part in parts if part.startswith("p.telemetry."))
        return {name.removeprefix("p.telemetry."): unquote(value) for name, value in pairs}
