"""The contents of a flight file, composed of the steps that were kept.

A flight file is one JSON object. Numbers have six digits. Those that JSON does not have are the
strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` reads. Values that were not
measured are ``null``. The keys:

``format``
    :data:`FORMAT`.
``complete``
    Whether it has the steps after the fault: it is written at the fault and again after them.
``step``, ``batch``
    The optimizer step at which the fault was noticed, counted from 0. In a loop with one batch per
    step it is also the index of the batch.
``first_bad_module``
    Where the fault began, if known, as in ``named_modules()``; null if it was not in a module.
``alerts``
    The alerts before and after it so far, each with the fields of
    :class:`~telemetry.alert.Alert`.
``exception``
    ``type``, ``message`` and ``traceback`` of the exception that ended the training, or null.
``random``
    ``seed`` of torch's generator when recording began, and its ``states`` (base64) at the start of
    ``step``, the last full measurement up to the fault.
``steps``
    One list each for ``step``, ``wall_time`` (seconds since the epoch), ``loss``, ``grad_norm``
    (over all parameters), ``learning_rates`` (of each parameter group), ``loss_scale``,
    ``skipped``, ``full``.
``modules``
    ``name`` and ``type`` of the modules, in forward order; of more than 256 an evenly spaced
    selection that includes the first bad one and those whose gradient norm left its past first.
    ``left_out`` is the number of missing ones.
``grad_norms``
    ``[steps][modules]``: norm of the gradients of each module's parameters.
``profiles``
    The depth profile at up to three steps: ``when`` (``before``, ``at`` or ``after`` the fault),
    ``step``, a list over the modules for each of :data:`COLUMNS`, and ``sketches``:
    histograms by kind and name: counts, extremes and power sums, ``buckets`` and ``counts`` as
    base64 of int16 and float32; null where they would make the file too large.
"""

from __future__ import annotations

import base64
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from telemetry.alert import Alert
from telemetry.flight.snapshot import Snapshot
from telemetry.layers import STATISTICS
from telemetry.moments import COUNTS, EXTREMES, POWER_SUMS
from telemetry.movers import FEWEST_TO_SHOW, Mover, movers
from telemetry.records import Module, Output
from telemetry.sketch import Sketch
from telemetry.untrusted import MAX_TEXT

FORMAT = "telemetry-flight-1"
MAX_MODULES = 256
MAX_ALERTS = 32
MAX_MOVERS = 8
COLUMNS = tuple(statistic.name for statistic in STATISTICS)
"""The statistics of each module, as in :data:`telemetry.layers.STATISTICS`."""

_MAX_GROUPS = 16

When = Literal["before", "at", "after"]


@dataclass(kw_only=True, eq=False)
class Flight:
    """One fault, while it is being recorded.

    Attributes:
        step: When it was noticed.
        before: A full measurement well before it, if there is one, else the oldest step kept.
        at: That step, or the last recorded one before it.
        last_full: The last full measurement up to it.
        alerts: Those of the steps that are kept, and all since.
        exception: What ended the training, as :func:`describe` returns it.
    """

    step: int
    before: Snapshot | None
    at: Snapshot | None
    last_full: Snapshot | None
    alerts: list[Alert] = field(default_factory=list)
    exception: Mapping[str, str] | None = None


def describe(exception: BaseException) -> dict[str, str]:
    """An exception as text; the object itself would keep the frames of the training loop alive."""
    lines = traceback.format_exception(type(exception), exception, exception.__traceback__)
    return {
        "type": type(exception).__qualname__,
        "message": str(exception)[:MAX_TEXT],
        "traceback": "".join(lines)[-MAX_TEXT:],
    }


def compose(
    flight: Flight, steps: Sequence[Snapshot], *, seed: int | None, complete: bool
) -> dict[str, Any]:
    """The contents of a flight file, ready for JSON.

    Args:
        flight: What happened.
        steps: The latest steps, oldest first; the last one has its detail if it is a full
            measurement.
        seed: See the module's description.
        complete: Whether this is the last version of the file.
    """
    culprit = _first_bad_module(flight)
    moments = _moments(flight, steps)
    modules = steps[-1].layout.modules if steps else ()
    shown = _choose(modules, {culprit}, flight.step, steps)
    names = [module.name for module in shown]
    return {
        "format": FORMAT,
        "complete": complete,
        "step": flight.step,
        "batch": flight.step,
        "first_bad_module": culprit,
        "alerts": [_plain(alert) for alert in flight.alerts[:MAX_ALERTS]],
        "exception": flight.exception,
        "random": _random(seed, flight.last_full),
        "steps": _histories(steps),
        "modules": {
            "name": names,
            "type": [module.type_name for module in shown],
            "left_out": len(modules) - len(shown),
        },
        "grad_norms": [numbers(_grad_norms(step, names)) for step in steps],
        "profiles": [
            {"when": when, "step": moment.step, **_profile(moment, names)}
            for when, moment in moments.items()
            if moment is not None
        ],
    }


def number(value: float | None) -> float | str | None:
    """A number for JSON, to six digits."""
    if value is None:
        return None
    if value != value:
        return "NaN"
    if value in (np.inf, -np.inf):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.6g}")


def numbers(values: Iterable[float | None]) -> list[float | str | None]:
    return [number(value) for value in values]


def _moments(flight: Flight, steps: Sequence[Snapshot]) -> dict[When, Snapshot | None]:
    last = steps[-1] if steps else None
    is_after = last is not None and (flight.at is None or last.step > flight.at.step)
    return {"before": flight.before, "at": flight.at, "after": last if is_after else None}


