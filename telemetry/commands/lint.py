"""``telemetry lint``: the alerts of a loss and a gradient norm that any program has logged."""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from telemetry.alert import Alert
from telemetry.alerts.configuration import DETECTORS
from telemetry.alerts.engine import Engine
from telemetry.commands.alerts import print_alerts
from telemetry.commands.output import LogDirs, as_number, report_problems
from telemetry.plain_text import closest
from telemetry.reading.sources import FileSource
from telemetry.records import Layout, Module, Parameter, StepRecord
from telemetry.records.loss import loss_among
from telemetry.tag_names import RUN
from telemetry.untrusted import MAX_JSON_BYTES, open_file

# Those that need nothing but the loss and the total gradient norm.
_KINDS = ("loss_spike", "exploding_gradient", "nonfinite", "exponential_trend")
_NORM_TAG = re.compile(
    r"(?i)^(?:(?:train(?:ing)?|total|global|metrics|run)[\W_]+)*"
    r"(?:grad(?:ient)?s?[\W_]*norm(?:[\W_]*(?:total|step))?|grad_2(?:\.0)?_norm_total)$"
)
_LAYOUT = Layout(
    modules=(Module(name="", type_name="model"),),
    parameters=(Parameter(name="all", module_name="", shape=(1,)),),
)
FORMATS = "TensorBoard directory, trainer_state.json of Transformers, or CSV file of Lightning"

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Steps and values of each tag, by ascending step."""


def lint(args: argparse.Namespace, console: Console) -> int:
    files = [path for path in args.paths if path.is_file()]
    log_dirs = LogDirs([path for path in args.paths if path not in files])
    paths, judged = [*files, *log_dirs.found], list[tuple[str, Sequence[Alert]]]()
    for path in paths:
        try:
            found = judge(read_series(path), loss=args.loss, norm=args.norm)
            judged.append((str(path), found))
        except OSError as error:
            log_dirs.fail(error)
        except ValueError as error:
            log_dirs.fail(ValueError(f"{path}: {error}"))
    fails = print_alerts(judged, args, console, name_runs=len(paths) > 1)
    return log_dirs.status or fails


def read_series(path: Path) -> Series:
    """Return the scalars of a TensorBoard directory, a ``trainer_state.json`` or a CSV file."""
    if path.is_dir():
        source = FileSource(path, plugin_names=("scalars",))
        series = source.read("scalars", [*source.tags("scalars")])
        report_problems(source.problems)
        return series
    with open_file(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"is larger than {MAX_JSON_BYTES >> 20} MiB")
    if path.suffix == ".csv":
        rows = csv.DictReader(text.decode("utf-8").splitlines())
        if "step" not in (columns := rows.fieldnames or ()) or "module_name" in columns:
            raise ValueError("is no CSV file with a column step and a row for each step")
        return _series(rows)
    try:
        state = json.loads(text)
    except ValueError:
        raise ValueError(f"is no {FORMATS}") from None
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise ValueError("has no log_history, as trainer_state.json of Transformers has")
    return _series(history)


def _series(rows: Iterable[Mapping[str, Any]]) -> Series:
    """Return the series of rows with a ``step``; the last value of a step counts."""
    values: dict[str, dict[int, float]] = {}
    for row in rows:
        step = as_number(row.get("step"))
        if step is None or not math.isfinite(step):
            continue
        for tag, value in row.items():
            if (number := as_number(value)) is not None:
                values.setdefault(tag, {})[int(step)] = number
    return {tag: sorted(of_tag.items()) for tag, of_tag in values.items()}


def judge(series: Series, *, loss: str | None = None, norm: str | None = None) -> list[Alert]:
    """Return the alerts of a logged loss and gradient norm, by tag or by their usual names.

    The windows of the detectors count logged points, whatever the interval of logging.
    """
    for option, tag in (("--loss", loss), ("--norm", norm)):
        if tag is not None and tag not in series:
            raise ValueError(f"{option} {tag}: not among the tags; {closest(tag, sorted(series))}")
    loss = loss or loss_among(tag for tag in series if not tag.startswith(RUN))
    norm = norm or min(filter(_NORM_TAG.match, series), key=len, default=None)
    losses = dict(series[loss]) if loss is not None else {}
    norms = series[norm] if norm is not None else ()
    norm_steps = [step for step, _ in norms]
    steps = [*losses] or norm_steps
    if not steps:
        raise ValueError("has neither a loss nor a gradient norm; name them: --loss, --norm")
    interval = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    engine = Engine([DETECTORS[kind]() for kind in _KINDS], interval=interval)
    last_finite = max((step for step, value in norms if math.isfinite(value)), default=-1)
    alerts: list[Alert] = []
    for step in steps:
        # A norm that was logged between two losses belongs to the later loss.
        now = norms[max(bisect_right(norm_steps, step) - 1, 0)][1] if norms else 0.0
        is_finite, value = math.isfinite(now), losses.get(step)
        # A gradient scaler skips steps whose gradients overflow: later ones are finite.
        skipped = not is_finite and step < last_finite and math.isfinite(value or 0.0)
        record = StepRecord(
            step=step,
            wall_time=0.0,
            layout=_LAYOUT,
            grad_norms=np.array([now]),
            grad_present=np.array([bool(norms)]),
            grad_finite=np.array([is_finite]),
            scalars={} if value is None else {"loss": value},
            loss_tag="loss",
            skipped=skipped,
        )
        alerts += engine(record)
    return alerts
