"""Faults of a run: the steps, alerts and statistics around errors, loss spikes and exceptions.

A fault is an object of these fields; missing measurements are None:

``step``, ``complete``
    The optimizer step, from 0; whether the run has later steps around it, or has ended.
``batches``
    Its batches, if ``HookLogger.batch`` received ids.
``first_bad_module``
    Origin of the fault, as in ``named_modules()``; None if unknown or not in a module.
``alerts``, ``exception``
    The alerts around it; ``type``, ``message`` and ``traceback`` of the exception that ended
    training, or None.
``random``
    ``seed`` of torch's generator when recording began, and its ``states`` (base64, by device) at
    the start of ``step``, the last full step up to the fault.
``steps``
    A list for each field: ``step``, ``wall_time``, ``loss``, ``grad_norm`` (over all parameters),
    ``learning_rates`` (of each parameter group), ``loss_scale``, ``skipped``.
``modules``
    ``name``, ``type`` and ``code``, in forward order; ``code`` is that of
    :class:`telemetry.records.Module`.
``profiles``
    ``before``, ``at`` and ``after`` the fault (``when``), if these steps exist: ``step``, and a
    list over the modules for each of :data:`telemetry.layers.PAGE_STATISTICS`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.events.run_log import Alerted, End, Failure, FullStep
from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.layers.onset import Onset
from telemetry.reading.matrix import Region
from telemetry.reading.run_data import RunData
from telemetry.records.step import INPUT, is_inside

MAX_FAULTS = 8
MAX_ALERTS = 32
STEPS = 200  # with norms
STEPS_AFTER = 50
_MAX_ONSETS = 8


def faults_of(run: RunData) -> Iterator[dict[str, Any]]:
    """Yield the first eight faults; what follows within 50 steps belongs to the same one."""
    alerted, end, found = run.frames(Alerted), run.end(), list[Alerted | End]()
    faults: list[Alerted | End] = [frame for frame in alerted if frame.is_fault]
    failure = None if end is None else end.failure
    if end is not None and failure is not None:
        faults.append(replace(end, step=end.step + 1))
    for frame in faults:
        if not found or frame.step >= found[-1].step + STEPS_AFTER:
            found.append(frame)
    alerts = [frame.alert for frame in alerted]
    for fault in found[:MAX_FAULTS]:
        yield _record(run, fault, failure if fault is found[-1] else None, alerts)


def _record(
    run: RunData, fault: Alerted | End, failure: Failure | None, alerts: Sequence[Alert]
) -> dict[str, Any]:
    last, known = fault.step + STEPS_AFTER, run.steps()
    steps = known[known <= last][-STEPS:]
    region = Region(first_step=int(min(steps, default=0)), last_step=last)
    frames, layers, random = run.norms(region), run.layers, fault.random
    profiles = [*_profiles(run, fault.step, steps, region)]
    nearby = [a for a in alerts if region.first_step <= a.step <= last][:MAX_ALERTS]
    states = {} if random is None else random.states
    return {
        "complete": run.end() is not None or bool(known.size and known[-1] >= last),
        "step": fault.step,
        "batches": fault.batches,
        "first_bad_module": _first_bad(nearby, profiles, [layer.name for layer in layers]),
        "alerts": nearby,
        "exception": failure and asdict(failure),
        "random": {
            "seed": run.seed(),
            "step": None if random is None else random.step,
            "states": {name: base64.b64encode(of).decode() for name, of in states.items()},
        },
        "steps": {
            "step": [frame.step for frame in frames],
            "wall_time": [frame.time_s for frame in frames],
            "loss": [frame.loss for frame in frames],
            "grad_norm": [frame.total for frame in frames],
            "learning_rates": [frame.learning_rates for frame in frames],
            "loss_scale": [frame.loss_scale for frame in frames],
            "skipped": [frame.skipped for frame in frames],
        },
        "modules": {
            "name": [layer.name for layer in layers],
            "type": [layer.type_name for layer in layers],
            "code": [layer.code for layer in layers],
        },
        "profiles": profiles,
    }  # fmt: skip


def _profiles(
    run: RunData, step: int, steps: NDArray[np.int64], region: Region
) -> Iterator[dict[str, Any]]:
    full = run.steps(FullStep)
    full = full[(full >= region.first_step) & (full <= region.last_step)]
    at = steps[steps <= step][-1:]
    before = [*full[full <= step - STEPS_AFTER][-1:], *full[:1], *steps[:1]]
    after = [*full[full > step][-1:], *steps[steps > step][-1:]]
    earlier = [one for one in before if [one] < at]
    for when, moments in (("before", earlier), ("at", at), ("after", after)):
        for moment in map(int, moments[:1]):
            only = Region(first_step=moment, last_step=moment)
            columns = {s.name: run.matrix(s.name, only).values for s in PAGE_STATISTICS}
            nothing = [None] * len(run.layers)
            values = {name: _values(of[0]) if len(of) else nothing for name, of in columns.items()}
            yield {"when": when, "step": moment, **values}


def _values(row: NDArray[np.float32]) -> list[float | None]:
    return [None if value == MISSING else value for value in row.tolist()]


def _first_bad(
    alerts: Sequence[Alert], profiles: Sequence[dict[str, Any]], names: Sequence[str]
) -> str | None:
    """Return the module of the first error; else the first one whose output is not finite."""
    for alert in alerts:
        if alert.severity == "error" and alert.stage != "resolved" and alert.module_name:
            return alert.module_name
    at: dict[str, Any] = next((profile for profile in profiles if profile["when"] == "at"), {})
    for name, value in zip(names, at.get("activation_rms", ()), strict=bool(at)):
        if value is not None and not math.isfinite(value) and not is_inside(name, INPUT):
            return name
    return None


def earliest_onsets(run: RunData, fault: Mapping[str, Any]) -> list[Onset]:
    """Return the modules whose gradient norm left its baseline before half of all did.

    NaN counts as infinite. Steps after the fault are omitted: at the end of an explosion all
    modules are alike.
    """
    steps, names = fault["steps"]["step"], fault["modules"]["name"]
    if not steps or not names:
        return []
    found = run.onsets_by(fault["step"], steps[0]) or []
    until = [onset.step for onset in found][len(names) // 2 : len(names) // 2 + 1]
    return [onset for onset in found if [onset.step] < until or not until][:_MAX_ONSETS]
