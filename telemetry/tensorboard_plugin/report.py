"""The page's files, and runs as one HTML file: the page with its data inside."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from itertools import chain
from pathlib import PurePath
from typing import Any

from tensorboard.backend import json_util

from telemetry.layers import PAGE_STATISTICS
from telemetry.reading import payloads
from telemetry.reading.builtin_tags import histogram_tags
from telemetry.reading.comparison import Comparison, compare
from telemetry.reading.matrix import WHOLE, Limit
from telemetry.reading.run_data import Layer, RunData

# By the ending of a file's name.
CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css"}
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+\.js)";', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_EXPORTS = re.compile(
    r"export\{([^}]*)\};?\s*$"
)  # at the end of a module that another bundler made


def read_static_files() -> dict[str, bytes]:
    """Return name and content of every module and style sheet."""
    folder = files("telemetry.tensorboard_plugin") / "static"
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if PurePath(entry.name).suffix in CONTENT_TYPES
    }


def bundle(files: Mapping[str, bytes], entry: str) -> str:
    """Return one module with the exports of ``entry``; each import becomes a function's result."""
    made: dict[str, str] = {}

    def add(name: str) -> str:
        code = files[name].decode()
        for _, needed in _IMPORT.findall(code):
            if needed not in made:
                add(needed)
        exported = [name for _, name in _EXPORT.findall(code)]
        if found := _EXPORTS.search(code):
            pairs = [pair.split(" as ") for pair in found[1].split(",")]
            exported += [f"{name}: {local}" for local, name in pairs]
        exports = ", ".join(exported)
        code = _EXPORTS.sub("", _EXPORT.sub(r"\1", _IMPORT.sub(_as_constants, code)))
        made[name] = f"const {_variable(name)} = (() => {{\n{code}\nreturn {{ {exports} }};\n}})();"
        return exports

    exports = add(entry)
    return "\n".join([*made.values(), f"export const {{ {exports} }} = {_variable(entry)};"])


def _as_constants(found: re.Match[str]) -> str:
    return f"const {found[1].replace(' as ', ': ')} = {_variable(found[2])};"


def _variable(name: str) -> str:
    return "$" + name.removesuffix(".js")


MAX_RUNS = 20
LIMIT = Limit(max_layers=1000, max_cells=250_000)

# Of more layers, only those with alerts and some others keep histograms and pictures.
MAX_LAYERS_IN_DETAIL = 100
# All pictures of a report together; browsers still open a report of this size.
MAX_PICTURES_BYTES = 128 << 20
# Alerts of which a report lists the layers that changed first.
MAX_ALERTS = 50

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
script-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<section class="report-title" aria-label="Report"><b>{title}</b>\
<span class="count">{facts}</span></section>
{verdict}
<div id="telemetry"></div>
{faults}
<script type="application/json" id="data">{data}</script>
<script type="module" src="data:text/javascript;base64,{script}"></script>
</body>
</html>
"""


def report_html(
    runs: Mapping[str, RunData], rows: Sequence[Mapping[str, Any]], faults: str = ""
) -> str:
    """Return the report of runs by name, which are compared with the first; ``faults`` is HTML.

    ``rows`` are those of the run table, in the same order.
    """
    files = read_static_files()
    title = "Telemetry: " + ", ".join(runs)
    verdict = f'<p class="verdict">{html.escape(_verdict(runs, rows))}</p>'
    answers: dict[str, Any] = {"runs": _compared(runs, rows)}
    pictures: dict[str, str] = {}
    for name, run in runs.items():
        found = {(route, name, *query): answer for route, *query, answer in _answers(run)}
        answers |= {"\n".join(key): answer for key, answer in found.items()}
        shown = chain(*(answer for (route, *_), answer in found.items() if route == "images"))
        for key, png in _pictures(run, shown, MAX_PICTURES_BYTES // len(runs)):
            pictures[f"{name}\n{key}"] = png
    packed = {key: _packed(answer) for key, answer in answers.items()}
    return _TEMPLATE.format(
        title=html.escape(title),
        facts=_facts(next(iter(runs.values()))) if len(runs) == 1 else f"{len(runs)} runs",
        style=files["style.css"].decode(),
        verdict=verdict if len(runs) > 1 else "",
        faults=faults,
        script=_base64(f"{bundle(files, 'app.js')}\nrenderReport();".encode()),
        data=_script_json({"answers": packed, "pictures": pictures}),
    )


def _facts(run: RunData) -> str:
    started, alerts = run.started_s, len(run.alerts)
    facts = [run.extent, f"{alerts or 'no'} alert{'' if alerts == 1 else 's'}"]
    if started is not None:
        facts.insert(0, f"{datetime.fromtimestamp(started, timezone.utc):%Y-%m-%d %H:%M} UTC")
    return ", ".join(facts)


def _compared(
    runs: Mapping[str, RunData], rows: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the rows, with the first difference of each later run from the first one."""
    if len(rows) == 1:
        return rows
    first, *others = [runs[row["name"]] for row in rows]
    found = ["the first run", *(_first_difference(compare(first, other)) for other in others)]
    return [{**row, "difference": text} for row, text in zip(rows, found, strict=True)]


