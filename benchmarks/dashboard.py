"""Times the Telemetry page, and TensorBoard's own tabs on the same data.

    python benchmarks/dashboard.py [--quick] [--sizes LAYERSxSTEPS ...] [--rounds N] [--json FILE]

Each size is a run as ``HookLogger`` writes it by default: gradient norms at every step, everything
else, including histograms, at every hundredth. TensorBoard runs in a separate process, with its
fast loader if available, and is restarted in each round. Figures are medians.

"start" is the time until the server lists the whole run, for which the page does not wait for
TensorBoard to load it. "cold" is the time of the page's first requests: layers, alerts, loss and
picture; "warm" that of the same requests again, and "wire" their size. "cell" is the time of the
requests after a click on a cell. "page" is the time from navigation until the picture is drawn, in
Chromium with an empty cache, and "own" what is left of it once TensorBoard's own page has opened
the Telemetry page; "redraw" is the time to draw it again, zoomed. These three need Chromium and
Playwright.

"scalars" is the cost of the same picture without the page: a run with a curve of gradient norms for
each layer, and one request for each, as from the Scalars tab, six at a time like a browser.
"histograms" is the same for the histograms of all layers' outputs. Neither includes drawing.

Of more than ten million cells, such as 10000x10000, only what the page's picture needs is written,
without histograms, so that these two are missing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from machine import describe_machine, write_json

from telemetry.events import summaries
from telemetry.events.files import run_log_file
from telemetry.events.run_log import new_run_id
from telemetry.layers import MATRIX_STATISTICS
from telemetry.records import Layout, Output, StepRecord, TensorRecord
from telemetry.records.sketch import sketch_array
from telemetry.tag_names import KIND, numbered
from telemetry.writing.dashboard import Dashboard
from telemetry.writing.run_log import RunLog

# TensorBoard with the plugin, Chromium and the layout of a model: those of the page's tests.
sys.path.append(str(Path(__file__).parents[1]))
browser: Any = import_module("tests.helpers.browser")
known_runs: Any = import_module("tests.helpers.known_runs")

SIZES = ["100x1000", "1000x1000"]
QUICK_SIZES = ["20x200"]
EVERY_N_STEPS = 100
CONNECTIONS = 6
COLUMNS = {
    "start_s": "start, s",
    "cold_ms": "cold, ms",
    "warm_ms": "warm, ms",
    "wire_kb": "wire, kB",
    "cell_ms": "cell, ms",
    "page_s": "page, s",
    "own_s": "own, s",
    "redraw_ms": "redraw, ms",
    "scalars_s": "scalars, s",
    "histograms_s": "histograms, s",
}
NOTE_WHEN_READY = """new MutationObserver((_, observer) => {
  if (document.documentElement?.dataset.ready !== "true") return;
  window.readyAt = performance.now();
  observer.disconnect();
}).observe(document, { subtree: true, attributes: true });"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Times of a run."""

    layers: int
    steps: int

    @staticmethod
    def parse(text: str) -> Size:
        layers, steps = map(int, text.split("x"))
        return Size(layers=layers, steps=steps)

    @property
    def is_huge(self) -> bool:
        """Whether histograms and a curve for each layer would take minutes and gigabytes."""
        return self.layers * self.steps > 10_000_000


# --- runs


def layout_of(size: Size) -> Layout:
    names = [f"blocks.{i // 10}.layer{i % 10}" for i in range(size.layers)]
    layout: Layout = known_runs.layout_of(names)
    return layout


def curve_tags(size: Size) -> list[str]:
    names = [module.name for module in layout_of(size).modules]
    return [f"grad_norm/{index:04d}.{name}" for index, name in enumerate(names)]


def grad_norms(size: Size) -> Iterator[np.ndarray]:
    """Noise, which compresses as badly as real values; one array for each step."""
    random = np.random.default_rng(0)
    return (random.lognormal(size=size.layers) for _ in range(size.steps))


