"""Rows of the run table: status, loss, worst alert, hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from telemetry.alert import Alert
from telemetry.events.run_log import End
from telemetry.reading.builtin_tags import metrics_among
from telemetry.reading.run_data import RunData
from telemetry.records.loss import loss_among

# A live run writes every few seconds, but it may pause to validate.
_SILENT_S = 300.0
_SILENT_STEPS = 50
_MAX_HPARAMS = 1000
_MAX_TEXT = 200


def row_of(run: RunData, name: str, now_s: float) -> dict[str, Any]:
    """Return the row of a run; times are in seconds since the epoch."""
    written_s, started_s, last_step = run.written_s, run.started_s or 0.0, run.last_step or 0
    curves = run.logged()
    loss = run.loss_tag() or loss_among(curves)
    losses = [value for _, value in curves.get(loss or "", ())]
    hparams = sorted(run.hyperparameters().items())[:_MAX_HPARAMS]
    began = max([run.first_step, *run.resumed])
    step_s = max(0.0, written_s - started_s) / max(1, last_step - began)
    return {
        "name": name,
        "status": _status(run.end(), now_s - written_s, step_s),
        "lastStep": last_step,
        "started": started_s,
        "written": written_s,
        "loss": loss_summary(loss, losses) if loss and losses else None,
        **_worst_alert(run.alerts),
        "hparams": {key[:_MAX_TEXT]: _shortened(value) for key, value in hparams},
        "metrics": {tag: curves[tag][-1][1] for tag in metrics_among(curves, loss)},
    }


def _status(end: End | None, silent_s: float, step_s: float) -> str:
    """Return ``live``, ``ended`` or ``died``; a silent run that was not closed has died."""
    if end is not None:
        return "ended" if end.failure is None else "died"
    return "live" if silent_s <= max(_SILENT_S, _SILENT_STEPS * step_s) else "died"


def _shortened(value: str | float | bool) -> str | float | bool:
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def loss_summary(tag: str, data: Sequence[float]) -> dict[str, Any]:
    """Return tag, last value, and the smallest mean of successive ones; NaN without one.

    A mean is over a fiftieth of the finite values, at least one: the best batch is luck.
    """
    values = np.array(data, np.float64)
    finite = values[np.isfinite(values)]
    count = max(1, len(finite) // 50)
    means = np.convolve(finite, np.full(count, 1 / count), "valid") if finite.size else finite
    return {
        "tag": tag,
        "last": float(values[-1]) if values.size else math.nan,
        "best": float(means.min()) if means.size else math.nan,
    }


def _worst_alert(alerts: Iterable[Alert]) -> dict[str, Any]:
    """Return the number of faults above a note, and the worst fault.

    That is the first of the highest severity that it reached, and preferably one that has not
    resolved; ``resolved`` says whether it has.
    """
    faults: list[dict[str, Any]] = []
    active: dict[str, dict[str, Any]] = {}  # by kind
    names = ("kind", "severity", "step", "module_name")
    for alert in alerts:
        if alert.stage == "started":
            active[alert.kind] = {name: getattr(alert, name) for name in names} | {
                "resolved": False
            }
            faults.append(active[alert.kind])
        elif alert.stage == "resolved":
            active.pop(alert.kind, {})["resolved"] = True
        elif alert.kind in active:
            active[alert.kind]["severity"] = alert.severity
    rank = ("error", "warning", "note").index
    worst = min(
        faults, key=lambda fault: (rank(fault["severity"]), fault["resolved"]), default=None
    )
    return {"alertCount": sum(fault["severity"] != "note" for fault in faults), "alert": worst}
