"""Facts on the page about real runs: units, zeros, steps, channels, keys while data arrives."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from telemetry import HookLogger
from tests.helpers.browser import TelemetryPage, box_of, has_color, pixels_of, plot_box, wait_for
from tests.helpers.known_runs import alert_at, consequence, layout_of, write_run
from tests.helpers.small_runs import at_step, fit

DIES, NAN, EVERY, STEPS = 24, 46, 10, 60
MAPS = 10
GAP_LEVEL = 48  # gray between the maps
LR = {"lr/0": 0.1, "lr/1": 0.001}
BEFORE = range(10)


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    layers = {
        "same": nn.Conv2d(1, MAPS, 1, bias=False), "conv": nn.Conv2d(MAPS, 8, 3), "act": nn.ReLU(),
        "flat": nn.Flatten(), "fc": nn.Linear(8 * 30 * 30, 3),
    }  # fmt: skip
    layers["same"].weight.data[:] = 1  # all maps are the input
    layers["same"].weight.data[-1] = 2 * GAP_LEVEL / 255 - 1  # a filter as gray as the gaps
    return nn.Sequential(OrderedDict(layers))


def batch() -> torch.Tensor:
    """Return images whose corner has the gray of the gaps between maps."""
    images = (torch.rand(16, 1, 32, 32) > 0.5).float()
    images[:, :, :8, :8] = GAP_LEVEL / 255
    return images


def train(log_dir: Path, *, dies: bool = False, is_nan: bool = False) -> None:
    model = cnn()

    def loss_of(step: int) -> torch.Tensor:
        images = batch() * (torch.nan if is_nan and step == NAN else 1)
        return nn.functional.cross_entropy(model(images), torch.arange(16) % 3)

    kill = at_step(DIES, lambda: dies and model[1].bias.data.sub_(100))
    with HookLogger(model, log_dir, every_n_steps=EVERY) as logger:
        fit(logger, STEPS, loss_of, torch.optim.SGD(model.parameters(), 1e-3), before=kill)


def write_growing(log_dir: Path, steps: range, **options: Any) -> None:
    write_run(
        log_dir, layout_of(["a", "b", "other"]), steps=steps,
        norms=lambda step: np.full(3, step + 1, np.float32), **options,
    )  # fmt: skip


def write(folder: Path) -> None:
    train(folder / "dead", dies=True)
    train(folder / "nan", is_nan=True)
    write_growing(folder / "growing", BEFORE)
    nothing = np.ones(0, np.float32)
    write_run(folder / "bare", layout_of([]), steps=range(5), norms=lambda _: nothing)
    symptom = consequence("vanishing_gradient", "b")
    changes: dict[str, Any] = {"kind": "loss_spike", "consequences": (symptom,)}
    write_run(
        folder / "staged", layout_of(["a", "b"]), steps=range(40),
        norms=lambda _: np.ones(2, np.float32),
        alerts=[
            alert_at(10, "a", kind="loss_spike"),
            alert_at(20, "a", stage="escalated", **changes),
            alert_at(30, "a", stage="resolved", **changes),
        ],
    )  # fmt: skip
    write_run(
        folder / "blown", layout_of(["a", "b"]), steps=range(9),
        norms=lambda step: np.full(2, 1 if step < 5 else np.nan, np.float32),
        alerts=[alert_at(5, "b", kind="nonfinite")],
    )  # fmt: skip
    sweeps = {name: {"lr": rate} for name, rate in LR.items()}
    others = {f"batch/{i}": {"a_batch": 2**i, "optimizer": f"o{i}"} for i in range(2)}
    seeds = {f"seeds/{i}": {"width": 1 + i % 2, "seed": i} for i in range(22)}
    for name, values in {**sweeps, **others, **seeds}.items():
        write_growing(folder / name, BEFORE, hparams=values)


def details(page: TelemetryPage) -> list[list[str]]:
    """The rows of the statistics of a layer."""
    page.detail()
    rows = page.locator(".statistics tbody tr").all()
    return [row.locator("th, td:not(:has(canvas))").all_inner_texts() for row in rows]


def test_an_alert_of_dead_units_opens_the_relu_that_has_them(page: TelemetryPage) -> None:
    page.open(run="dead")
    page.locator(".alerts .alert", has_text="Dead units").last.click()
    assert page.link()["layer"] == ".act"
    assert ["Dead units", "100 %"] in details(page)
    assert page.locator(".units p").inner_text().endswith("dead: 0-7")
    names = page.locator(".chosen-alert .alert-layer").all_inner_texts()
    assert names == ["conv", "observed in act"]
    page.open(run="dead", layer=".conv", step=page.link()["step"])
    assert ["Dead units", "0 %"] in details(page)
    assert page.locator(".units p").inner_text().endswith("zero behind a ReLU: 0-7")
    page.locator(".detail .to-alert", has_text="Dead units").first.wait_for()


def test_the_input_is_the_row_above_the_layers_and_has_its_pictures(page: TelemetryPage) -> None:
    page.open(run="nan", statistic="activation_rms", step="0")
    page.heatmap.click(position=page.point(0.5 / 6, 0.5 / STEPS))
    assert ["Non-finite count", "0"] in details(page)
    assert page.locator(".detail .film").count() == 1
    page.open(run="nan", layer=page.link()["layer"], step="0")
    page.detail()
    assert page.locator(".detail h2").inner_text().startswith("model input")


def test_the_line_of_the_first_nan_names_the_layer_of_the_alert(page: TelemetryPage) -> None:
    page.open(run="blown")
    said = page.locator(".first-nonfinite").inner_text()
    assert said == "First NaN or infinity: step 5, in 2 layers; alert: b"


def test_an_escalated_alert_names_its_consequence(page: TelemetryPage) -> None:
    page.open(run="staged", layer=".b", step="20")
    page.detail()
    titles = page.locator(".alerts .alert-head b").all_inner_texts()
    now = "Loss spike, then vanishing gradient in b"
    shown = [title.removesuffix("error").strip() for title in titles]
    assert shown == ["Loss spike, resolved", now, "Loss spike"]
    causes = page.locator(".detail .to-alert").all_inner_texts()
    assert causes == [f"Caused by: {now}, step 20"]
    page.locator(".detail .to-alert").click()
    assert page.link()["layer"] == ".a"


def test_a_run_without_layers_shows_a_message(page: TelemetryPage) -> None:
    page.open(run="bare")
    assert "no layers" in page.locator(".notice").inner_text()
    assert page.locator(".strip").is_visible()
    assert not page.locator(".map-row").is_visible()


def test_values_measured_earlier_show_their_step(page: TelemetryPage) -> None:
    page.open(run="nan", layer=".fc", step=str(NAN))
    rows = details(page)
    place = next(i for i, row in enumerate(rows) if len(row) == 1)
    names = ["Gradient norm", "Gradient RMS", "Gradient share"]
    assert rows[:place] == [[name, "NaN"] for name in names]
    assert rows[place] == [f"measured at step {NAN - NAN % EVERY}"]
    assert "Update ratio" in [row[0] for row in rows[place:]]
    page.open(run="nan", layer=".fc", step="40")
    assert all(len(row) == 2 for row in details(page))
    page.open(run="nan", layer=".fc", step=str(NAN), statistic="update_ratio")
    page.heatmap.focus()
    page.keys("ArrowUp")  # a ReLU has none
    page.keys("ArrowDown")
    said = page.locator(".announcer").inner_text()
    assert re.fullmatch(rf"fc, step {NAN}: \S+ \(of step {NAN - NAN % EVERY}\)", said)


def test_zeros_are_separate_in_histograms_and_count_in_quantiles(page: TelemetryPage) -> None:
    page.open(run="nan", layer=".act", step="20")
    rows = details(page)
    share = next(row[1] for row in rows if row[0] == "Zero fraction")
    assert 20 < float(share.split()[0]) < 80
    caption = page.locator(".detail p", has_text="Exactly zero").inner_text()
    assert f"Exactly zero: {share}" in caption
    found = re.search(r"linear within ±(\S+),", caption)
    assert found is not None
    assert 0.01 < float(found[1]) < 10
    quantiles = re.search(r"are at (\S+), \S+, (\S+)\. ", caption)
    assert quantiles is not None
    assert quantiles[1] == "0"
    assert float(quantiles[2]) > 0.1
    histogram = page.locator("canvas.histogram")
    histogram.scroll_into_view_if_needed()
    box = box_of(histogram)
    # The lowest of the bars, which are of this step.
    histogram.hover(position={"x": box["width"] - 20, "y": box["height"] - 25})
    page.locator(".tooltip", has_text="exactly zero").filter(has_text=share).wait_for()


def test_each_map_has_the_number_of_its_channel(page: TelemetryPage) -> None:
    page.open(run="nan", layer=".same", step="20")
    page.detail()
    for title, count in (("Feature maps", MAPS), ("Filters", MAPS)):
        page.locator(".pictures", has_text=title).locator("button.enlarge").click()
        picture = page.locator(f".large img[alt$='numbered 0 to {count - 1}']")
        picture.wait_for()
        page.keys("Escape")
    page.locator(".pictures", has_text="Feature maps").locator("button.enlarge").click()
    page.locator(".large-picture[style*=ratio]").wait_for()  # the picture is loaded
    # Each number is in the upper left corner of its map, three or four in a row.
    columns = round(MAPS**0.5)
    rows = -(-MAPS // columns)
    whole = box_of(page.locator(".large-picture img"))
    for number, mark in enumerate(page.locator(".map-numbers i").all()):
        assert mark.inner_text() == str(number)
        box = box_of(mark)
        left, top = (
            (box["x"] - whole["x"]) / whole["width"],
            (box["y"] - whole["y"]) / whole["height"],
        )
        assert left == pytest.approx(number % columns / columns, abs=0.01)
        assert top == pytest.approx(number // columns / rows, abs=0.01)
    assert number == MAPS - 1
    page.keys("Escape")


def test_enter_opens_the_first_matching_layer(page: TelemetryPage) -> None:
    search = page.locator("label:has-text('Filter layers') input")
    for text, layer in (("b", "b"), ("oth", "other"), ("", "a")):
        page.open(run="growing")
        search.fill(text)
        search.press("Enter")
        page.locator(f".detail[data-layer={layer}][data-loaded=true]").wait_for()


def test_a_cell_outside_of_the_zoom_is_not_marked(page: TelemetryPage) -> None:
    def is_marked() -> bool:
        left, top, width, height = map(int, plot_box(page.locator("canvas.cells")))
        pixels = pixels_of(page.frame, "canvas.cells")[top : top + height, left : left + width]
        return bool(has_color(pixels, "#ffffff").any())

    page.open(run="growing", layer=".a", step="2")
    assert is_marked()
    for zoom in ("4,8,0,3", "0,2,0,3", "0,10,1,3"):
        page.open(run="growing", layer=".a", step="2", zoom=zoom)
        assert not is_marked(), zoom
    page.open(run="growing", layer=".a", step="2", zoom="1,3,0,1")
    assert is_marked()


def test_runs_that_differ_in_the_seed_are_one_curve_however_many_there_are(
    page: TelemetryPage,
) -> None:
    page.open(run="growing", layer=".a", table="run", filter="seeds", seeds="grouped")
    curves = page.locator(".run-curves")
    curves.locator("summary").click()
    names = curves.locator(".curve-legend span")
    names.nth(1).wait_for()
    assert sorted(names.all_inner_texts()) == ["width=1 (11 runs)", "width=2 (11 runs)"]
    assert curves.locator("summary").inner_text() == "Gradient norm of a of 22 runs"


def test_keys_work_while_data_loads(page: TelemetryPage, logdir: Path) -> None:
    pending: list[Any] = []

    def hold() -> None:
        page.page.unroute_all(behavior="wait")
        page.open(run="growing", layer=".a", step="3")
        page.page.route("**/plugin/telemetry/matrix*", lambda route: pending.append(route))
        page.heatmap.focus()

    def answer() -> None:
        while pending:
            pending.pop().continue_()

    hold()
    page.locator("label:has-text('Statistic') select").select_option("weight_norm")
    wait_for(lambda: page.page.wait_for_timeout(20) or pending, "the question for a statistic")
    page.heatmap.focus()
    page.keys("ArrowRight", "ArrowDown", "n", "+", "ArrowLeft")
    assert (page.link()["layer"], page.link()["step"]) == (".b", "3")
    answer()
    page.locator(".notice", has_text="not measured").wait_for()
    hold()
    write_growing(logdir / "growing", range(10, 20))

    def is_asked() -> bool:
        page.locator("button[data-key=reload]").click()
        page.page.wait_for_timeout(300)
        return bool(pending)

    wait_for(is_asked, "the question for what is new")
    page.heatmap.focus()
    page.keys("ArrowRight", "ArrowDown")
    assert (page.link()["layer"], page.link()["step"]) == (".b", "4")
    answer()
    page.locator(".panel[data-steps='20']").wait_for()


def test_two_runs_share_a_scale_that_shows_both(page: TelemetryPage) -> None:
    """Each run alone fills the twelve decades of a scale."""
    page.open(run="growing")
    scale = page.frame.evaluate(
        """async () => {
          const { makeScale } = await import("/data/plugin/telemetry/static/scale.js");
          const value = (first) => (_, i) => 10 ** (first + i / 10);
          const decades = (first) => Float32Array.from({ length: 120 }, value(first));
          return makeScale({ log: true }, "value", [decades(-20), decades(-2)]);
        }"""
    )
    assert [round(math.log10(scale[end])) for end in ("low", "high")] == [-20, 10]
    assert scale["isCut"] == [False, False]
