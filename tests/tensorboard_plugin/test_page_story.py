"""From opening the page to knowing what happened: which run, when, where, and who was first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser import TelemetryPage, serve
from story_runs import BOOM, write_story


@pytest.fixture(scope="module")
def address(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    write_story(folder)
    with serve(folder, folder / "log", fast=True, wanted=3) as url:
        yield url


def zoom(page: TelemetryPage) -> tuple[float, float]:
    step0, step1, *_ = page.link()["zoom"].replace("%2C", ",").split(",")
    return float(step0), float(step1)


# --- runs


def test_the_newest_run_opens_and_the_others_follow_in_natural_order(page: TelemetryPage) -> None:
    page.open()
    page.locator("button[aria-label='Run: boom']").click()
    page.locator(".runs[data-loaded]").wait_for()
    assert page.locator(".run-link").all_inner_texts() == ["boom", "old9", "old10"]
    row = page.locator(".runs tbody tr").first.inner_text()
    for text in ("died", "399", "0.005", "Exploding gradient in blocks.2.norm, step 98", "0.5"):
        assert text in row
    assert page.locator(".runs th").all_inner_texts()[-1].strip() == "lr"  # depth is the same


def test_runs_are_filtered_sorted_and_opened(page: TelemetryPage) -> None:
    page.open()
    page.heatmap.focus()
    page.page.keyboard.press("r")
    page.locator(".runs[data-loaded]").wait_for()
    page.page.keyboard.type("lr=0.01")
    assert page.locator(".run-link").all_inner_texts() == ["old9"]
    page.locator(".runs input").fill("")
    page.locator(".runs").get_by_role("button", name="Run", exact=True).click()
    assert page.locator(".run-link").all_inner_texts() == ["boom", "old9", "old10"]
    page.locator(".runs").get_by_role("button", name="lr", exact=True).click()
    assert page.locator(".run-link").all_inner_texts() == ["old9", "boom", "old10"]
    page.locator(".run-link").nth(2).focus()
    page.page.keyboard.press("Enter")
    page.locator(".panel[data-run=old10]").wait_for()
    assert page.link()["run"] == "old10"
    page.locator("button[aria-label='Beside: none']").click()
    page.locator(".runs[data-loaded] tr:has-text('boom')").click()
    page.locator(".panel[data-run=boom]").wait_for()
    page.locator("button:has-text('One run')").click()
    page.locator(".panel[data-run=boom]").wait_for(state="detached")


# --- the story


def test_a_run_that_is_mostly_nan_opens_where_it_came(page: TelemetryPage) -> None:
    page.open(run="boom")
    assert page.locator(".first-nonfinite").inner_text() == (
        f"First NaN or infinity: step {BOOM}, in blocks.2.norm"
    )
    page.locator("button.reset:not([disabled])").wait_for()
    opened = page.pixel(0.5, 0.99)
    page.locator("button.reset").click()
    page.locator("button.reset[disabled]").wait_for()
    assert page.link()["zoom"] == "all"
    page.page.reload()  # who asked for everything gets everything
    page.wait()
    page.locator("button.reset[disabled]").wait_for()
    assert page.pixel(0.5, 0.2) != opened
    page.locator(".first-nonfinite button").click()
    assert zoom(page) == (BOOM - 20, BOOM + 21)


def test_an_alert_shows_the_steps_around_it_and_who_moved_first(page: TelemetryPage) -> None:
    page.open(run="boom", zoom="all")
    page.locator(".alerts .alert.error", has_text="exploded").click()
    assert zoom(page) == (BOOM - 22, BOOM + 19)
    assert "The gradient exploded." in page.locator(".chosen").inner_text()
    page.locator(".movers li").nth(7).wait_for()
    movers = page.locator(".movers li").all_inner_texts()
    assert "blocks.2.norm" in movers[0]
    assert f"step {BOOM - 4}" in movers[0]
    assert "× 921" in movers[0]  # a hundred times by itself, ten times with all others
    assert "9 of 9 layers" in page.locator(".movers h2").inner_text()
    page.locator(".movers li button").nth(1).click()
    assert page.link()["step"] == str(BOOM - 2)
    assert page.locator(".movers li").count() == 8  # they stay until something else is chosen


def test_movers_can_be_asked_for_at_any_step(page: TelemetryPage) -> None:
    page.open(run="boom", layer=".head", step="60")
    page.heatmap.focus()
    page.page.keyboard.press("w")
    page.locator(".movers", has_text="No layer's gradient norm was unusual at step 60").wait_for()
    page.open(run="boom", layer=".head", step="10")
    page.locator("button:has-text('Who moved first?')").click()
    page.locator(".movers", has_text="Too few steps before step 10").wait_for()


def test_back_undoes_a_zoom(page: TelemetryPage) -> None:
    page.open(run="old9")
    page.drag((0.1, 0.2), (0.9, 0.5))
    page.locator("button.reset:not([disabled])").wait_for()
    page.page.go_back()
    page.locator("button.reset[disabled]").wait_for()
    assert "zoom" not in page.link()
    page.page.go_forward()
    page.locator("button.reset:not([disabled])").wait_for()
