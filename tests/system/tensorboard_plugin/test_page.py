"""The data on the Telemetry page: in Chromium, inside of TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import page_runs
from tests.helpers.browser import TelemetryPage
from tests.helpers.known_runs import alert_at, layout_of, write_run

write = page_runs.write_runs


def colors_of(page: TelemetryPage) -> dict[str, str]:
    return {name: page.pixel((i + 0.5) / 6, 0.5) for i, name in enumerate(page_runs.COLORS)}


def test_known_values_have_known_colors(page: TelemetryPage) -> None:
    page.open(run="colors", all="1")
    rows = colors_of(page)
    assert rows["low"] == page_runs.DARKEST
    assert rows["high"] == page_runs.LIGHTEST
    assert rows["zero"] == "#000000"
    assert rows["infinite"] in page_runs.INFINITE
    assert rows["nan"] in page_runs.NAN
    assert rows["missing"] == page.color("missing")


def test_usual_values_keep_their_colors_next_to_an_explosion(page: TelemetryPage) -> None:
    page.open(run="explosion")
    usual, larger, exploded = (page.pixel((i + 0.5) / 3, 0.99) for i in range(3))
    assert (usual, exploded) == (page_runs.DARKEST, page_runs.LIGHTEST)
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
    assert page.pixel(5.5 / 6, 0.5) != page_runs.LIGHTEST
    assert page.pixel(1.5 / 5, 0.05, panel=1) == page_runs.LIGHTEST


def test_zero_and_nan_of_one_run_are_differences(page: TelemetryPage) -> None:
    relative = {}
    for run, other in (("sound", "colors"), ("colors", "sound")):
        page.open(run=run, other=other, mode="run", all="1")
        first = page.locator(".first-nonfinite button")
        assert first.all_inner_texts() == ["First difference: step 0, in high and 3 more"]
        assert page.locator(".panel").count() == 1  # the other way round would say the same
        relative[run] = colors_of(page)
    assert relative["sound"]["zero"] in page_runs.INFINITE
    assert relative["colors"]["zero"] == relative["sound"]["infinite"] == "#000000"
    assert relative["sound"]["nan"] in page_runs.NAN
    assert relative["sound"]["low"] == relative["colors"]["low"] != relative["sound"]["missing"]


def test_hostile_names_are_shown_as_text(page: TelemetryPage) -> None:
    page.open(run=page_runs.HOSTILE, layer="." + page_runs.HOSTILE, step="2")
    page.detail()
    page.heatmap.hover(position=page.point(0.25, 0.5))
    for part in (".tooltip", ".detail", ".alerts"):
        assert page_runs.HOSTILE in page.locator(part).inner_text()
    assert page.locator("img").count() == 0
    assert page.frame.evaluate("window.hacked") is None
    assert page.page.evaluate("window.hacked") is None


@pytest.mark.parametrize("loader", [None, "slow"], indirect=True, scope="module")
def test_live_mode_follows_a_growing_run(page: TelemetryPage, logdir: Path, loader: str) -> None:
    run = f"live-{loader}"

    def write(steps: range) -> None:
        write_run(
            logdir / run, layout_of(page_runs.NAMES), steps=steps, norms=page_runs.rising,
            alerts=[alert_at(20, None)] if 20 in steps else (),
        )  # fmt: skip

    write(range(10))
    page.open(run="demo")
    live = page.locator("button[data-key=live]")
    live.click()
    page.open_table("demo").get_by_role("button", name=run, exact=True).click()
    page.locator(".live:has-text('as of step 9')").wait_for()
    write(range(10, 25))
    page.locator(".live:has-text('as of step 24')").wait_for()
    page.locator(f".panel[data-run='{run}'] .notice:has-text('Resumed at step 10')").wait_for()
    page.locator(f".panel[data-run='{run}'][data-steps='25']").wait_for()
    said = page.locator(".alerts [role=status]", has_text="Latest alert: error at step 20")
    said.wait_for(state="attached")
    live.click()
    assert live.get_attribute("aria-pressed") == "false"
