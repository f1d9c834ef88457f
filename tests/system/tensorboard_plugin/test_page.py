"""The Telemetry page: in Chromium, inside of TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.browser import (
    DARKEST,
    LIGHTEST,
    TelemetryPage,
    box_of,
    has_color,
    pixels_of,
    wait_for,
)
from tests.helpers.known_runs import COLUMN, MISSING, alert_at, layout_of, write_run

HOSTILE = "<img src=x onerror=window.hacked=1>"
NAN, INFINITE = {"#d5006d", "#ff7ac0"}, {"#ff5a00", "#7a1f00"}
COLORS = ["low", "high", "zero", "infinite", "nan", "missing"]
NAMES = ["stem", "blocks.0.fc", "blocks.0.act", "blocks.1.fc", "blocks.1.act", "head"]


def rising(step: int) -> np.ndarray:
    """Layer i has 10^i at every step."""
    return np.float32(10.0) ** np.arange(6, dtype=np.float32) * np.float32(1 + step / 1000)


def matrices(step: int) -> np.ndarray:
    values = np.repeat(rising(step)[:, None], len(COLUMN), axis=1) / 1e5
    values[[2, 4], COLUMN["update_ratio"]] = MISSING
    return values


def growing(step: int) -> np.ndarray:
    """One unit that is dead from step 20 on, one that grows, one that does not."""
    return np.array([[0, 0 if step >= 20 else 1], [-step, step], [-1, 2]], np.float32)


def exploding(step: int) -> np.ndarray:
    """Two ordinary layers, 100 apart; the third grows by 30 decades."""
    return np.array([0.01, 1, 10.0 ** (step / 2)], np.float32)


def apart(step: int) -> np.ndarray:
    """All alike; at step 9, one layer is 1,000 times smaller and another 10 times larger."""
    return np.array([1e-3, MISSING, 10, 1] if step == 9 else [1, MISSING, 1, 1], np.float32)


def of_roles(step: int) -> np.ndarray:
    """Norms a thousand times below linear layers; from step 5 on, one is at 100 times its own."""
    norms = np.tile(np.float32([1e-3, 1]), 3)
    norms[2] *= 100 if step >= 5 else 1
    return np.append(norms, np.float32(MISSING))


def write(logdir: Path) -> None:
    names = ["group.small", "group.act", "group.large", "head"]
    write_run(logdir / "apart", layout_of(names), steps=range(10), norms=apart)
    roles = [f"blocks.{i}.{role}" for i in range(3) for role in ("norm", "fc")]
    write_run(logdir / "roles", layout_of([*roles, "frozen"]), steps=range(10), norms=of_roles)
    write_run(
        logdir / "demo", layout_of(NAMES), steps=range(60), norms=rising, matrices=matrices,
        units=growing, every=10,
        alerts=[
            alert_at(7, "blocks.0.fc", severity="warning", kind="vanishing_gradient"),
            alert_at(30, "head", summary="The gradient of head exploded."),
        ],
    )  # fmt: skip
    special = np.array([1, 1e6, 0, np.inf, np.nan, MISSING], np.float32)
    for name, norms in (("colors", special), ("sound", np.ones(6, np.float32))):
        write_run(
            logdir / name, layout_of(COLORS), steps=range(10), norms=lambda _, norms=norms: norms
        )  # fmt: skip
    write_run(
        logdir / "explosion", layout_of(["a", "b", "transformer.blocks.10.attention.projection"]),
        steps=range(60), norms=exploding,
    )  # fmt: skip
    write_run(
        logdir / HOSTILE, layout_of([HOSTILE, "plain"]), steps=range(5),
        norms=lambda s: np.ones(2, np.float32),
        alerts=[alert_at(2, HOSTILE, summary=HOSTILE, kind=HOSTILE, follows=[(HOSTILE, HOSTILE)])],
    )  # fmt: skip


# --- the data


def colors_of(page: TelemetryPage) -> dict[str, str]:
    return {name: page.pixel((i + 0.5) / 6, 0.5) for i, name in enumerate(COLORS)}


def test_known_values_have_known_colors(page: TelemetryPage) -> None:
    page.open(run="colors", all="1")
    rows = colors_of(page)
    assert rows["low"] == DARKEST
    assert rows["high"] == LIGHTEST
    assert rows["zero"] == "#000000"
    assert rows["infinite"] in INFINITE
    assert rows["nan"] in NAN
    assert rows["missing"] == page.color("missing")


def test_usual_values_keep_their_colors_next_to_an_explosion(page: TelemetryPage) -> None:
    page.open(run="explosion")
    usual, larger, exploded = (page.pixel((i + 0.5) / 3, 0.99) for i in range(3))
    assert (usual, exploded) == (DARKEST, LIGHTEST)
    assert larger not in (usual, exploded)


def test_a_long_name_is_cut_between_its_parts(page: TelemetryPage) -> None:
    page.page.add_init_script("""{
      const { fillText } = CanvasRenderingContext2D.prototype;
      window.drawn = [];
      CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
        drawn.push(text);
        fillText.call(this, text, ...place);
      };
    }""")
    page.open(run="explosion")
    shown = {text for text in page.frame.evaluate("drawn") if "…" in text}
    assert any(text.endswith(".10.attention.projection") for text in shown), shown


def test_a_click_opens_the_layer_and_escape_closes_it(page: TelemetryPage) -> None:
    page.open(run="demo")
    page.heatmap.click(position=page.point(5.5 / 6, 30.5 / 60))
    detail = page.detail()
    assert "head" in detail.locator("h2").inner_text()
    assert "step 30" in detail.inner_text()
    detail.get_by_role("button", name="Exploding gradient, step 30").click()
    said = page.locator(".chosen-alert:not(:empty)").inner_text()
    assert "The gradient of head exploded." in said
    assert "The gradient of head exploded." not in page.locator(".alerts").inner_text()
    assert page.link()["layer"] == ".head"
    page.keys("Escape")
    detail.wait_for(state="detached")


def test_alerts_are_listed_filtered_and_lead_to_their_cell(page: TelemetryPage) -> None:
    page.open(run="demo")
    alerts = page.locator(".alerts .alert")
    newest, oldest = alerts.all_inner_texts()
    assert ("step 30" in newest, "step 7" in oldest) == (True, True)
    page.locator(".alerts label:has-text('Severity') select").select_option("warning")
    assert alerts.count() == 1
    assert "Vanishing gradient" in alerts.first.inner_text()
    alerts.first.click()
    page.locator(".detail[data-loaded=true][data-layer='blocks.0.fc']").wait_for()
    assert page.link()["step"] == "7"


def test_two_runs_share_a_scale(page: TelemetryPage) -> None:
    page.open(run="demo", other="colors")
    page.locator(".panel").nth(1).wait_for()
    assert page.locator(".run-name").all_inner_texts() == ["demo", "colors"]
    # 10^5 is the top of one run alone, but not next to another run with 10^6.
    assert page.pixel(5.5 / 6, 0.5) != LIGHTEST
    assert page.pixel(1.5 / 5, 0.05, panel=1) == LIGHTEST


def test_zero_and_nan_of_one_run_are_differences(page: TelemetryPage) -> None:
    relative = {}
    for run, other in (("sound", "colors"), ("colors", "sound")):
        page.open(run=run, other=other, mode="run", all="1")
        first = page.locator(".first-nonfinite button")
        assert first.all_inner_texts() == ["First difference: step 0, in high and 3 more"]
        assert page.locator(".panel").count() == 1  # the other way round would say the same
        relative[run] = colors_of(page)
    assert relative["sound"]["zero"] in INFINITE
    assert relative["colors"]["zero"] == relative["sound"]["infinite"] == "#000000"
    assert relative["sound"]["nan"] in NAN
    assert relative["sound"]["low"] == relative["colors"]["low"] != relative["sound"]["missing"]


def test_hostile_names_are_shown_as_text(page: TelemetryPage) -> None:
    page.open(run=HOSTILE, layer="." + HOSTILE, step="2")
    page.detail()
    page.heatmap.hover(position=page.point(0.25, 0.5))
    for part in (".tooltip", ".detail", ".alerts"):
        assert HOSTILE in page.locator(part).inner_text()
    assert page.locator("img").count() == 0
    assert page.frame.evaluate("window.hacked") is None
    assert page.page.evaluate("window.hacked") is None


# --- its use


def test_layers_without_the_statistic_are_shown_on_request(page: TelemetryPage) -> None:
    page.open(run="colors")
    assert page.pixel(4.5 / 5, 0.5) in NAN  # the last of five rows
    page.locator("label:has-text('Layers') select").select_option("all")
    page.wait()
    assert page.link()["all"] == "1"


def test_hovering_names_layer_step_and_value(page: TelemetryPage) -> None:
    page.open(run="demo")
    page.heatmap.hover(position=page.point(1.5 / 6, 20.5 / 60))
    for text in ("blocks.0.fc", "step 20", "10.2"):
        page.locator(".tooltip", has_text=text).wait_for()


def test_the_keyboard_moves_through_steps_and_layers(page: TelemetryPage) -> None:
    page.open(run="demo", layer=".blocks.0.fc", step="20")
    page.heatmap.focus()
    page.keys("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert (page.link()["layer"], page.link()["step"]) == (".blocks.0.act", "21")
    page.keys("Home", "PageDown", "Shift+ArrowRight")
    assert (page.link()["layer"], page.link()["step"]) == (".head", "10")
    page.keys("n")
    assert (page.link()["layer"], page.link()["step"]) == (".blocks.0.fc", "7")
    # What is read out at each key is short.
    said = page.locator(".announcer")
    alert = "warning at step 7: Vanishing gradient in blocks.0.fc."
    assert said.inner_text() == f"{alert} blocks.0.fc, step 7: 10.1"
    page.keys("ArrowRight")
    assert said.inner_text() == "blocks.0.fc, step 8: 10.1"


def test_keys_work_without_focus_on_the_picture_but_not_in_a_field(page: TelemetryPage) -> None:
    page.open(run="demo", layer=".blocks.0.fc", step="20")
    page.locator("h2.curves-title").click()
    page.keys("ArrowRight")
    assert page.link()["step"] == "21"
    page.locator("button.reset").focus()
    page.keys("n")
    assert page.link()["step"] == "7"
    page.keys("/")
    page.page.keyboard.type("n0")
    assert (page.link()["search"], page.link()["step"]) == ("n0", "7")


def test_dragging_zooms_in_both_directions(page: TelemetryPage) -> None:
    page.open(run="demo")
    whole = page.pixel(0.1, 0.5)
    page.drag((3.1 / 6, 0.25), (5.9 / 6, 0.5))
    *steps, row0, row1 = map(float, page.link()["zoom"].split(","))
    assert (row0, row1) == (3, 6)
    assert steps == pytest.approx([15, 30], abs=1)
    page.locator("button.reset:not([disabled])").wait_for()
    assert page.pixel(0.1, 0.5) != whole
    page.keys("0")
    page.locator("button.reset[disabled]").wait_for(state="attached")
    assert page.pixel(0.1, 0.5) == whole


def test_groups_fold_into_one_row(page: TelemetryPage) -> None:
    page.open(run="demo")
    largest = page.pixel(4.5 / 6, 0.5)
    page.locator("label:has-text('Layers') select").select_option("1")
    assert page.link()["folded"] == "blocks"
    # Three rows: stem, blocks, head; a group has the color of its largest layer.
    wait_for(lambda: page.pixel(0.5, 0.5) == largest, "the folded picture")


@pytest.mark.parametrize("every_layer", ["", "1"])
def test_picture_profile_and_tooltip_show_the_same_of_a_folded_group(
    page: TelemetryPage, every_layer: str
) -> None:
    page.open(run="apart", mode="own", folded="group", all=every_layer, step="9")
    assert page.pixel(0.25, 0.95) == "#08407e"  # the end of the scale for smaller values
    profile = pixels_of(page.frame, "canvas.profile")
    upper = profile[: len(profile) // 2]
    leftmost = np.argwhere(has_color(upper, page.color("curve1")))[:, 1].min()
    assert leftmost < 0.2 * upper.shape[1]
    assert has_color(upper, page.color("missing")).sum() > 20  # its range
    page.heatmap.click(position=page.point(0.25, 0.95))
    assert page.link()["layer"] == ".group.small"


def test_a_parameter_without_gradients_is_marked(page: TelemetryPage) -> None:
    page.open(run="roles", layer=".frozen", all="1")
    page.locator(".detail .frozen", has_text="No gradient at any step: weight").wait_for()
    assert page.locator("canvas.curves").count() == 0  # nothing to draw
    page.open(run="roles", layer=".blocks.0.fc")
    page.detail()
    assert page.locator(".detail .frozen").count() == 0


def test_two_runs_without_a_common_layer_show_a_message(page: TelemetryPage) -> None:
    page.open(run="demo", other="colors", mode="run")
    page.locator(".notice:has-text('No layer has this statistic')").wait_for()


def test_the_side_panel_stays_next_to_the_picture(page: TelemetryPage) -> None:
    page.page.set_viewport_size({"width": 1400, "height": 500})
    page.open(run="demo", layer=".stem", step="20")
    page.detail()
    page.frame.evaluate("window.scrollTo(0, 200)")
    assert page.frame.evaluate("scrollY") == 200
    top = box_of(page.page.locator("iframe[src*='name=telemetry']"))["y"]
    assert [box_of(page.locator(part))["y"] - top for part in (".toolbar", ".side")] == [0, 64]
    units = page.locator(".units canvas")
    units.scroll_into_view_if_needed()
    assert page.frame.evaluate("scrollY") == 200  # only the panel has scrolled
    page.frame.evaluate("window.scrollTo(0, 0)")


def test_a_search_keeps_the_matching_layers(page: TelemetryPage) -> None:
    page.open(run="demo")
    page.locator(".toolbar input[type=search]").fill("act")
    page.page.wait_for_function("location.hash.includes('search=act')")
    top = page.pixel(0.25, 0.5)
    page.open(run="demo")
    assert top == page.pixel(2.5 / 6, 0.5)


def test_values_are_shown_relative_to_a_median(page: TelemetryPage) -> None:
    page.open(run="demo", mode="own")
    middle = {page.pixel((row + 0.5) / 6, 0.45) for row in range(6)}
    assert len(middle) == 1  # each layer is at its own median
    page.open(run="demo", mode="depth")
    assert len({page.pixel((row + 0.5) / 6, 0.5) for row in range(6)}) == 6


def test_units_are_shown_over_steps(page: TelemetryPage) -> None:
    page.open(run="demo", layer=".stem", step="25")
    units = page.locator(".units")
    units.scroll_into_view_if_needed()
    assert "3 units; at step 20 dead: 0" in units.inner_text()
    box = box_of(units.locator("canvas"))
    units.locator("canvas").hover(position={"x": box["width"] * 0.99 - 10, "y": 24})
    page.locator(".tooltip", has_text="Unit 1 at step 50").filter(has_text="-50 to 50").wait_for()
    page.open(run="demo", layer=".head")
    page.detail()
    assert page.locator(".units").count() == 0


def test_values_without_a_position_on_the_axis_are_marked_at_its_edges(page: TelemetryPage) -> None:
    page.open(run="demo")
    colors = ["#ff0000", "#00ff00", "#0000ff", "#d5006d"]  # the last one is that of NaN
    page.frame.evaluate(EDGES, [[1, 10, 1000], [0, 0, 0], ["NaN"] * 3])
    pixels = pixels_of(page.frame, "#edges")
    above, below = ([c for c in colors if has_color(pixels[y], c).any()] for y in (4, 96))
    assert (above, below) == (["#d5006d"], ["#00ff00"])


EDGES = """async (given) => {
  const { drawChart } = await import("/data/plugin/telemetry/static/chart.js");
  const curves = given.map((values, i) => ({
    values: values.map(Number), steps: [10, 20, 30], color: ["#ff0000", "#00ff00", "#0000ff"][i],
  }));
  const theme = { smallFont: "10px sans-serif", line: "#000000", muted: "#000000" };
  const canvas = Object.assign(document.createElement("canvas"), { id: "edges" });
  document.body.append(canvas);
  const view = { step0: 0, step1: 40 };
  drawChart(canvas, { curves, view, theme, width: 200, height: 100, left: 40, log: true });
}"""


def test_the_page_follows_dark_mode(page: TelemetryPage) -> None:
    page.open(run="colors", all="1", dark=True)
    assert page.locator("html.dark").count() == 1
    dark = page.pixel(5.5 / 6, 0.5)
    page.set_dark(False)
    assert page.pixel(5.5 / 6, 0.5) != dark


def test_a_link_restores_the_view(page: TelemetryPage) -> None:
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


def test_the_page_requests_no_other_host(page: TelemetryPage) -> None:
    requested: list[str] = []
    page.page.on("request", lambda request: requested.append(request.url))
    page.open(run="demo", layer=".head")
    page.detail()
    assert any("/plugin/telemetry/" in url for url in requested)
    assert all(url.startswith((page.address, "data:", "about:")) for url in requested)


def test_an_error_of_the_server_is_shown(page: TelemetryPage) -> None:
    newer = {"error": "the run log has format 9"}
    page.page.route(
        "**/plugin/telemetry/run?*", lambda request: request.fulfill(status=404, json=newer)
    )
    page.open(ready="error")
    assert newer["error"] in page.locator(".message").inner_text()
    page.errors.clear()  # the browser itself complains about the status


def test_an_empty_page_fills_when_data_arrives(page: TelemetryPage) -> None:
    runs = "**/plugin/telemetry/runs"
    page.page.route(runs, lambda request: request.fulfill(body="[]"))
    page.open(ready="empty")
    assert "No run with telemetry yet" in page.locator(".message").inner_text()
    page.page.unroute(runs)
    page.wait()
    page.locator(".panel[data-steps]").wait_for()


def test_a_failure_can_be_retried(page: TelemetryPage) -> None:
    page.page.route("**/plugin/telemetry/matrix?*", lambda request: request.abort())
    page.open(ready="error")
    assert "could not be shown" in page.locator(".message").inner_text()
    page.page.unroute("**/plugin/telemetry/matrix?*")
    page.locator(".message button").click()
    page.wait()
    page.errors.clear()  # the browser itself complains about the aborted request


def test_a_message_is_shown_while_data_loads(page: TelemetryPage) -> None:
    pending: list[Any] = []
    page.page.route("**/plugin/telemetry/matrix?*", lambda request: pending.append(request))
    page.open(ready="loading")
    page.locator(".message[data-state=loading]").wait_for()
    for request in pending:
        request.abort()  # otherwise another test reports the pending task
    page.errors.clear()


# --- while data arrives


@pytest.mark.parametrize("loader", [None, "slow"], indirect=True, scope="module")
def test_live_mode_follows_a_growing_run(page: TelemetryPage, logdir: Path, loader: str) -> None:
    run = f"live-{loader}"

    def extend(steps: range) -> None:
        write_run(
            logdir / run, layout_of(NAMES), steps=steps, norms=rising,
            alerts=[alert_at(20, None)] if 20 in steps else (),
        )  # fmt: skip

    extend(range(10))
    page.open(run="demo")
    live = page.locator("button[data-key=live]")
    live.click()
    page.open_table("demo").get_by_role("button", name=run, exact=True).click()
    page.locator(".live:has-text('as of step 9')").wait_for()
    extend(range(10, 25))
    page.locator(".live:has-text('as of step 24')").wait_for()
    page.locator(f".panel[data-run='{run}'] .notice:has-text('Resumed at step 10')").wait_for()
    page.locator(f".panel[data-run='{run}'][data-steps='25']").wait_for()
    said = page.locator(".alerts [role=status]", has_text="Latest alert: error at step 20")
    said.wait_for(state="attached")
    live.click()
    assert live.get_attribute("aria-pressed") == "false"
