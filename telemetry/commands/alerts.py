"""``telemetry help``, ``alerts``, ``batches``, ``lint``: kinds of alerts, and alerts of runs."""

from __future__ import annotations

import argparse
import csv
import inspect
import json
import math
import re
import textwrap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from telemetry.alert import Alert
from telemetry.alerts.configuration import DETECTORS, KINDS, closest
from telemetry.alerts.detector import Detector
from telemetry.alerts.engine import Engine
from telemetry.commands.output import LogDirs, as_number, print_records, report_problems
from telemetry.plain_text import printable
from telemetry.reading.sources import FileSource
from telemetry.records import Layout, Module, Parameter, StepRecord
from telemetry.records.loss import loss_among
from telemetry.tag_names import RUN
from telemetry.untrusted import MAX_JSON_BYTES, open_file

_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Documentation of one kind of alert for users."""

    kind: str
    severity: str
    summary: str
    sections: Mapping[str, str]  # texts of Evidence, Causes, Remedies and Silent
    example: str  # code that produces the alert; may be empty
    parameters: Mapping[str, tuple[float, str]]  # default and meaning
    causes: tuple[str, ...]  # kinds, and a jump of the learning rate, that may be the root cause


def meaning_of(detector: type[Detector]) -> Meaning:
    """Return the first paragraph of a detector's docstring and the fields after it."""
    summary, fields, *_ = [*inspect.cleandoc(detector.__doc__ or "").split("\n\n"), ""]
    texts = dict(re.findall(r"^(\w+):(.*(?:\n +.*)*)", fields, re.MULTILINE))
    example, args = texts.pop("Example", ""), texts.pop("Args", "")
    meanings = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", args, re.MULTILINE))
    jump = ["a jump of the learning rate"] * detector.explained_by_rate_jump
    return Meaning(
        kind=detector.kind,
        severity=detector.severity,
        summary=_one_line(summary),
        sections={name: _one_line(text) for name, text in texts.items()},
        example=textwrap.dedent(example.removeprefix("\n")).strip(),
        parameters={
            name: (getattr(detector, name), _one_line(meanings.get(name, "")))
            for name in detector.limits()
        },
        causes=(*sorted(detector.explained_by), *jump),
    )


def help_line(kinds: Iterable[str]) -> str | None:
    """Return the line that names the help of the first known kind; None if no kind is known."""
    known = next((kind for kind in kinds if kind in KINDS), None)
    return known and f"telemetry help {known} explains it"


def print_help(args: argparse.Namespace, console: Console) -> int:
    if args.kind is None:
        for kind, detector in KINDS.items():
            first = re.split(r"(?<=[.:]) ", meaning_of(detector).summary)[0].rstrip(":.")
            line = f"{kind:<21} {detector.severity:<8} {_plain(first)}"
            console.print(line, overflow="ellipsis", no_wrap=True, soft_wrap=False)
        return 0
    if args.kind not in KINDS:
        raise ValueError(f"no alert has the name {args.kind!r}; {closest(args.kind, KINDS)}")
    for line in _text(meaning_of(KINDS[args.kind]), min(console.width, _WIDTH)):
        console.print(line)
    return 0


def _text(meaning: Meaning, width: int) -> Iterator[str]:
    yield f"{meaning.kind} ({meaning.severity})"
    yield from textwrap.wrap(_plain(meaning.summary), width)
    yield ""
    for name, text in meaning.sections.items():
        yield from _wrapped(f"{name}: {text}", width)
    if meaning.causes:
        yield from _wrapped(f"May follow from: {', '.join(meaning.causes)}.", width)
    if meaning.example:
        yield from ["", "Example:", *textwrap.indent(meaning.example, "    ").splitlines()]
    if meaning.parameters:
        yield from ["", f"Parameters, for HookLogger(alerts={{{meaning.kind!r}: {{...}}}}):"]
        for name, (default, text) in meaning.parameters.items():
            yield from _wrapped(f"{name} = {default:g}: {text}", width)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(_plain(text), width, subsequent_indent="  ", break_long_words=False)


