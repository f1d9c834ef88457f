"""What this version reads from runs of any version, in a few figures: see test_earlier_versions.py.

What it leaves out it has to tell, in a line that is among the figures.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from client import Client

from telemetry.commands.cli import main
from telemetry.reading.files import FileSource
from telemetry.reading.run import read
from telemetry.reading.run_data import RunData

ALERT = ("kind", "severity", "step", "module_name", "stage", "value", "threshold", "consequences")


def figures(log_dir: Path, client: Client) -> dict[str, Any]:
    """Of one run, by what reads it.

    Args:
        log_dir: Its directory.
        client: TensorBoard, opened on the directory above.
    """
    told: list[str] = []
    return {
        "alerts": [[a[k] for k in ALERT] for a in records("alerts", log_dir, told=told)],
        "summary": [_summary(row) for row in records("summary", log_dir, told=told)],
        "explain": [_flight(flight) for flight in records("explain", log_dir, told=told)],
        "explain_lines": _headlines(command("explain", log_dir, told=told)),
        "export": _export(command("export", log_dir, told=told)),
        "report": _report(log_dir, told),
        "read": _read(log_dir),
        "files": sorted(path.name for path in log_dir.iterdir()),
        "page": _page(client, log_dir.name),
        "told": told,
    }


def differences(folder: Path) -> list[list[Any]]:
    """Between the two runs of a folder."""
    found = records("diff", folder / "alone", folder / "merged", told=[])
    return [[item["statistic"], item["step"], item["module_name"]] for item in found]


def as_json(expected: dict[str, dict[str, Any]]) -> str:
    """A line for each reader of each run."""
    runs = (
        ",\n".join(f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in run.items())
        for run in expected.values()
    )
    parts = [f" {json.dumps(k)}: {{\n{v}\n }}" for k, v in zip(expected, runs, strict=True)]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def command(*arguments: object, told: list[str]) -> str:
    """What a command prints; each line of stderr is added to what it told."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    told += err.getvalue().splitlines()
    assert status in (0, 1), told
    return out.getvalue()


def records(*arguments: object, told: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(command(*arguments, "--json", told=told))
    return found


def total(values: Iterable[Any]) -> list[Any]:
    """How many there are, how many of them are finite, and the sum of those."""
    numbers = [float(value) for value in values]
    finite = [number for number in numbers if math.isfinite(number)]
    return [len(numbers), len(finite), float(f"{math.fsum(finite):.6g}")]


def _summary(row: dict[str, Any]) -> list[Any]:
    return [row["module_name"], row["type_name"], *total([row["last"]])]


def _flight(flight: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": flight["step"],
        "complete": flight["complete"],
        "first_bad_module": flight["first_bad_module"],
        "alerts": [alert["kind"] for alert in flight["alerts"]],
        "modules": {name: flight["modules"][name] for name in ("name", "type", "left_out")},
        "losses": total(loss for loss in flight["steps"]["loss"] if loss is not None),
        "profiles": [
            [profile["when"], profile["step"], *total(filter(None, profile["grad_norm"]))]
            for profile in flight["profiles"]
        ],
        "random_step": flight["random"]["step"],
    }


def _headlines(text: str) -> list[str]:
    return re.findall("^Something went wrong at step .*$", text, re.MULTILINE)


def _export(text: str) -> dict[str, Any]:
    rows = list(csv.DictReader(io.StringIO(text)))
    columns = [name for name in rows[0] if name not in ("run", "step", "module_name", "type_name")]
    return {
        "layers": sorted({row["module_name"] for row in rows}),
        "steps": total({row["step"] for row in rows}),
        **{name: total(row[name] for row in rows if row[name] != "") for name in columns},
    }


def _report(log_dir: Path, told: list[str]) -> dict[str, Any]:
    path = log_dir.with_suffix(".new.html")
    command("report", log_dir, "-o", path, told=told)
    text = path.read_text(encoding="utf-8")
    path.unlink()
    return {**shown_in_report(text), "script": "javascript;base64," in text}


def shown_in_report(text: str) -> dict[str, Any]:
    """The figures that a report holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    return {
        "layers": [layer["name"] for layer in data["overview"]["layers"]],
        "steps": [data["overview"]["firstStep"], data["overview"]["lastStep"]],
        "alerts": [[alert[k] for k in ("kind", "step")] for alert in data["overview"]["alerts"]],
        "matrices": sorted(data["matrices"]),
        "histograms": sorted(data["histograms"]),
        # The input was not beside them first.
        "pictures": sorted(key for key in data["pictures"] if "/input " not in key),
        "faults": _headlines(text),
    }


def _read(log_dir: Path) -> dict[str, Any]:
    run = read(log_dir)
    scalars = run.scalars
    values: dict[str, list[float]] = {}
    for tag, value in zip(scalars["tag"], scalars["value"], strict=True):
        values.setdefault(str(tag), []).append(value)
    times = {tag for tag in values if "time" in tag or "wait" in tag}
    histograms = {tag: run.histogram(tag) for tag in run.histogram_tags}
    return {
        "scalars": {tag: total(values[tag]) for tag in sorted(values) if tag not in times},
        "histograms": {
            tag: [sorted(tables), *total([sum(t[:, 2].sum() for t in tables.values())])]
            for tag, tables in sorted(histograms.items())
        },
        "pictures": sorted(FileSource(log_dir).tags("images")),
        "sessions": RunData(FileSource(log_dir)).overview().session_count,
        "problems": list(run.problems),
    }


def _page(client: Client, name: str) -> dict[str, Any]:
    run = client.json("run", run=name)
    [row] = [row for row in client.json("run_table") if row["name"] == name]
    layer = run["layers"][0]["name"]
    last = run["lastStep"]
    statistics = [statistic["name"] for statistic in run["statistics"]]
    matrices = {
        statistic: client.arrays("matrix", run=name, statistic=statistic)[1]
        for statistic in statistics
    }
    curves, _ = client.arrays("layer", run=name, layer=layer)
    histograms, _ = client.arrays("histograms", run=name, layer=layer)
    images = client.json("images", run=name, layer=layer)
    images = [item for item in images if item["kind"] != "input"]  # which was not beside them first
    return {
        "run": [row["loss"], row["hparams"], row["alertCount"], last],
        "layers": [[item["name"], item["type"], item["parameters"]] for item in run["layers"]],
        "statistics": {
            statistic: total(np.concatenate([part.ravel() for part in arrays.values()]))
            for statistic, arrays in matrices.items()
        },
        "movers": client.json("movers", run=name, step=last)["layers"],
        "layer": sorted(curves["arrays"]),
        "histograms": sorted(histograms["arrays"]),
        "images": images,
        "pictures": [
            len(client.ask("image", {"run": name, "tag": item["tag"], "step": step}).data)
            for item in images
            for step in item["steps"][:2]
        ],
    }
