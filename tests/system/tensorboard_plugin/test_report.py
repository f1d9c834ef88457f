"""The report: one file, opened from disk in Chromium, that shows what the page shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from telemetry.commands.cli import main
from telemetry.commands.export import write_report as write_report_of
from telemetry.events import FileWriter, summaries
from telemetry.layers import MATRIX_STATISTICS
from telemetry.reading.run import open_run
from telemetry.tensorboard_plugin.report import MAX_RUNS
from telemetry.writing import hparams
from telemetry.writing.page import PageWriter
from tests.helpers import serialized
from tests.helpers.browser import PIXEL
from tests.helpers.hostile_runs import png
from tests.helpers.known_runs import alert_at, layout_of, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=x onerror=window.hacked=1>"
NAMES = ["low", HOSTILE, "high"]


def write_report(log_dir: Path, path: Path) -> list[str]:
    return write_report_of({log_dir: open_run(log_dir)}, path)


def norms(step: int) -> np.ndarray:
    return np.array([1, 1e3, 1e6], np.float32)


def write_demo(log_dir: Path) -> None:
    ones = np.ones((3, len(MATRIX_STATISTICS)), np.float32)
    write_run(
        log_dir, layout_of(NAMES), steps=range(40), norms=norms, matrices=lambda _: ones, every=10,
        alerts=[alert_at(20, HOSTILE, summary=HOSTILE)],
    )  # fmt: skip
    writer = FileWriter(log_dir)
    edges = np.linspace(-1, 1, 11)
    buckets = serialized.histogram("activation/0002.high", edges[:-1], edges[1:], np.ones(10))
    picture = summaries.image("feature_maps/0002.high", [png(1, 1)], 1, 1)
    writer.write_values([buckets, picture], 10)
    writer.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_demo(folder / "demo")
    path = folder / "report.html"
    assert write_report(folder / "demo", path) == []
    return path


def test_the_report_requests_nothing_else(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "default-src 'none'" in text


def test_data_cannot_end_its_script(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["runs"]["demo"]["overview"]["layers"][1]["name"] == HOSTILE
    assert HOSTILE not in text


def test_the_report_opens_from_disk(report: Path, browser: Browser) -> None:
    errors: list[str] = []
    page = browser.new_page(viewport={"width": 1300, "height": 800})
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.goto(f"{report.as_uri()}#p.telemetry.layer=.high&p.telemetry.step=10")
    check_page(page)
    page.emulate_media(media="print")
    assert page.locator(".toolbar").is_hidden()
    assert page.locator(".alerts").is_visible()
    page.close()
    assert errors == []


def test_a_printed_report_has_its_picture_in_light_colors(report: Path, browser: Browser) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(report.as_uri())
    page.locator("html[data-ready=true].dark").wait_for(state="attached")
    page.emulate_media(media="print", color_scheme="dark")
    # Keep the canvas in a separate layer: there, clearing it does not erase the picture below.
    assert float(page.locator(".overlay").evaluate("(n) => getComputedStyle(n).opacity")) < 1
    assert page.evaluate(LABELS) > 200
    assert page.evaluate(f"window.dispatchEvent(new Event('beforeprint')), {LABELS}") < 150
    page.close()


LABELS = """(() => {
    const canvas = document.querySelector("canvas.cells");
    const { data } = canvas.getContext("2d").getImageData(0, 0, 100, canvas.height);
    const isInk = (_, i) => i % 4 === 0 && data[i + 3] > 200;
    return Math.max(...data.filter(isInk));
})()"""
"""How bright the brightest of the names beside the picture is, 0 to 255."""


def check_page(page: Page) -> None:
    page.locator("html[data-ready=true]").wait_for(state="attached")
    assert "demo" in page.locator(".report-title").inner_text()
    rows = [page.evaluate(PIXEL, [(i + 0.5) / 3, 0.1, 0]) for i in range(3)]
    assert (rows[0], rows[2]) == ("#440154", "#fde725")
    detail = page.locator(".detail[data-loaded=true]")
    detail.wait_for()
    assert "Histogram over time" in detail.inner_text()
    assert detail.locator("img").get_attribute("src", timeout=5000) is not None
    assert HOSTILE in page.locator(".alerts").inner_text()
    assert page.evaluate("window.hacked") is None
    detail.get_by_role("button", name="Enlarge", exact=True).first.click()
    assert page.locator(".large b").inner_text() == "step 10"
    values = page.locator(".large .quantiles td").all_inner_texts()
    expected = [-0.98, -0.9, -0.5, 0, 0.5, 0.9, 0.98]  # of ten equal bins from -1 to 1
    assert [float(value) for value in values[1:]] == pytest.approx(expected, abs=0.03)
    page.keyboard.press("Escape")
    page.locator("label:has-text('Statistic') select").select_option("weight_norm")
    page.locator(".panel[data-steps='4']").wait_for()


STRIP = """() => {
    const canvas = document.querySelector("canvas.strip");
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    const columns = [];
    for (let x = 0; x < width; x++) {
        const rows = [...Array(height).keys()].filter((y) => {
            const [red, , blue, alpha] = data.subarray(4 * (y * width + x));
            return alpha > 100 && blue - red > 100;
        });
        if (rows.length) columns.push([rows[0] / height, rows[rows.length - 1] / height]);
    }
    return columns;
}"""
"""Of each column of the strip in which there is a curve, where it begins and ends."""


def test_a_learning_rate_is_drawn_as_steps(tmp_path: Path, browser: Browser) -> None:
    write_run(tmp_path / "demo", layout_of(NAMES), steps=range(40), norms=norms, losses=False)
    writer = FileWriter(tmp_path / "demo")
    for step, rate in ((0, 0.1), (39, 0.01)):
        writer.write_values([summaries.scalar("learning_rate/0", rate)], step)
    writer.close()
    write_report(tmp_path / "demo", tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 1300, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    page.locator("html[data-ready=true]").wait_for(state="attached")
    columns = page.evaluate(STRIP)
    page.close()
    assert len(columns) > 100
    assert [column for column in columns if column[0] > 0.3 and column[1] < 0.7] == []


def test_a_large_report_has_no_histograms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.tensorboard_plugin.report.MAX_LAYERS_IN_DETAIL", 1)
    monkeypatch.setattr("telemetry.tensorboard_plugin.report.MAX_CELLS", 30)
    write_demo(tmp_path / "demo")
    write_report(tmp_path / "demo", tmp_path / "small.html")
    text = (tmp_path / "small.html").read_text(encoding="utf-8")
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["runs"]["demo"]["histograms"] == {}


def test_records_around_a_fault_are_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.commands.export.flight_files", lambda _: [tmp_path])
    monkeypatch.setattr(
        "telemetry.commands.export.print_faults",
        lambda _, console: console.print(HOSTILE, markup=False),
    )
    write_demo(tmp_path / "demo")
    write_report(tmp_path / "demo", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Around alerts and exceptions" in text
    assert HOSTILE not in text


def test_files_without_our_data_are_reported(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path)
    writer.write_values([summaries.scalar("loss", 1.0)], 0)
    writer.close()
    with pytest.raises(ValueError, match="no telemetry data"):
        write_report(tmp_path, tmp_path / "report.html")


def test_a_run_with_an_alert_and_no_step_has_a_report(tmp_path: Path, browser: Browser) -> None:
    writer = FileWriter(tmp_path)
    writer.write_values([PageWriter().alert_value(alert_at(0, None), 0)], 0)
    writer.close()
    write_report(tmp_path, tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 1300, "height": 800})
    failed: list[object] = []
    page.on("pageerror", lambda error: failed.append(error))
    page.goto((tmp_path / "report.html").as_uri())
    page.locator(".panel[data-layers='0'][data-steps='0']").wait_for()
    for key in ("n", "w", "Escape", "ArrowDown", "+", "0"):
        page.keyboard.press(key)
    notices = page.locator(".notice").all_inner_texts()
    page.close()
    assert failed == []
    assert [notice for notice in notices if "matches" in notice] == []


def test_pictures_beyond_the_limit_are_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_demo(tmp_path / "demo")
    monkeypatch.setattr("telemetry.tensorboard_plugin.report.MAX_PICTURES_BYTES", 10)
    [problem] = write_report(tmp_path / "demo", tmp_path / "report.html")
    assert "pictures" in problem


COST = """([step, share]) => {
    const canvas = document.querySelector("canvas.costs");
    const { box, view } = canvas.plotted;
    const x = box.x + ((step - view.step0) / (view.step1 - view.step0)) * box.width;
    const place = [x, box.y + (1 - share) * box.height].map((at) => at * devicePixelRatio);
    return [...canvas.getContext("2d").getImageData(...place, 1, 1).data].join(" ");
}"""
"""Color of the row of costs at a step and a share of its height."""


def test_phases_of_a_step_are_stacked_as_shares(tmp_path: Path, browser: Browser) -> None:
    write_run(tmp_path / "demo", layout_of(NAMES), steps=range(40), norms=norms)
    writer = FileWriter(tmp_path / "demo")
    seconds = {"data_wait_s": (0.1, 0.1, 0.9), "forward_s": (0.1,) * 3, "backward_s": (0.1,) * 3,
               "optimizer_s": (0.1,) * 3}  # fmt: skip
    for i, step in enumerate((0, 20, 39)):
        times = [(f"~run/time/{name}", values[i]) for name, values in seconds.items()]
        memory = ("~run/memory/host_rss_bytes", (i + 1) * 2**30)
        writer.write_values([summaries.scalar(*point) for point in [*times, memory]], step)
    writer.close()
    write_report(tmp_path / "demo", tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 1300, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    page.locator("html[data-ready=true]").wait_for(state="attached")
    legend = page.locator(".panel .curve-legend").nth(1).locator("span")
    assert legend.all_inner_texts() == [
        "Time, memory (GiB)",
        "data wait 900 ms (75 %)", "forward 100 ms (8 %)", "backward 100 ms (8 %)",
        "optimizer 100 ms (8 %)", "host rss 3 GiB",
    ]  # fmt: skip
    waits, forward = page.evaluate(COST, [10, 0.12]), page.evaluate(COST, [10, 0.38])
    assert waits != forward
    assert page.evaluate(COST, [38, 0.12]) == page.evaluate(COST, [38, 0.38]) == waits
    page.locator("canvas.costs").hover(position={"x": 600, "y": 30})
    assert "data wait" in page.locator(".tooltip").inner_text()
    page.close()


def test_a_run_without_times_has_no_row_of_them(report: Path, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1300, "height": 800})
    page.goto(report.as_uri())
    page.locator("html[data-ready=true]").wait_for(state="attached")
    assert page.locator("canvas.strip").is_visible()
    assert page.locator("canvas.costs").is_hidden()
    page.close()


def changed(step: int) -> np.ndarray:
    return norms(step) * np.array([1, 1, 2 if step >= 5 else 1], np.float32)


@pytest.fixture
def compared(tmp_path: Path, browser: Browser) -> Iterator[Page]:
    """The report of three runs.

    ``one`` differs from ``base`` at step 5; ``other`` has no common layer.
    """
    hparams_of = {"base": {"lr": 0.1, "depth": 3}, "one": {"lr": 0.2, "depth": 3}, "other": {}}
    for name, values in hparams_of.items():
        layers = ["elsewhere"] if name == "other" else NAMES
        write_run(
            tmp_path / name, layout_of(layers), steps=range(40),
            norms={"base": norms, "one": changed, "other": lambda _: np.ones(1, np.float32)}[name],
            alerts=[alert_at(20, NAMES[2], summary=HOSTILE)] if name == "one" else [],
        )  # fmt: skip
        writer = FileWriter(tmp_path / name)
        writer.write_values(hparams.values_of(values, ["loss"]) if values else [], 0)
        writer.close()
    runs = [str(tmp_path / name) for name in hparams_of]
    assert main(["report", *runs, "-o", str(tmp_path / "report.html")]) == 0
    page = browser.new_page(viewport={"width": 1300, "height": 800}, color_scheme="dark")
    page.goto((tmp_path / "report.html").as_uri())
    page.locator("html[data-ready=true]").wait_for(state="attached")
    page.locator(".comparison canvas").wait_for()
    yield page
    page.close()


def test_a_report_of_several_runs_compares_them(compared: Page) -> None:
    rows = [
        row.locator("td").all_inner_texts()
        for row in compared.locator(".comparison tbody tr").all()
    ]
    assert [row[0] for row in rows] == ["base", "one", "other"]
    assert {row[1] for row in rows} == {"2026-01-01 00:00 UTC"}
    assert [row[3] for row in rows] == ["0 to 39"] * 3
    assert ("lr 0.1" in rows[0][2], "lr 0.2" in rows[1][2]) == (True, True)
    assert "step 5" in rows[1][6]
    assert "grad_norm in high" in rows[1][6]
    assert "step" not in rows[0][6]
    assert "step 20" in rows[1][7]
    assert HOSTILE in rows[1][7]
    assert compared.evaluate("window.hacked") is None
    legend = compared.locator(".comparison .curve-legend span").all_inner_texts()
    assert legend == ["base", "one", "other"]


def test_each_run_of_a_report_opens_in_its_page(compared: Page) -> None:
    compared.locator("button[aria-label='Run: base']").click()
    table = compared.locator(".runs[data-loaded]")
    table.wait_for()
    assert table.locator("tbody tr").count() == 3
    table.locator("button:text-is('one')").click()
    compared.locator(".panel[data-run='one'][data-steps='40']").wait_for()
    before, after = (compared.evaluate(PIXEL, [0.9, place, 0]) for place in (0.05, 0.9))
    assert before != after


def test_a_printed_comparison_is_light_and_nothing_is_cut(compared: Page) -> None:
    compared.set_viewport_size({"width": 718, "height": 1000})  # A4 between its margins
    compared.emulate_media(media="print", color_scheme="dark")
    compared.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    compared.wait_for_timeout(300)  # a resized page draws in the next frame
    labels = LABELS.replace("canvas.cells", ".comparison canvas").replace("100", "50")
    assert compared.evaluate(labels) < 150
    right = compared.evaluate(
        "Math.max(...[...document.querySelectorAll('canvas, td, th')]"
        ".filter((n) => n.checkVisibility()).map((n) => n.getBoundingClientRect().right))"
    )
    assert right <= 718


def test_a_report_of_two_runs_opens_with_their_ratio(tmp_path: Path, browser: Browser) -> None:
    write_demo(tmp_path / "a" / "run")
    write_demo(tmp_path / "b" / "run")
    arguments = [str(tmp_path), "-o", str(tmp_path / "report.html")]
    assert main(["report", *arguments]) == 0
    page = browser.new_page(viewport={"width": 1300, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    page.locator("html[data-ready=true]").wait_for(state="attached")
    assert page.locator(".panel").evaluate_all("(all) => all.map((n) => n.dataset.run)") == [
        "a/run",
        "b/run",
    ]
    assert page.evaluate(PIXEL, [0.9, 0.9, 0]) == page.evaluate(PIXEL, [0.1, 0.1, 1])
    assert "none in 40 steps" in page.locator(".comparison").inner_text()
    page.close()


def test_a_report_of_too_many_runs_is_refused(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo")
    run = open_run(tmp_path / "demo")
    many = {tmp_path / str(number): run for number in range(MAX_RUNS + 1)}
    with pytest.raises(ValueError, match=str(MAX_RUNS)):
        write_report_of(many, tmp_path / "report.html")