def _plain(text: str) -> str:
    return text.replace("``", "")


def _one_line(text: str) -> str:
    return " ".join(text.split())


# Severities that make the command fail, by the choice of ``--fail-on``.
FAIL_ON = {"warning": {"warning", "error"}, "error": {"error"}, "never": set[str]()}
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_RECORD = (
    "run", "step", "severity", "kind", "module_name", "stage", "value", "threshold", "summary",
    "cause", "advice", "location", "consequences", "observed_in", "batches",
)  # fmt: skip
_BATCH = ("run", "kind", "severity", "step", "rank", "ids")


def alerts(args: argparse.Namespace, console: Console) -> int:
    runs = LogDirs(args.runs)
    of_runs = [(str(log_dir), run.overview().alerts) for log_dir, run in runs.opened()]
    fails = print_alerts(of_runs, args, console, name_runs=len(runs.found) > 1)
    return runs.status or fails


def batches(args: argparse.Namespace, console: Console) -> int:
    runs = LogDirs(args.runs)
    records = {  # an alert that escalates blames them again
        (log_dir, alert.kind, batch): {
            "run": str(log_dir),
            "kind": alert.kind,
            "severity": alert.severity,
            **vars(batch),
        }
        for log_dir, run in runs.opened()
        for alert in run.overview().alerts
        for batch in alert.batches
    }
    print_records("json", _BATCH, records.values())
    return runs.status


def print_alerts(
    runs: Sequence[tuple[str, Sequence[Alert]]],
    args: argparse.Namespace,
    console: Console,
    *,
    name_runs: bool,
) -> bool:
    """Print the alerts of each run; return whether one of them counts for ``--fail-on``."""
    kinds: list[str] = []
    found = {a.severity for _, of_run in runs for a in of_run if a.stage != "resolved"}
    if args.form:
        records = ({"run": run, **vars(alert)} for run, of_run in runs for alert in of_run)
        print_records(args.form, _RECORD, records)
    else:
        for run, of_run in runs:
            head = f"{printable(run)}: " if name_runs else ""
            if not of_run:
                console.print(f"{head}no alerts")
            for alert in of_run:
                _print_alert(head, alert, console)
                kinds.append(alert.kind)
        if (line := help_line(kinds)) is not None:
            console.print(line)
    return bool(found & FAIL_ON[args.fail_on])


def _print_alert(head: str, alert: Alert, console: Console) -> None:
    stage = {"escalated": ", escalated", "resolved": ", resolved"}.get(alert.stage, "")
    line = Text(f"{head}step {alert.step}: ")
    line.append(alert.severity, style=_STYLES[alert.severity])
    line.append(printable(f" {alert.kind}{stage}") + alert.where)
    console.print(line)
    for text in alert.message.splitlines():
        console.print(f"  {printable(text)}")


# Those that need nothing but the loss and the total gradient norm.
_KINDS = ("loss_spike", "exploding_gradient", "nonfinite", "exponential_trend", "loss_burst")
_NORM_TAG = re.compile(
    r"(?i)^(?:(?:train(?:ing)?|total|global|metrics|run)[\W_]+)*"
    r"(?:grad(?:ient)?s?[\W_]*norm(?:[\W_]*(?:total|step))?|grad_2(?:\.0)?_norm_total)$"
)
_LAYOUT = Layout(
    modules=(Module(name="", type_name="model"),),
    parameters=(Parameter(name="all", module_name="", shape=(1,)),),
)

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
        source = FileSource(path, lambda plugin_name, tag: plugin_name == "scalars")
        report_problems(source.problems)
        return source.read("scalars", [*source.tags("scalars")])
    with open_file(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"is larger than {MAX_JSON_BYTES >> 20} MiB")
    if path.suffix == ".csv":
        return _series(csv.DictReader(text.decode("utf-8").splitlines()))
    state = json.loads(text)
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
            raise ValueError(f"{option} {tag}: not among the tags: {', '.join(sorted(series))}")
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
