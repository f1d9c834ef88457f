"""From opening the page to the cause of a fault: its run, step, layer and first movers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import axe_playwright_python
import numpy as np
import pytest

from tests.helpers.browser import LIGHTEST, TelemetryPage, box_of, pixels_of, plot_box
from tests.helpers.known_runs import alert_at, layout_of, write_run

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
HOSTILE = 'a<b>&"\x01, c'
LAYERS = ["embed"] + [f"blocks.{i}.{name}" for i in range(3) for name in ("attn.qkv", "fc1")]
BLOCKS = [*LAYERS, "blocks.2.norm", "head"]
BOOM = 100
"""The gradient of the last layer but one leaves its past four steps before; it is NaN from here on,
everything is so from three steps later on."""


def exploding(step: int) -> np.ndarray:
    noise = np.random.default_rng(step).uniform(0.9, 1.1, len(BLOCKS)).astype(np.float32)
    if step >= BOOM - 4:
        noise[-2] *= 100
    if step >= BOOM - 2:
        noise[:] *= 10
    if step >= BOOM:
        noise[-2] = np.nan
    if step >= BOOM + 3:
        noise[:] = np.nan
    return noise


def write(logdir: Path) -> None:
    """``boom``, the newest run; ``old9`` and ``old10``; all with hyperparameters."""
    write_run(
        logdir / "boom", layout_of(BLOCKS), steps=range(400), norms=exploding,
        end=RuntimeError(), time_of=lambda step: 1772323200 + step, **tuning(0.5),
        alerts=[
            alert_at(20, "head", severity="note", kind="attention_collapse", summary="A note."),
            alert_at(BOOM - 2, "blocks.2.norm", summary="The gradient exploded."),
            alert_at(BOOM, "blocks.2.norm", kind="nonfinite", summary="It is NaN."),
        ],
    )  # fmt: skip
    for name, norm, tuned in (("old9", 2, tuning(0.01)), ("old10", 1, {})):
        write_run(
            logdir / name, layout_of([HOSTILE, "b"]), steps=range(30),
            norms=lambda _, norm=norm: np.full(2, norm, np.float32),
            time_of=lambda step: 1.77e9 + step, **tuned,
        )  # fmt: skip


def tuning(rate: float) -> dict[str, Any]:
    """Hyperparameters with this rate, and a metric."""
    betas = {f"beta{i}": rate + i for i in range(8)}
    return {
        "hparams": {**betas, "lr": rate, "depth": 3},
        "logged": {"val/accuracy": {0: 1 - rate}},
    }


def zoom(page: TelemetryPage) -> tuple[float, float]:
    step0, step1, *_ = page.link()["zoom"].split(",")
    return float(step0), float(step1)


# --- runs


def test_the_table_lists_runs_newest_first_and_filters_them_by_numbers(
    page: TelemetryPage,
) -> None:
    page.open()
    page.open_table()
    assert page.run_names() == ["boom", "old9", "old10"]
    row = page.locator(".runs tbody tr").first.inner_text()
    for text in ("died", "399", "0.005", "Exploding gradient in blocks.2.norm, step 98", "0.5"):
        assert text in row
    heads = page.locator(".runs th").all_inner_texts()
    assert heads[-1].strip() == "lr"  # depth is the same
    assert "val/accuracy" in heads
    for words, found in {
        "lr=1e-2": ["old9"],
        "lr>0.1": ["boom"],
        "lr<=0.5 val/accuracy>=0.9": ["old9"],
        "status=die": [],  # a part of the text
        "alerts=2": ["boom"],  # a note is none
    }.items():
        page.search(words)
        assert page.run_names() == found, words
    page.keys("Escape")


def test_runs_are_searched_sorted_opened_and_compared(page: TelemetryPage) -> None:
    page.open()
    page.heatmap.focus()
    page.keys("r")
    table = page.table()
    for name, order in (("Run", ["boom", "old9", "old10"]), ("lr", ["old9", "boom", "old10"])):
        table.get_by_role("button", name=name, exact=True).click()
        assert page.run_names() == order
    page.search("old")
    page.keys("Enter")  # there are two
    assert page.run_names() == ["old9", "old10"]
    page.page.keyboard.type("10")
    heads = page.locator(".runs th").all_inner_texts()
    assert "Last loss" in heads
    assert "lr" not in heads  # that run has none
    page.keys("Enter")
    page.locator(".panel[data-run=old10]").wait_for()
    assert page.link()["run"] == "old10"
    page.locator("button[aria-label='Compare with: none']").click()
    table = page.table()
    assert "old10" not in page.run_names()  # it is open
    table.locator("tr:has-text('boom')").click()
    page.locator(".panel[data-run=boom]").wait_for()
    page.locator("button[aria-label='Stop comparing']").click()
    page.locator(".panel[data-run=boom]").wait_for(state="detached")


def test_checked_runs_are_drawn_together(page: TelemetryPage) -> None:
    page.open(run="boom")
    page.open_table()
    for name in ("boom", "old10"):
        page.locator(f".runs input[aria-label='Draw {name}']").check()
    curves = page.locator(".run-curves")
    assert curves.locator("summary").inner_text() == "Loss of 2 runs"
    legend = curves.locator(".curve-legend span")
    legend.nth(1).wait_for()
    colors = "(nodes) => nodes.map((node) => node.firstChild.style.background)"
    before = dict(zip(legend.all_inner_texts(), legend.evaluate_all(colors), strict=True))
    page.locator(".runs input[aria-label='Draw boom']").uncheck()
    curves.locator(".curve-legend").filter(has_not_text="boom").wait_for()
    after = dict(zip(legend.all_inner_texts(), legend.evaluate_all(colors), strict=True))
    assert after == {"old10": before["old10"]}  # it keeps its color
    page.keys("Escape")


def test_the_table_of_runs_with_its_columns_is_in_the_link(page: TelemetryPage) -> None:
    page.open(run="boom")
    page.locator("button.sweep", has_text="1 of 3 runs have alerts").click()
    page.table()
    assert page.run_names() == ["boom"]
    heads = page.locator(".runs th")
    assert "depth" not in heads.all_inner_texts()  # it is 3 in all runs
    page.search("alerts=0")
    page.locator(".runs input[aria-label='Draw old9']").check()
    page.locator(".runs summary:has-text('Columns')").click()
    page.locator(".columns label:has-text('depth') input").check()
    page.locator(".columns label:has-text('beta0') input").uncheck()
    page.locator(".run-curves input[type=range]").fill("0.5")
    page.open(**page.link())
    page.locator(".runs[open]").wait_for()
    assert page.run_names() == ["old9", "old10"]
    assert page.locator(".runs header .count").inner_text() == "2 of 3 runs, 1 checked"
    shown = heads.all_inner_texts()
    assert ("depth" in shown, "beta0" in shown, "beta1" in shown) == (True, False, True)
    cells = page.locator(".runs tbody tr").first.locator("td")
    assert cells.nth(shown.index("val/accuracy")).inner_text() == "0.99"
    assert page.locator(".run-curves input[type=range]").input_value() == "0.5"
    page.locator(".run-curves .curve-legend", has_text="old9").wait_for()
    page.locator(".runs button:has-text('Close')").click()
    page.page.wait_for_function("!location.hash.includes('telemetry.table')")


def test_the_table_stays_closed_when_the_current_run_is_chosen(page: TelemetryPage) -> None:
    page.open(run="boom", table="run")
    page.table().locator(".run-link", has_text="boom").click()
    page.page.wait_for_function("!location.hash.includes('telemetry.table')")
    page.wait()
    assert not page.locator(".runs").is_visible()


def test_different_hyperparameters_of_two_runs_are_emphasized(page: TelemetryPage) -> None:
    page.open(run="boom", other="old9")
    page.locator(".hparams summary").click()
    rows = page.locator(".hparams tr").all_inner_texts()
    assert "lr\t0.5\t0.01" in rows
    assert page.locator(".hparams tr:has-text('lr') .strong").count() == 2
    assert page.locator(".hparams tr:has-text('depth') .strong").count() == 0


def test_reports_of_one_run_and_of_the_checked_runs_are_saved(
    page: TelemetryPage, tmp_path: Path
) -> None:
    report = page.page.context.new_page()

    def save(button: str) -> str:
        name = page.save(page.locator(button), tmp_path / "report.html")
        report.goto((tmp_path / "report.html").as_uri())
        report.locator("html[data-ready=true]").wait_for(state="attached")
        return name

    page.open(run="boom")
    page.locator("summary:has-text('Save')").click()
    assert save(".toolbar a:has-text('Report')") == "boom.html"
    assert "2026-03-01 00:00 UTC" in report.locator(".report-title").inner_text()
    assert "lr\t0.5" in report.locator(".hparams tr").all_inner_texts()
    page.open(run="boom", checked="old9,old10")
    page.locator("summary:has-text('Save')").click()
    assert page.locator("a:has-text('Report of 3 runs')").is_visible()
    page.open_table()
    save(".runs a:has-text('Report')")
    rows = {
        row.locator("td").first.inner_text(): row
        for row in report.locator(".comparison tbody tr").all()
    }
    assert set(rows) == {"old9", "old10"}
    assert "the first run" in rows["old9"].inner_text()
    report.close()


def test_one_statistic_of_many_runs_is_drawn_below_the_table(page: TelemetryPage) -> None:
    page.open(run="old9", layer=".b", step="5")
    page.open_table("old9")
    curves = page.locator(".run-curves")
    curves.locator("summary").click()
    legend = curves.locator(".curve-legend")
    legend.wait_for()
    assert curves.locator("summary").inner_text() == "Gradient norm of b of 2 of 3 runs"
    assert sorted(legend.inner_text().split()) == ["old10", "old9"]  # boom does not have this layer
    curves.locator("canvas").hover(position={"x": 200, "y": 80})
    page.locator(".tooltip tr:has-text('old9')").wait_for()
    page.search("lr=")
    legend.filter(has_not_text="old10").wait_for()
    page.search("")
    page.locator("label:has-text('Curves of') select").select_option("loss")
    curves.locator("summary:has-text('Loss of 3 runs')").wait_for()
    page.keys("Escape")
    page.open(run="old9")
    page.locator("button[aria-label='Run: old9']").click()
    assert page.locator(".run-curves summary").inner_text() == "Loss of 3 runs"


def test_a_run_that_started_after_the_page_loaded_opens(page: TelemetryPage) -> None:
    def omit_old10(route: Any) -> None:
        rows = route.fetch().json()
        route.fulfill(json=[row for row in rows if row["name"] != "old10"])

    page.page.route("**/plugin/telemetry/runs", omit_old10)
    page.open(run="boom")
    page.page.unroute("**/plugin/telemetry/runs")
    page.open_table().locator(".run-link", has_text="old10").click()
    page.locator(".panel[data-run=old10]").wait_for()
    assert page.link()["run"] == "old10"


def test_a_link_to_a_missing_run_shows_a_message(page: TelemetryPage) -> None:
    page.open(run="gone", other="lost")
    said = page.locator(".missing-run")
    assert said.inner_text() == "No telemetry data of “gone” and “lost”; showing “boom”."
    page.open(run="old9", other="gone")
    assert said.inner_text() == "No telemetry data of “gone”; showing “old9”."
    page.open_table("old9").locator(".run-link", has_text="old10").click()
    page.locator(".panel[data-run=old10]").wait_for()
    assert said.is_hidden()


def test_details_show_the_run_that_was_clicked(page: TelemetryPage) -> None:
    page.open(run="old9", other="old10")
    detail = page.locator(".detail[data-loaded=true]")
    for panel, name, norm in ((0, "old9", "2"), (1, "old10", "1")):
        point = page.point(0.75, 0.5, panel)
        page.locator(".heatmap").nth(panel).click(position=point)
        detail.filter(has_text=name).wait_for()
        assert detail.locator("tbody td").nth(panel).inner_text() == norm
    page.open(**page.link())
    detail.filter(has_text="old10").wait_for()
    page.locator(".heatmap").first.focus()
    page.keys("ArrowLeft")
    assert page.locator(".announcer").inner_text() == "old9: b, step 14: 2"
    detail.filter(has_text="old9").wait_for()
    assert "of" not in page.link()


def test_two_runs_are_shown_relative_to_each_other(page: TelemetryPage) -> None:
    page.open(run="old9", other="old10", mode="run")
    first = page.locator(".first-nonfinite button")
    assert "First difference: step 0, in " in first.inner_text()
    page.heatmap.hover(position=page.point(0.75, 0.5))
    page.locator(".tooltip", has_text="×2").wait_for()
    page.locator("button[aria-label='Stop comparing']").click()
    page.locator("select:has-text('ratio to the other run')").wait_for(state="detached")
    page.locator(".heatmap").hover(position=page.point(0.75, 0.5))
    page.locator(".tooltip", has_text="Gradient norm: 2").wait_for()


# --- the story


def test_the_line_of_the_first_nan_leads_to_it(page: TelemetryPage) -> None:
    page.open(run="boom")
    first = page.locator(".first-nonfinite button")
    assert first.inner_text() == f"First NaN or infinity: step {BOOM}, in blocks.2.norm"
    assert page.locator("button.reset").is_disabled()  # all steps are shown
    first.click()
    assert zoom(page) == (BOOM - 20, BOOM + 21)


def test_an_alert_shows_the_steps_around_it_and_which_layers_changed_first(
    page: TelemetryPage,
) -> None:
    page.open(run="boom")
    page.locator(".alerts .alert.error", has_text="exploded").click()
    assert zoom(page) == (BOOM - 22, BOOM + 19)
    assert page.frame.evaluate("scrollY") == 0
    assert "The gradient exploded." in page.locator(".chosen-alert").inner_text()
    page.locator(".onsets li").nth(7).wait_for()
    onsets = page.locator(".onsets li").all_inner_texts()
    assert "blocks.2.norm" in onsets[0]
    assert f"step {BOOM - 4}" in onsets[0]
    assert "111x above" in onsets[0]  # at that step; ten times more later, with all others
    assert "9 of 9 layers" in page.locator(".onsets h2").inner_text()
    page.locator(".onsets li button").nth(1).click()
    assert page.link()["step"] == str(BOOM - 2)
    assert page.locator(".onsets li").count() == 8  # they stay until something else is chosen


def test_onsets_are_shown_for_any_step(page: TelemetryPage) -> None:
    page.open(run="boom", layer=".head", step="60")
    page.heatmap.focus()
    page.keys("w")
    page.locator(".onsets", has_text="No layer's gradient norm was unusual at step 60").wait_for()
    page.open(run="boom", layer=".head", step="10")
    page.locator("button:has-text('Which layers changed first?')").click()
    page.locator(".onsets", has_text="Too few steps before step 10").wait_for()


def test_a_link_leads_to_an_alert_and_which_layers_changed_first(page: TelemetryPage) -> None:
    page.open(run="boom")
    page.locator(".alerts .alert.error", has_text="Exploding").click()
    page.page.reload()
    page.locator(".chosen-alert", has_text="The gradient exploded.").wait_for()
    page.locator(".onsets li", has_text="blocks.2.norm").wait_for()


def test_back_undoes_a_zoom_and_forward_repeats_it(page: TelemetryPage) -> None:
    page.open(run="old9")
    page.drag((0.1, 0.2), (0.9, 0.5))
    page.locator("button.reset:not([disabled])").wait_for()
    page.page.go_back()
    page.locator("button.reset[disabled]").wait_for()
    assert "zoom" not in page.link()
    page.page.go_forward()
    page.locator("button.reset:not([disabled])").wait_for()


# --- what is around the picture


def test_the_profile_over_the_depth_follows_the_pointer(page: TelemetryPage) -> None:
    page.open(run="boom")
    profile = page.locator("canvas.profile")
    assert profile.get_attribute("aria-label") == "Gradient norm over the depth at step 399"
    page.heatmap.hover(position=page.point(0.5, 50.5 / 400))
    assert "at step 50" in (profile.get_attribute("aria-label") or "")
    page.locator(".tooltip:has-text('Gradient norm: ')").wait_for()
    statistic = page.locator("label:has-text('Statistic') select")
    statistic.focus()
    page.keys("ArrowDown")  # the pointer stays where it is
    page.locator(".tooltip:has-text('Gradient RMS: ')").wait_for()
    assert statistic.evaluate("(select) => select === document.activeElement")


def test_the_curves_of_layers_with_alerts_and_of_the_selected_one_are_below_the_picture(
    page: TelemetryPage,
) -> None:
    page.open(run="boom")
    legend = page.locator(".curves-title ~ .curve-legend span")
    assert legend.all_inner_texts() == ["blocks.2.norm", "head"]
    page.open(run="boom", layer=".embed", zoom="90,110,0,8")
    assert legend.all_inner_texts() == ["blocks.2.norm", "embed"]
    page.open(run="old9")
    assert page.locator("canvas.curves").count() == 0


def test_a_row_and_its_curve_are_marked_together(page: TelemetryPage) -> None:
    page.open(run="boom")

    def ink() -> int:
        return int(pixels_of(page.frame, "canvas.curves")[..., 3].sum())

    page.heatmap.hover(position=page.point(0.5, 0.1))
    thin = ink()
    page.heatmap.hover(position=page.point(7.5 / 9, 0.1))  # blocks.2.norm
    assert ink() > thin + 10_000
    row = page.locator(".heatmap .hair.row")
    assert row.is_visible()
    page.page.mouse.move(0, 0)
    row.wait_for(state="hidden")
    curves = page.locator("canvas.curves")
    x, y, width, height = plot_box(curves)
    curves.hover(position={"x": x + width * 0.1, "y": y + height * 0.9})
    page.locator(".tooltip tr.nearest").wait_for()
    assert row.is_visible()


def test_a_crosshair_spans_all_plots_over_steps(page: TelemetryPage) -> None:
    page.open(run="boom")
    box = box_of(page.locator("canvas.strip"))
    left, _, width, _ = plot_box(page.locator("canvas.cells"))
    x = box["x"] + left + width * 50.5 / 400
    page.page.mouse.move(x, box["y"] + 30)
    tooltip = page.locator(".tooltip:has-text('step 50')")
    tooltip.wait_for()
    assert "0.0392" in tooltip.inner_text()  # the loss there, 2 / 51
    hairs = page.locator(".plot .hair:visible")
    for hair in hairs.all():
        hair_box = box_of(hair)
        assert abs(hair_box["x"] - x) < 2
    assert hairs.count() == 3  # the strip, the picture, and the curves below
    label = page.locator("canvas.profile").get_attribute("aria-label") or ""
    assert "at step 50" in label


def test_the_controls_take_one_row_and_little_of_a_small_window(page: TelemetryPage) -> None:
    page.page.set_viewport_size({"width": 1280, "height": 800})
    page.open(run="boom", other="old9")
    edges = "(nodes) => nodes.map((n) => n.getBoundingClientRect()).map((b) => [b.bottom, b.right])"
    places = page.locator(".toolbar > *:visible").evaluate_all(edges)
    assert len({round(bottom) for bottom, _ in places}) == 1
    assert max(right for _, right in places) <= 1280
    for width in (640, 480):
        page.page.set_viewport_size({"width": width, "height": 400})
        assert box_of(page.locator(".toolbar"))["height"] < 80
        assert page.frame.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("button.more").click()
    page.locator("label:has-text('Filter layers')").wait_for()
    page.locator("button.more").click()
    page.heatmap.focus()
    page.keys("/")  # shows what it leads to
    assert page.locator("label:has-text('Filter layers') input:focus").is_visible()


def test_the_tooltip_does_not_stay_where_the_page_scrolled_away(page: TelemetryPage) -> None:
    page.page.set_viewport_size({"width": 1280, "height": 500})
    page.open(run="boom")
    page.heatmap.hover(position=page.point(0.1, 0.5))
    page.locator(".tooltip").wait_for()
    page.frame.evaluate("window.scrollTo(0, 60)")
    page.locator(".tooltip").wait_for(state="hidden")


def test_constant_values_are_not_drawn_as_the_largest(page: TelemetryPage) -> None:
    page.open(run="old9")
    assert page.pixel(0.5, 0.5) not in (LIGHTEST, "#000000")
    assert page.locator(".first-nonfinite").is_hidden()


def test_layers_are_ordered_by_role(page: TelemetryPage) -> None:
    page.open(run="boom")
    page.locator("label:has-text('Order') select").select_option("role")
    page.heatmap.focus()
    order = []
    page.keys("ArrowDown")
    for _ in BLOCKS:
        order.append(page.link()["layer"])
        page.keys("ArrowDown")
    roles = [f".blocks.{block}.{role}" for role in ("attn.qkv", "fc1") for block in range(3)]
    assert order == [".embed", ".head", *roles, ".blocks.2.norm"]
    page.locator("label:has-text('Layers') select").select_option("1")
    assert page.link()["folded"] == "Linear,attn.qkv,fc1"


def test_a_search_without_hits_shows_a_message(page: TelemetryPage) -> None:
    page.open(run="boom", search="nothing")
    assert "No layer matches “nothing”" in page.locator(".notice").inner_text()
    page.heatmap.focus()
    page.keys("ArrowDown", "ArrowRight", "n", "0")


def test_details_are_a_drawer_where_the_window_is_narrow(page: TelemetryPage) -> None:
    page.page.set_viewport_size({"width": 1100, "height": 700})
    page.open(run="boom")
    page.locator(".alerts").wait_for(state="hidden")
    page.locator("button.drawer-open").click()
    page.locator(".alerts .alert.error", has_text="exploded").click()
    box = box_of(page.locator(".side"))
    assert box["y"] < 100
    page.locator(".chosen-alert .alert").wait_for()
    page.locator(".detail h2").wait_for()
    assert page.locator(".side button:visible", has_text=re.compile("Close|✕")).count() == 1
    page.heatmap.focus()
    page.keys("Escape")
    page.locator(".alerts").wait_for(state="hidden")


def test_the_view_is_saved_as_picture_and_numbers(page: TelemetryPage, tmp_path: Path) -> None:
    page.open(run="old10", zoom="10,20,0,2")
    files = {}
    for kind in ("png", "csv"):
        page.locator("summary:has-text('Save')").click()
        button = page.locator(f"button[aria-label='Save as {kind.upper()}']")
        assert page.save(button, tmp_path / kind) == f"old10-grad_norm.{kind}"
        page.locator("summary:has-text('Save')").click()
        files[kind] = (tmp_path / kind).read_bytes()
    assert files["png"].startswith(b"\x89PNG")
    assert int.from_bytes(files["png"][16:20], "big") > 900
    head, *rows = files["csv"].decode().splitlines()
    assert head == "run,step,module_name,type_name,grad_norm"
    assert len(rows) == 20
    assert rows[1] == "old10,10,b,Linear,1"


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_accessible_to_assistive_technology(page: TelemetryPage, dark: bool) -> None:
    page.open(run="boom")
    page.set_dark(dark)
    assert page.frame.evaluate("document.documentElement.lang") == "en"
    assert page.frame.title() == "Telemetry: boom"
    page.frame.evaluate(f"{AXE.read_text()};0")
    check_access(page)
    page.locator(".alerts .alert.error").first.click()
    page.locator(".onsets li").first.wait_for()
    page.detail()
    assert "error at step" in page.locator(".announcer").inner_text()
    check_access(page)
    page.page.set_viewport_size({"width": 1100, "height": 700})
    page.locator("button.drawer-close").wait_for()
    check_access(page)
    page.open_table()
    check_access(page)


def check_access(page: TelemetryPage) -> None:
    found = page.frame.evaluate("axe.run(document)")["violations"]
    assert [(item["impact"], item["id"], item["nodes"][0]["target"]) for item in found] == []
