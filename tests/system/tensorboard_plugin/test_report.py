"""The report: one file, opened from disk in Chromium, that shows what the page shows."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from telemetry import HookLogger
from tests.helpers.browser import DARKEST, LIGHTEST, pixel_at, pixels_of
from tests.helpers.known_runs import COLUMN, alert_at, layout_of, write_dashboards, write_run
from tests.helpers.loops import fault_at, mlp, train
from tests.helpers.shell import run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=x onerror=window.hacked=1>"
NAMES = ["low", HOSTILE, "high"]
OpenReport = Callable[..., Any]


def write_report(*arguments: Path) -> Path:
    """Write the report of these runs next to the first."""
    path = arguments[0].parent / "report.html"
    assert run("report", *arguments, "-o", path) == 0
    return path


def norms(step: int) -> np.ndarray:
    return np.array([1, 1e3, 1e6], np.float32)


def write_demo(log_dir: Path) -> None:
    ones = np.ones((3, len(COLUMN)), np.float32)
    write_run(
        log_dir, layout_of(NAMES), steps=range(40), norms=norms, matrices=lambda _: ones, every=10,
        alerts=[alert_at(20, HOSTILE, summary=HOSTILE)],
    )  # fmt: skip
    with SummaryWriter(log_dir) as writer:
        edges = np.linspace(-1, 1, 11)
        writer.add_histogram("~~activation/0002.high", np.linspace(-1, 1, 1001), 10, bins=edges)
        writer.add_image("~~feature_maps/0002.high", np.ones((1, 1, 3)), 10, dataformats="HWC")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_demo(folder / "demo")
    return write_report(folder / "demo")


@pytest.fixture
def open_report(browser: Browser) -> Iterator[OpenReport]:
    """Opens a report from disk; its console must show no error."""
    pages: list[Page] = []
    errors: list[str] = []

    def open_path(path: Path, fragment: str = "", **options: Any) -> Page:
        page = browser.new_page(viewport={"width": 1300, "height": 800}, **options)
        pages.append(page)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.goto(f"{path.as_uri()}{fragment}")
        page.locator("html[data-ready=true]").wait_for(state="attached")
        return page

    yield open_path
    for page in pages:
        page.close()
    assert errors == []


def test_the_report_requests_nothing_else(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "default-src 'none'" in text


def answers_of(report: Path) -> dict[str, str]:
    text = report.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    answers: dict[str, str] = json.loads(found[1])["answers"]
    return answers


def answer_of(report: Path, *question: str) -> bytes:
    return gzip.decompress(base64.b64decode(answers_of(report)["\n".join(question)]))


def test_data_cannot_end_its_script(report: Path) -> None:
    assert json.loads(answer_of(report, "run", "demo"))["layers"][1]["name"] == HOSTILE
    assert HOSTILE not in report.read_text(encoding="utf-8")


def test_the_report_opens_from_disk(report: Path, open_report: OpenReport) -> None:
    page = open_report(report, "#p.telemetry.layer=.high&p.telemetry.step=10")
    assert "demo" in page.locator(".report-title").inner_text()
    rows = [pixel_at(page, (i + 0.5) / 3, 0.1) for i in range(3)]
    assert (rows[0], rows[2]) == (DARKEST, LIGHTEST)
    detail = page.locator(".detail[data-loaded=true]")
    detail.wait_for()
    assert "Histogram over time" in detail.inner_text()
    assert detail.locator("img").get_attribute("src") is not None
    assert HOSTILE in page.locator(".alerts").inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.locator("canvas.strip").is_visible()
    assert page.locator(".costs").count() == 0  # the run has no times
    caption = detail.locator("p", has_text="5 %, median and 95 %").inner_text()
    values = re.findall(r"are at (\S+), (\S+), (\S+)\. ", caption)[0]
    expected = [-0.9, 0, 0.9]  # of ten equal bins from -1 to 1
    assert [float(value) for value in values] == pytest.approx(expected, abs=0.03)
    page.locator("label:has-text('Statistic') select").select_option("weight_norm")
    page.locator(".panel[data-steps='4']").wait_for()
    page.emulate_media(media="print")
    assert page.locator(".toolbar").is_hidden()
    assert page.locator(".alerts").is_visible()


def test_a_printed_report_has_its_picture_in_light_colors(
    report: Path, open_report: OpenReport
) -> None:
    page = open_report(report, color_scheme="dark")
    page.locator("html.dark").wait_for(state="attached")
    page.emulate_media(media="print", color_scheme="dark")
    assert brightest(page, "canvas.cells") > 200
    assert brightest(page, "canvas.cells", after=PRINT) < 150


PRINT = "window.dispatchEvent(new Event('beforeprint'))"


def brightest(page: Page, selector: str, **options: Any) -> int:
    """Return the brightness of the brightest text at the left of a canvas, 0 to 255."""
    pixels = pixels_of(page, selector, **options)[:, :50]
    return int(pixels[pixels[..., 3] > 200][:, 0].max())


def test_a_learning_rate_is_drawn_as_steps(tmp_path: Path, open_report: OpenReport) -> None:
    write_run(tmp_path / "demo", layout_of(NAMES), steps=range(40), norms=norms, losses=False)
    write_dashboards(tmp_path / "demo", scalars={"learning_rate/0": {0: 0.1, 39: 0.01}})
    pixels = pixels_of(open_report(write_report(tmp_path / "demo")), "canvas.strip").astype(int)
    is_curve = (pixels[..., 3] > 100) & (pixels[..., 2] - pixels[..., 0] > 100)  # blue
    columns = is_curve[:, is_curve.any(axis=0)]
    height, count = columns.shape
    assert count > 100
    first, last = columns.argmax(axis=0) / height, 1 - columns[::-1].argmax(axis=0) / height
    assert not ((first > 0.3) & (last < 0.7)).any()


def test_a_report_of_many_layers_has_histograms_of_some(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(101)])
    with HookLogger(model, tmp_path / "demo", alerts=()):
        train(model, steps=1)
    questions = [question.split("\n") for question in answers_of(write_report(tmp_path / "demo"))]
    found = [question[-1] for question in questions if question[0] == "histograms"]
    assert found == ["model input", *map(str, range(1, 101, 2))], "every second row"


def test_records_around_a_fault_are_in_the_report(tmp_path: Path) -> None:
    model = mlp()
    with HookLogger(model, tmp_path / "demo", alerts=[fault_at(1)]):
        train(model, steps=3)
    text = write_report(tmp_path / "demo").read_text(encoding="utf-8")
    assert "Around alerts and exceptions" in text


def test_a_run_with_an_alert_and_no_step_has_a_report(
    tmp_path: Path, open_report: OpenReport
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path / "demo") as logger:
        for _ in range(100):
            logger.log(loss=1.0)  # which does not fall
    page = open_report(write_report(tmp_path / "demo"))
    page.locator(".panel[data-layers='0'][data-steps='0']").wait_for()
    for key in ("n", "w", "Escape", "ArrowDown", "+", "0"):
        page.keyboard.press(key)
    assert "matches" not in " ".join(page.locator(".notice").all_inner_texts())


def test_time_and_memory_are_a_line(tmp_path: Path, open_report: OpenReport) -> None:
    phases = ("data_wait_s", "forward_s", "backward_s", "optimizer_s")
    curves = {f"~run/time/{name}": {0: 0.1, 20: 0.1, 39: 0.1} for name in phases}
    curves["~run/time/data_wait_s"][39] = 0.9
    curves["~run/memory/host_rss_bytes"] = {0: 2**30, 20: 2 * 2**30, 39: 3 * 2**30}
    write_run(tmp_path / "demo", layout_of(NAMES), steps=range(40), norms=norms, logged=curves)
    report = write_report(tmp_path / "demo")
    said = open_report(report).locator(".costs").inner_text()
    others = "forward 100 ms (8 %) · backward 100 ms (8 %) · optimizer 100 ms (8 %)"
    assert said == f"Time, memory: data wait 900 ms (75 %) · {others} · host rss 3 GiB"
    said = open_report(report, "#p.telemetry.step=25").locator(".costs").inner_text()
    assert said.startswith("Time, memory: data wait 100 ms (25 %) · ")
    assert said.endswith("host rss 2 GiB")


def changed(step: int) -> np.ndarray:
    return norms(step) * np.array([1, 1, 2 if step >= 5 else 1], np.float32)


@pytest.fixture
def compared(tmp_path: Path, open_report: OpenReport) -> Page:
    """The report of three runs.

    ``one`` differs from ``base`` at step 5; ``other`` has no common layer.
    """
    losses = {"base": 0.5, "one": 0.25, "other": 1}
    metrics = {"one": {"val/accuracy": {39: 0.75}}}
    hparams_of = {"base": {"lr": 0.1, "depth": 3}, "one": {"lr": 0.2, "depth": 3}, "other": {}}
    for name, values in hparams_of.items():
        layers = ["elsewhere"] if name == "other" else NAMES
        write_run(
            tmp_path / name, layout_of(layers), steps=range(40), losses=False,
            norms={"base": norms, "one": changed, "other": lambda _: np.ones(1, np.float32)}[name],
            alerts=[alert_at(20, NAMES[2], summary=HOSTILE)] if name == "one" else [],
            hparams=values, logged={"loss": {0: 2, 39: losses[name]}} | metrics.get(name, {}),
            time_of=lambda step: 1767225600 + step,
        )  # fmt: skip
    page = open_report(write_report(*(tmp_path / name for name in hparams_of)), color_scheme="dark")
    page.locator(".comparison canvas").wait_for()
    return page


def test_a_report_of_several_runs_compares_them(compared: Page) -> None:
    titles = compared.locator(".comparison thead th").all_inner_texts()
    rows = [
        dict(zip(titles, row.locator("td").all_inner_texts(), strict=True))
        for row in compared.locator(".comparison tbody tr").all()
    ]
    assert [row["Run"] for row in rows] == ["one", "base", "other"]
    assert [float(row["Best loss"]) for row in rows] == [0.25, 0.5, 1]
    assert [row["Last step"] for row in rows] == ["39"] * 3
    assert [row["lr"] for row in rows] == ["0.2", "0.1", ""]
    assert [row["val/accuracy"] for row in rows] == ["0.75", "", ""]
    assert "depth" not in titles
    one, base, other = [row["First difference from the first run"] for row in rows]
    assert "step 5" in one
    assert "grad_norm in high" in one
    assert base == "the first run"
    assert other == "no layer or step in common"
    assert "step 20" in rows[0]["Worst alert"]
    verdict = compared.locator(".verdict").inner_text()
    assert verdict.startswith("Lowest loss: 0.25, of one; next is 0.5, of base. one: ")
    assert compared.evaluate("window.hacked") is None
    legend = compared.locator(".comparison .curve-legend span").all_inner_texts()
    assert legend == ["base", "one", "other"]
    compared.locator(".comparison tbody button:text-is('other')").click()
    compared.locator(".panel[data-run='other']").wait_for()


def test_each_run_of_a_report_opens_in_its_page(compared: Page) -> None:
    compared.locator("button[aria-label='Run: base']").click()
    table = compared.locator(".runs")
    table.wait_for()
    assert table.locator("tbody tr").count() == 3
    table.locator("button:text-is('one')").click()
    compared.locator(".panel[data-run='one'][data-steps='40']").wait_for()
    before, after = (pixel_at(compared, 0.9, place) for place in (0.05, 0.9))
    assert before != after


def test_a_printed_comparison_is_light_and_nothing_is_cut(compared: Page) -> None:
    compared.set_viewport_size({"width": 718, "height": 1000})  # A4 between its margins
    compared.emulate_media(media="print", color_scheme="dark")
    compared.evaluate(PRINT)
    compared.wait_for_timeout(300)  # a resized page draws in the next frame
    assert brightest(compared, ".comparison canvas") < 150
    right = compared.evaluate(
        "Math.max(...[...document.querySelectorAll('canvas, td, th')]"
        ".filter((n) => n.checkVisibility()).map((n) => n.getBoundingClientRect().right))"
    )
    assert right <= 718


def test_a_report_of_two_runs_opens_with_their_ratio(
    tmp_path: Path, open_report: OpenReport
) -> None:
    for name in ("a", "b"):
        write_demo(tmp_path / "runs" / name / "run")
    page = open_report(write_report(tmp_path / "runs"))
    assert page.locator(".panel h2").first.inner_text() == "a/run, relative to b/run"
    assert page.locator(".panel").count() == 1
    assert pixel_at(page, 0.9, 0.9) == pixel_at(page, 0.1, 0.1)
    assert "none in 40 steps" in page.locator(".comparison").inner_text()


def test_a_report_of_more_than_20_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(21):
        write_run(tmp_path / str(number), layout_of(NAMES), steps=[0], norms=norms)
    assert run("report", tmp_path, "-o", tmp_path / "report.html") == 2
    assert "20" in capsys.readouterr().err
