"""A run as one HTML file: the Telemetry page with its data inside."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import Any

from telemetry.layers import PAGE_STATISTICS
from telemetry.reading import payloads
from telemetry.reading.builtin_tags import histogram_tags
from telemetry.reading.matrix import thin
from telemetry.reading.run_data import Overview, RunData
from telemetry.reading.sessions import Layer
from telemetry.tensorboard_plugin.static_files import bundle, read_static_files

MAX_ROWS = 1000
MAX_CELLS = 250_000

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
<div id="telemetry"></div>
{faults}
<script type="application/json" id="data">{data}</script>
<script type="module" src="data:text/javascript;base64,{script}"></script>
</body>
</html>
"""


def report_html(name: str, run: RunData, hparams: bytes | None, faults: str = "") -> str:
    """Return the report of a run; ``faults`` is HTML for its end.

    In large runs, each cell is the largest of several.
    """
    overview = run.overview()
    files = read_static_files()
    alerts = len(overview.alerts)
    facts = [overview.extent, f"{alerts or 'no'} alert{'' if alerts == 1 else 's'}"]
    if overview.started_s is not None:
        started = datetime.fromtimestamp(overview.started_s, timezone.utc)
        facts.insert(0, f"{started:%Y-%m-%d %H:%M} UTC")
    return _TEMPLATE.format(
        title=html.escape(f"Telemetry: {name}"),
        facts=", ".join(facts),
        style=files["style.css"].decode(),
        faults=faults,
        script=_base64(f"{bundle(files, 'report_page.js')}\nrender();".encode()),
        data=_script_json(_data(name, run, overview, hparams)),
    )


def _data(name: str, run: RunData, overview: Overview, hparams: bytes | None) -> dict[str, Any]:
    matrices = {}
    for statistic in PAGE_STATISTICS:
        matrix = thin(run.matrix(statistic.name), max_layers=MAX_ROWS, max_cells=MAX_CELLS)
        matrices[statistic.name] = _packed(payloads.matrix(matrix))
    layers = _layers_in_detail(overview)
    images = {layer.name: _images(run, layer) for layer in layers}
    tags = run.source.tags("histograms")
    steps = sorted({alert.step for alert in overview.alerts})[:MAX_ALERTS]
    return {
        "run": name,
        "overview": payloads.overview(overview, hparams, run.source),
        "onsets": {step: payloads.onsets(run, step) for step in steps},
        "matrices": matrices,
        "scalars": _packed(payloads.scalars(run.source)),
        "histograms": {
            layer.name: _packed(payloads.histograms(run.source, layer))
            for layer in layers
            if histogram_tags(layer, tags)
        },
        "images": {layer: found for layer, found in images.items() if found},
        "pictures": dict(_pictures(run, [item for found in images.values() for item in found])),
    }


def _layers_in_detail(overview: Overview) -> list[Layer]:
    """Return evenly spread layers and as many with alerts, in forward order."""
    layers = overview.layers
    faulty = {alert.module_name for alert in overview.alerts}
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


def _pictures(run: RunData, images: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    room = MAX_PICTURES_BYTES
    for tag, step in dict.fromkeys((item["tag"], s) for item in images for s in item["steps"]):
        png = payloads.picture(run.source, tag, step)
        if png is not None and len(png) > room:
            limit = MAX_PICTURES_BYTES >> 20
            run.source.problems.add("pictures", f"they take more than {limit} MiB")
        elif png is not None:
            room -= len(png)
            yield f"{tag} {step}", _base64(png)


def _packed(content: bytes) -> str:
    return _base64(gzip.compress(content, compresslevel=6, mtime=0))


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _script_json(content: Any) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