def _first_bad_module(flight: Flight) -> str | None:
    """The module that the first error names; else the first one whose output is not finite."""
    errors = [a for a in flight.alerts if a.severity == "error" and a.stage != "end"]
    named = [a.module_name for a in errors if a.module_name is not None]
    if named:
        return named[0]
    detail = flight.at.detail if flight.at is not None else None
    outputs = detail.outputs if detail is not None else {}
    for output, sketch in outputs.items():
        # A mask holds -inf.
        if sketch.nan_count or sketch.positive_inf_count:
            return output.module_name
    return None


def first_movers(
    names: Sequence[str],
    steps: Sequence[int],
    norms: Sequence[Sequence[float | None]],
    fault_step: int,
) -> list[Mover]:
    """The modules whose gradient norm left its past first, up to a fault, before half of all did.

    Args:
        names: The modules'.
        steps: Ascending.
        norms: Of each module at each step; None where unknown. NaN counts as infinite.
        fault_step: What came later is left out: at the end of an explosion all are alike.
    """
    past = [list(row) for step, row in zip(steps, norms, strict=True) if step <= fault_step]
    if not past or not names:
        return []
    known = np.array(past, np.float64)  # None becomes NaN
    known[[[value is not None and value != value for value in row] for row in past]] = np.inf
    found = movers(names, steps[: len(past)], known, fault_step, fewest=FEWEST_TO_SHOW) or []
    until = [mover.step for mover in found][len(names) // 2 : len(names) // 2 + 1]
    return [mover for mover in found if [mover.step] < until or not until][:MAX_MOVERS]


def _choose(
    modules: Sequence[Module], always: set[str | None], fault_step: int, steps: Sequence[Snapshot]
) -> list[Module]:
    """The modules to include, in forward order."""
    if len(modules) <= MAX_MODULES:
        return list(modules)
    names = [module.name for module in modules]
    norms = [_grad_norms(step, names) for step in steps]
    moved = first_movers(names, [step.step for step in steps], norms, fault_step)
    always |= {mover.name for mover in moved}
    even = MAX_MODULES - len(always)
    chosen = {round(i) for i in np.linspace(0, len(modules) - 1, even)}
    return [m for i, m in enumerate(modules) if i in chosen or m.name in always]


def _grad_norms(step: Snapshot, names: Sequence[str]) -> list[float | None]:
    """None where a module had no gradient, or did not exist yet."""
    positions = [step.layout.position.get(name) for name in names]
    return [
        float(step.grad_norms[i]) if i is not None and step.grad_present[i] else None
        for i in positions
    ]


def _histories(steps: Sequence[Snapshot]) -> dict[str, list[Any]]:
    return {
        "step": [s.step for s in steps],
        "wall_time": [round(s.wall_time, 3) for s in steps],
        "loss": numbers(s.loss for s in steps),
        "grad_norm": numbers(s.total_grad_norm for s in steps),
        "learning_rates": [numbers(s.learning_rates[:_MAX_GROUPS]) for s in steps],
        "loss_scale": numbers(s.loss_scale for s in steps),
        "skipped": [s.skipped for s in steps],
        "full": [s.full for s in steps],
    }


def _plain(alert: Alert) -> dict[str, Any]:
    values = {"value": number(alert.value), "threshold": number(alert.threshold)}
    return {**asdict(alert), **values, "message": alert.message[:MAX_TEXT]}


def _random(seed: int | None, step: Snapshot | None) -> dict[str, Any]:
    states = step.detail.random_states if step is not None and step.detail is not None else {}
    return {
        "seed": seed,
        "step": step.step if step is not None and states else None,
        "states": {name: base64.b64encode(state).decode() for name, state in states.items()},
    }


def _profile(step: Snapshot, names: Sequence[str]) -> dict[str, Any]:
    """A list for each statistic; for steps that are not full only the gradient norm is known."""
    columns: dict[str, Sequence[float | None]] = dict.fromkeys(COLUMNS, [None] * len(names))
    columns["grad_norm"] = _grad_norms(step, names)
    if step.detail is not None:
        layers = step.detail.layers
        rows = [step.layout.position.get(name) for name in names]
        for name in COLUMNS:
            columns[name] = [None if row is None else layers.value(row, name) for row in rows]
    plain = {name: numbers(column) for name, column in columns.items()}
    return {**plain, "sketches": _sketches(step, set(names))}


def _sketches(step: Snapshot, names: set[str]) -> dict[str, dict[str, Any]]:
    detail = step.detail
    if detail is None:
        return {}
    owner = {p.name: p.module_name for p in step.layout.parameters}

    def of_outputs(tensors: Mapping[Output, Sketch]) -> dict[str, Any]:
        # First outputs last: a module that is called rnn[1] keeps that name from rnn's second.
        ordered = sorted(tensors, key=lambda output: -output.place)
        shown = [output for output in ordered if output.module_name in names]
        return {str(output): encode_sketch(tensors[output]) for output in shown}

    def of_parameters(tensors: Mapping[str, Sketch]) -> dict[str, Any]:
        return {n: encode_sketch(s) for n, s in tensors.items() if owner.get(n) in names}

    return {
        "activations": of_outputs(detail.outputs),
        "activation_grads": of_outputs(detail.output_grads),
        "grads": of_parameters(detail.grads),
        "weights": of_parameters(detail.weights),
    }


def encode_sketch(sketch: Sketch) -> dict[str, Any]:
    figures = {name: getattr(sketch, name) for name in (*EXTREMES, *POWER_SUMS)}
    return {
        **{name: getattr(sketch, name) for name in COUNTS},
        **{name: float(v) if np.isfinite(v) else None for name, v in figures.items()},
        "buckets": base64.b64encode(sketch.buckets.astype("<i2").tobytes()).decode(),
        "counts": base64.b64encode(sketch.counts.astype("<f4").tobytes()).decode(),
    }