def _verdict(runs: Mapping[str, RunData], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in sentences which run has the lowest loss, and which runs have errors."""
    losses = sorted(
        (row["loss"]["best"], row["name"])
        for row in rows
        if row["loss"] and math.isfinite(row["loss"]["best"])
    )
    sentences = []
    if len(losses) > 1:
        (least, best), (next_least, second) = losses[:2]
        sentences.append(
            f"Lowest loss: {least:.4g}, of {best}; next is {next_least:.4g}, of {second}."
            if least < next_least
            else f"The lowest loss of {best} and {second} is the same, {least:.4g}."
        )
    for name, run in runs.items():
        errors = [alert for alert in run.alerts if alert.severity == "error"]
        if errors:
            sentences.append(f"{name}: {min(errors, key=lambda alert: alert.step).title}.")
    if not any(run.alerts for run in runs.values()):
        sentences.append("No run has alerts.")
    return " ".join(sentences)


def _first_difference(found: Comparison) -> str:
    if not found.step_count or not found.layer_count:
        return "no layer or step in common"
    if not found.differences:
        return f"none in {found.step_count} steps"
    difference = found.differences[0]
    return f"step {difference.step}: {difference.statistic}{difference.where}"


def _answers(run: RunData) -> Iterator[tuple[Any, ...]]:
    """Yield route and query values, without the run, of each question, and the server's answer."""
    yield "run", payloads.overview(run)
    yield "scalars", payloads.scalars(run)
    for statistic in PAGE_STATISTICS:
        yield "matrix", statistic.name, payloads.matrix(run.matrix(statistic.name, WHOLE, LIMIT))
    for step in sorted({alert.step for alert in run.alerts})[:MAX_ALERTS]:
        yield "onsets", str(step), payloads.onsets(run, step)
    tags = run.source.tags("histograms")
    for layer in _layers_in_detail(run):
        if histogram_tags(layer, tags):
            yield "histograms", layer.name, payloads.histograms(run.source, layer)
        if images := _images(run, layer):
            yield "images", layer.name, images


def _layers_in_detail(run: RunData) -> list[Layer]:
    """Return evenly spread layers and as many with alerts, in forward order."""
    layers = run.layers
    faulty = {alert.module_name for alert in run.alerts}
    places = [place for place, layer in enumerate(layers) if layer.name in faulty]
    stride = max(1, -(-len(layers) // MAX_LAYERS_IN_DETAIL))
    shown = {*places[:MAX_LAYERS_IN_DETAIL], *range(0, len(layers), stride)}
    return [layers[place] for place in sorted(shown)]


def _images(run: RunData, layer: Layer) -> list[dict[str, Any]]:
    """Return the layer's pictures at the first, a middle and the last step."""
    found = payloads.images(run.source, layer)
    for item in found:
        steps = item["steps"]
        item["steps"] = sorted({*steps[:1], *steps[len(steps) // 2 :][:1], *steps[-1:]})
    return found


def _pictures(
    run: RunData, images: Iterable[dict[str, Any]], limit: int
) -> Iterator[tuple[str, str]]:
    """Yield tag and step of each picture, and its PNG file, until they take ``limit`` bytes."""
    room = limit
    for tag, step in dict.fromkeys((item["tag"], s) for item in images for s in item["steps"]):
        png = payloads.picture(run.source, tag, step)
        if png is not None and len(png) > room:
            run.source.problems.add("pictures", f"they take more than {limit >> 20} MiB")
        elif png is not None:
            room -= len(png)
            yield f"{tag}\n{step}", _base64(png)


def _packed(answer: Any) -> str:
    """Return the base64 of the bytes, or JSON, that the server would send, compressed."""
    content = (
        answer if isinstance(answer, bytes) else json.dumps(json_util.Cleanse(answer)).encode()
    )
    return _base64(gzip.compress(content, compresslevel=6, mtime=0))


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _script_json(content: Any) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
