"""A thousand layers at a thousand steps take one request; ten thousand layers open downsampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.browser import TelemetryPage
from tests.helpers.known_runs import COLUMN, alert_at, layout_of, write_run

FIRST_OPEN_BYTES = 4.5e6
"""Of the picture of a million cells: a float32 each, and what names them."""


def write_large(log_dir: Path, count: int, steps: int, every: int) -> None:
    """Write ``count`` layers and steps, with a fault in one cell that must stay visible."""
    names = [f"blocks.{i // 10}.layer{i % 10}" for i in range(count)]
    noise = np.random.default_rng(0).lognormal(0, 1, (16, count)).astype(np.float32)

    def norms(step: int) -> np.ndarray:
        row = noise[step % 16].copy()
        if step == steps // 2:
            row[count // 2] = np.nan
        return row

    def matrices(step: int) -> np.ndarray:
        return np.repeat(noise[step % 16][:, None], len(COLUMN), axis=1)

    write_run(
        log_dir, layout_of(names), steps=range(steps), norms=norms, matrices=matrices,
        every=every, losses=False, alerts=[alert_at(steps // 2, names[count // 2])],
    )  # fmt: skip


def write(logdir: Path) -> None:
    write_large(logdir / "thousand", 1000, 1000, every=10)
    write_large(logdir / "ten-thousand", 10_000, 1000, every=100)


def test_a_thousand_layers_and_steps_are_fetched_once(page: TelemetryPage) -> None:
    sizes: dict[str, int] = {}

    def note(response: Any) -> None:
        if "/data/plugin/telemetry/" in response.url:
            sizes[response.url] = len(response.body())

    page.page.on("response", note)
    page.open(run="thousand")
    page.locator(".panel[data-layers='1000'][data-steps='1000']").wait_for()
    fetched = dict(sizes)
    page.heatmap.focus()
    for key in "+++0":
        page.keys(key)
        page.wait()
    assert sum(fetched.values()) < FIRST_OPEN_BYTES
    assert sizes == fetched
    curves = page.locator(".curves-title ~ .curve-legend span")
    assert curves.all_inner_texts() == ["blocks.50.layer0"]  # the layer of the alert
    page.page.remove_listener("response", note)


def test_ten_thousand_layers_open_reduced(page: TelemetryPage) -> None:
    page.open(run="ten-thousand")
    assert "Reduced" in page.locator(".notice").inner_text()
    assert page.locator(".panel").get_attribute("data-layers") == "10000"
    # Zoomed in, every cell is shown, also one that the downsampling had omitted.
    page.open(run="ten-thousand", zoom="490,510,4990,5010")
    page.locator(".notice").wait_for(state="hidden")
    assert page.pixel(0.525, 0.525) in {"#d5006d", "#ff7ac0"}