def records(size: Size) -> Iterator[StepRecord]:
    layout = layout_of(size)
    random = np.random.default_rng(1)
    tensors = [
        TensorRecord(sketch=sketch_array(random.normal(size=1000, scale=scale)))
        for scale in random.lognormal(size=16)
    ]
    outputs = {Output(m.name): tensors[i % 16] for i, m in enumerate(layout.modules)}
    parameters = {p.name: tensors[i % 16] for i, p in enumerate(layout.parameters)}
    measured: dict[str, Any] = {
        "full": True,
        "outputs": outputs,
        "output_grads": outputs,
        "grads": parameters,
        "weights": parameters,
        "update_ratios": dict.fromkeys(parameters, 1e-3),
    }
    for step, norms in enumerate(grad_norms(size)):
        yield StepRecord(
            step=step,
            wall_time=1e9 + 0.1 * step,
            layout=layout,
            grad_norms=norms,
            grad_present=np.ones(size.layers, dtype=bool),
            grad_finite=np.ones(size.layers, dtype=bool),
            learning_rates=(0.1,),
            **(measured if step % EVERY_N_STEPS == 0 else {}),
        )


def write_run(log_dir: Path, size: Size) -> None:
    """A run with everything that ``HookLogger`` writes; a huge one only for the picture."""
    if size.is_huge:
        norms, full = grad_norms(size), np.full((size.layers, len(MATRIX_STATISTICS)), 1e-3, "f4")
        known_runs.write_run(
            log_dir, layout_of(size), steps=range(size.steps), every=EVERY_N_STEPS,
            norms=lambda _: next(norms).astype("f4"), matrices=lambda _: full,
        )  # fmt: skip
        return
    writer, dashboard = known_runs.EventWriter(log_dir), Dashboard()
    writer.write_values(dashboard.first_values(), 0)
    file = run_log_file(str(log_dir))
    log = RunLog(lambda data, **_: file.append(deque([data])), file.repeat, run=new_run_id())
    for record in records(size):
        step, time_s, losses = record.step, record.wall_time, {"loss": 1 / (1 + record.step)}
        log.step(record)
        log.logged(step, time_s, losses)
        values = chain.from_iterable(dashboard.values_of(record))
        writer.write_values([*values, summaries.scalars(losses.items())], step, time_s)
    log.end(size.steps - 1, None)
    writer.close()
    file.close()


def write_curves(log_dir: Path, size: Size) -> None:
    """Gradient norms as ``add_scalar`` writes them: a tag for each layer."""
    writer, tags = known_runs.EventWriter(log_dir), curve_tags(size)
    for step, norms in enumerate(grad_norms(size)):
        pairs = zip(tags, norms.tolist(), strict=True)
        writer.write_values([summaries.scalar(tag, norm) for tag, norm in pairs], step)
    writer.close()


# --- measuring


Query = tuple[str, str, Mapping[str, str]]
"""Plugin, route and query."""


class Server:
    """Client of TensorBoard for the run called ``run``, like a browser."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, plugin: str, route: str, **query: str) -> bytes:
        """The answer's bytes as sent."""
        url = f"{self._address}data/plugin/{plugin}/{route}?{urlencode({'run': 'run', **query})}"
        request = Request(url, headers={"Accept-Encoding": "gzip"})
        with urlopen(request, timeout=browser.PATIENCE_S) as response:
            body: bytes = response.read()
        return body

    def get_json(self, plugin: str, route: str, **query: str) -> Any:
        body = self.get(plugin, route, **query)
        return json.loads(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)

    def get_all(self, *queries: Query) -> int:
        """Send six requests at a time, like a browser; return the number of bytes received."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return sum(pool.map(lambda q: len(self.get(q[0], q[1], **q[2])), queries))

    def get_overview(self) -> int:
        """The page's first requests, in their order."""
        return self.get_all(("telemetry", "runs", {})) + self.get_all(
            ("telemetry", "run", {}),
            ("telemetry", "scalars", {}),
            ("telemetry", "matrix", {"statistic": "grad_norm"}),
        )

    def get_cell(self, layer: str) -> int:
        routes = ("layer", "histograms", "images")
        return self.get_all(*(("telemetry", route, {"layer": layer}) for route in routes))

    def get_tags(self, plugin: str, tags: Sequence[str]) -> int:
        return self.get_all(*((plugin, plugin, {"tag": tag}) for tag in tags))


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def serve(logdir: Path, stack: ExitStack, *, wanted: int) -> str:
    """TensorBoard's address, after it lists this many runs; it serves until the stack closes."""
    log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
    fast = import_module("tensorboard_data_server").server_binary() is not None
    address: str = stack.enter_context(browser.serve(logdir, log, fast=fast, wanted=wanted))
    return address


