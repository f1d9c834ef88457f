"""The Telemetry page as people use it: in Chromium, inside of TensorBoard, with both loaders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import TelemetryPage, serve
from known_runs import COLUMN, alert_at, layout_of, write_run

from telemetry.plugin_data.format import MISSING
from telemetry.plugin_data.statistics import MATRIX_STATISTICS

HOSTILE = "<img src=x onerror=window.hacked=1>"
DARKEST, LIGHTEST = "#440154", "#fde725"  # viridis
NAN, INFINITE = {"#d5006d", "#ff7ac0"}, {"#ff5a00", "#7a1f00"}
COLORS = ["low", "high", "zero", "infinite", "nan", "missing"]
NAMES = ["stem", "blocks.0.fc", "blocks.0.act", "blocks.1.fc", "blocks.1.act", "head"]


def rising(step: int) -> np.ndarray:
    """Layer i has 10^i at every step."""
    return np.float32(10.0) ** np.arange(6, dtype=np.float32) * np.float32(1 + step / 1000)


def matrices(step: int) -> np.ndarray:
    values = np.repeat(rising(step)[:, None], len(MATRIX_STATISTICS), axis=1) / 1e5
    values[[2, 4], COLUMN["update_ratio"]] = MISSING
    return values


def write_runs(logdir: Path) -> None:
    write_run(
        logdir / "demo", layout_of(NAMES), steps=range(60), norms=rising, matrices=matrices,
        every=10,
        alerts=[
            alert_at(7, "blocks.0.fc", severity="warning", kind="vanishing_gradient"),
            alert_at(30, "head", message="The gradient of head exploded."),
        ],
    )  # fmt: skip
    special = np.array([1, 1e6, 0, np.inf, np.nan, MISSING], np.float32)
    write_run(logdir / "colors", layout_of(COLORS), steps=range(10), norms=lambda _: special)
    write_run(
        logdir / HOSTILE, layout_of([HOSTILE, "plain"]), steps=range(5),
        norms=lambda s: np.ones(2, np.float32),
        alerts=[alert_at(2, HOSTILE, message=HOSTILE, kind=HOSTILE, consequences=(HOSTILE,))],
    )  # fmt: skip


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder


@pytest.fixture(scope="module")
def address(
    logdir: Path, loader: str, browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(logdir, log, fast=loader == "fast", wanted=3) as url:
        yield url


def test_known_values_have_known_colors(page: TelemetryPage) -> None:
    page.open(run="colors", all="1")
    rows = {name: page.pixel((i + 0.5) / 6, 0.5) for i, name in enumerate(COLORS)}
    assert rows["low"] == DARKEST
    assert rows["high"] == LIGHTEST
    assert rows["zero"] == "#000000"
    assert rows["infinite"] in INFINITE
    assert rows["nan"] in NAN
    assert rows["missing"] == page.frame.evaluate(
        "getComputedStyle(document.documentElement).getPropertyValue('--missing').trim()"
    )


def test_layers_without_the_statistic_are_shown_on_request(page: TelemetryPage) -> None:
    page.open(run="colors")
    assert page.pixel(4.5 / 5, 0.5) in NAN  # the last of five rows
    page.locator("input[type=checkbox]").check()
    page.locator("html[data-ready=true]").wait_for(state="attached")
    assert page.link()["all"] == "1"


def test_hovering_names_layer_step_and_value(page: TelemetryPage) -> None:
    page.open(run="demo")
    page.heatmap.hover(position=page.point(1.5 / 6, 20.5 / 60))
    tooltip = page.locator(".tooltip")
    tooltip.wait_for(state="visible")
    text = tooltip.inner_text()
    assert "blocks.0.fc" in text
    assert "step 20" in text
    assert "10.2" in text


def test_a_click_opens_the_layer_and_escape_closes_it(page: TelemetryPage) -> None:
    page.open(run="demo")
    page.heatmap.click(position=page.point(5.5 / 6, 30.5 / 60))
    detail = page.locator(".detail[data-loaded=true]")
    detail.wait_for()
    assert "head" in detail.locator("h2").inner_text()
    assert "step 30" in detail.inner_text()
    assert "The gradient of head exploded." in detail.inner_text()
    assert page.link()["layer"] == ".head"
    page.screenshot("page-detail")
    page.page.keyboard.press("Escape")
    detail.wait_for(state="detached")


def test_the_keyboard_moves_through_steps_and_layers(page: TelemetryPage) -> None:
    page.open(run="demo", layer=".blocks.0.fc", step="20")
    page.heatmap.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.page.keyboard.press(key)
    assert (page.link()["layer"], page.link()["step"]) == (".blocks.0.act", "21")
    for key in ("Home", "PageDown", "Shift+ArrowRight"):
        page.page.keyboard.press(key)
    assert (page.link()["layer"], page.link()["step"]) == (".head", "10")
    page.page.keyboard.press("n")
    assert (page.link()["layer"], page.link()["step"]) == (".blocks.0.fc", "7")
    assert "blocks.0.fc, step 7" in page.locator(".announcer").inner_text()


def test_dragging_zooms_in_both_directions(page: TelemetryPage) -> None:
    page.open(run="demo")
    whole = page.pixel(0.1, 0.5)
    page.drag((3.1 / 6, 0.25), (5.9 / 6, 0.5))
    step0, step1, row0, row1 = map(float, page.link()["zoom"].replace("%2C", ",").split(","))
    assert (row0, row1) == (3, 6)
    assert step0 == pytest.approx(15, abs=1)
    assert step1 == pytest.approx(30, abs=1)
    page.locator("button.reset:not([disabled])").wait_for()
    assert page.pixel(0.1, 0.5) != whole
    page.page.keyboard.press("0")
    page.locator("button.reset[disabled]").wait_for(state="attached")
    assert page.pixel(0.1, 0.5) == whole


def test_groups_fold_into_one_row(page: TelemetryPage) -> None:
    page.open(run="demo")
    page.locator("label:has-text('Layers') select").select_option("1")
    assert page.link()["folded"] == "blocks"
    # Three rows: stem, blocks, head; a group has the color of its largest layer.
    third = page.pixel(0.5, 0.5)
    page.open(run="demo")
    assert third == page.pixel(4.5 / 6, 0.5)


def test_a_search_leaves_the_layers_that_match(page: TelemetryPage) -> None:
    page.open(run="demo")
    page.locator("input[type=search]").fill("act")
    page.locator("html[data-ready=true]").wait_for(state="attached")
    page.page.wait_for_function("location.hash.includes('search=act')")
    top = page.pixel(0.25, 0.5)
    page.open(run="demo")
    assert top == page.pixel(2.5 / 6, 0.5)


def test_alerts_are_listed_filtered_and_lead_to_their_cell(page: TelemetryPage) -> None:
    page.open(run="demo")
    alerts = page.locator(".alerts .alert")
    assert ["step 30" in alerts.nth(0).inner_text(), "step 7" in alerts.nth(1).inner_text()] == [
        True,
        True,
    ]
    page.locator(".alerts label:has-text('Severity') select").select_option("warning")
    assert alerts.count() == 1
    assert "Vanishing gradient" in alerts.first.inner_text()
    alerts.first.click()
    page.locator(".detail[data-loaded=true][data-layer='blocks.0.fc']").wait_for()
    assert page.link()["step"] == "7"


def test_values_are_shown_relative_to_a_median(page: TelemetryPage) -> None:
    page.open(run="demo", mode="own")
    middle = {page.pixel((row + 0.5) / 6, 0.45) for row in range(6)}
    assert len(middle) == 1  # each layer is at its own median
    page.open(run="demo", mode="depth")
    assert len({page.pixel((row + 0.5) / 6, 0.5) for row in range(6)}) == 6


def test_two_runs_share_a_scale(page: TelemetryPage) -> None:
    page.open(run="demo", other="colors")
    page.locator(".panel").nth(1).wait_for()
    assert page.locator(".run-name").all_inner_texts() == ["demo", "colors"]
    page.screenshot("page-two-runs")
    # 10^5 is the top of one run alone, but not beside another one with 10^6.
    assert page.pixel(5.5 / 6, 0.5) != LIGHTEST
    assert page.pixel(1.5 / 5, 0.05, panel=1) == LIGHTEST


def test_the_page_follows_dark_mode(page: TelemetryPage) -> None:
    page.open(run="colors", all="1", dark=True)
    assert page.locator("html.dark").count() == 1
    dark = page.pixel(5.5 / 6, 0.5)
    page.screenshot("page-dark")
    page.page.evaluate("document.body.classList.remove('dark-mode')")
    page.locator("html:not(.dark)").wait_for(state="attached")
    page.page.wait_for_timeout(100)  # one frame
    assert page.pixel(5.5 / 6, 0.5) != dark


def test_a_link_restores_what_was_seen(page: TelemetryPage) -> None:
    link = {
        "run": "demo", "statistic": "weight_norm", "mode": "depth", "folded": "blocks.0",
        "layer": ".head", "step": "30", "search": "b",
    }  # fmt: skip
    page.open(**link)
    page.page.reload()
    page.wait()
    assert page.link() == link
    assert page.locator("label:has-text('Statistic') select").input_value() == "weight_norm"
    assert "head" in page.locator(".detail h2").inner_text()


def test_hostile_names_are_shown_as_text(page: TelemetryPage) -> None:
    page.open(run=HOSTILE, layer="." + HOSTILE, step="2")
    page.locator(".detail[data-loaded=true]").wait_for()
    page.heatmap.hover(position=page.point(0.25, 0.5))
    page.locator(".tooltip").wait_for(state="visible")
    assert HOSTILE in page.locator(".tooltip").inner_text()
    assert HOSTILE in page.locator(".detail").inner_text()
    assert HOSTILE in page.locator(".alerts").inner_text()
    assert page.locator("img").count() == 0
    assert page.frame.evaluate("window.hacked") is None
    assert page.page.evaluate("window.hacked") is None


def test_no_other_host_is_asked(page: TelemetryPage) -> None:
    asked: list[str] = []
    page.page.on("request", lambda request: asked.append(request.url))
    page.open(run="demo", layer=".head")
    page.locator(".detail[data-loaded=true]").wait_for()
    ours = [url for url in asked if "/plugin/telemetry/" in url]
    assert ours
    assert all(url.startswith((page.address, "data:", "about:")) for url in asked)


def test_a_narrow_window_is_enough(page: TelemetryPage) -> None:
    page.page.set_viewport_size({"width": 900, "height": 900})
    page.open(run="demo", layer=".head", step="30")
    page.locator(".detail[data-loaded=true]").wait_for()
    assert page.frame.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot("page-narrow")


def test_a_growing_run_is_followed_and_only_what_is_new_is_read(
    page: TelemetryPage, logdir: Path, loader: str
) -> None:
    run = f"live-{loader}"
    names = layout_of(NAMES)
    write_run(logdir / run, names, steps=range(20), norms=rising, session="20260101-000000.000-a")
    reload = page.page.locator("app-header-reload button").first
    page.open()
    for _ in range(60):
        if run in page.locator("label:has-text('Run') select").inner_text():
            break
        reload.click()
        page.page.wait_for_timeout(250)  # the loader looks once a second
    page.locator("label:has-text('Run') select").select_option(run)
    page.locator(f".panel[data-run='{run}'][data-steps='20']").wait_for()
    asked: list[str] = []
    page.page.on("request", lambda request: asked.append(request.url))
    write_run(
        logdir / run, names, steps=range(20, 33), norms=rising, session="20260101-000000.000-a.0001"
    )
    for _ in range(60):
        reload.click()
        page.page.wait_for_timeout(250)
        if page.locator(f".panel[data-run='{run}'][data-steps='33']").count():
            break
    assert page.locator(f".panel[data-run='{run}']").get_attribute("data-last-step") == "32"


@pytest.mark.parametrize(
    ("route", "answer", "state", "text"),
    [
        ("runs", "[]", "empty", "No run with telemetry yet"),
        ("run?*", '{"newerFormat": "format 9"}', "newer", "newer version of telemetry"),
    ],
)
def test_every_state_has_its_message(
    page: TelemetryPage, route: str, answer: str, state: str, text: str
) -> None:
    page.page.route(
        f"**/plugin/telemetry/{route}",
        lambda request: request.fulfill(body=answer, content_type="application/json"),
    )
    page.open(ready=state)
    assert text in page.locator(".message").inner_text()
    page.screenshot(f"page-{state}")


def test_a_failure_can_be_tried_again(page: TelemetryPage) -> None:
    page.page.route("**/plugin/telemetry/matrix?*", lambda request: request.abort())
    page.open(ready="error")
    assert "could not be shown" in page.locator(".message").inner_text()
    page.page.unroute("**/plugin/telemetry/matrix?*")
    page.locator(".message button").click()
    page.wait()
    page.errors.clear()  # the browser itself complains about the aborted request


def test_loading_is_told(page: TelemetryPage) -> None:
    page.page.route("**/plugin/telemetry/matrix?*", lambda request: None)
    page.open(ready="false")
    page.locator(".message[data-state=loading]").wait_for()