def measure_page(logdir: Path, size: Size, chromium: Any) -> dict[str, float]:
    """One round, by column."""
    layout = layout_of(size)
    with ExitStack() as stack:
        start = time.perf_counter()
        address = serve(logdir, stack, wanted=1)
        server = Server(address)
        browser.wait_for(
            lambda: server.get_json("telemetry", "runs")[0]["lastStep"] == size.steps - 1,
            "the whole run",
        )
        start_s = time.perf_counter() - start
        cold_s, warm_s = seconds(server.get_overview), seconds(server.get_overview)
        times = {
            "start_s": start_s,
            "cold_ms": cold_s * 1e3,
            "warm_ms": warm_s * 1e3,
            "wire_kb": server.get_overview() / 1e3,
            "cell_ms": seconds(lambda: server.get_cell(layout.modules[-1].name)) * 1e3,
        }
        if not size.is_huge:
            tags = [f"{KIND}activation/{numbered(i, m.name)}" for i, m in enumerate(layout.modules)]
            times["histograms_s"] = seconds(lambda: server.get_tags("histograms", tags))
        if chromium is not None:
            times |= measure_drawing(chromium, address)
    return times


def measure_drawing(chromium: Any, address: str) -> dict[str, float]:
    context = chromium.new_context(viewport={"width": 1400, "height": 900})
    context.add_init_script(NOTE_WHEN_READY)
    page = browser.TelemetryPage(context.new_page(), address)
    page.open(run="run")
    own_s = page.frame.evaluate("readyAt") / 1e3
    began, opened = (f.evaluate("performance.timeOrigin") for f in (page.page, page.frame))
    page.heatmap.focus()
    redraws = []
    for key in "+++-":
        page.page.keyboard.press(key)
        page.page.wait_for_timeout(100)
        redraws.append(float(page.locator("html").get_attribute("data-draw-ms")))
    context.close()
    page_s = own_s + (opened - began) / 1e3
    return {"page_s": page_s, "own_s": own_s, "redraw_ms": statistics.median(redraws)}


def measure_curves(logdir: Path, size: Size, rounds: int) -> float:
    """Seconds to get a curve for each layer."""
    tags = curve_tags(size)
    with ExitStack() as stack:
        server = Server(serve(logdir, stack, wanted=0))

        def is_loaded() -> bool:
            known = server.get_json("scalars", "tags").get("run", {})
            return tags[-1] in known and (
                server.get_json("scalars", "scalars", tag=tags[-1])[-1][1] == size.steps - 1
            )

        browser.wait_for(is_loaded, "all curves")
        return statistics.median(
            seconds(lambda: server.get_tags("scalars", tags)) for _ in range(rounds)
        )


def measure(size: Size, rounds: int, chromium: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        logdir = Path(folder)
        write_run(logdir / "page" / "run", size)
        opened = [measure_page(logdir / "page", size, chromium) for _ in range(rounds)]
        medians = {name: statistics.median(one[name] for one in opened) for name in opened[0]}
        if size.is_huge:
            return medians
        write_curves(logdir / "curves" / "run", size)
        return medians | {"scalars_s": measure_curves(logdir / "curves", size, rounds)}


# --- printing


def open_chromium(stack: ExitStack) -> Any:
    """Chromium; None, with a message, if it or Playwright is missing."""
    try:
        return stack.enter_context(browser.open_browser())
    except pytest.skip.Exception as missing:
        print(f"without Chromium: {missing}")
        return None


def print_table(figures: Sequence[Mapping[str, float]]) -> None:
    print(f"\n{'layers × steps':>14}", *(f"{title:>13}" for title in COLUMNS.values()))
    for row in figures:
        size = f"{row['layers']:,} × {row['steps']:,}"
        cells = (f"{row[c]:13,.2f}" if c in row else f"{'–':>13}" for c in COLUMNS)
        print(f"{size:>14}", *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small, one round: rough figures")
    parser.add_argument("--sizes", nargs="+", help=f"LAYERSxSTEPS; default: {SIZES}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    browser.PATIENCE_S = 600  # more than a test has: runs may be large, or the machine busy
    device = torch.device("cpu")
    print(describe_machine(device))
    sizes = [Size.parse(text) for text in args.sizes or (QUICK_SIZES if args.quick else SIZES)]
    rounds = 1 if args.quick else args.rounds
    with ExitStack() as stack:
        chromium = open_chromium(stack)
        figures = [{**asdict(size), **measure(size, rounds, chromium)} for size in sizes]
    print_table(figures)
    if args.json:
        write_json(args.json, device, figures=figures)


if __name__ == "__main__":
    main()
