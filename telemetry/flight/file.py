"""Flight files: format, encoding and reading.

A flight file is one JSON object. NaN and infinities are ``"nan"``, ``"inf"`` and ``"-inf"``, which
``float()`` reads; missing measurements are ``null``. The keys:

``step``, ``batch``, ``complete``
    The optimizer step of the fault, from 0, which is also the index of the batch in a loop with one
    batch per step. Whether the file contains the steps after it.
``batches``
    ``step``, ``rank`` and ``ids`` of its batches, if ``HookLogger.batch`` received ids.
``first_bad_module``
    Origin of the fault, as in ``named_modules()``; null if unknown or not in a module.
``alerts``, ``exception``
    The alerts around it, as in ``alerts.jsonl``; ``type``, ``message`` and ``traceback`` of the
    exception that ended training, or null.
``random``
    ``seed`` of torch's generator when recording began, and its ``states`` (base64, by device) at
    the start of ``step``, the last full measurement up to the fault.
``steps``
    A list for each field: ``step``, ``wall_time``, ``loss``, ``grad_norm`` (over all parameters),
    ``learning_rates`` (of each parameter group), ``loss_scale``, ``skipped``, ``full``.
``modules``
    ``name``, ``type`` and ``code``, in forward order; of more than 256 an evenly spaced selection
    with the first bad one and those that changed first. ``left_out`` is the number of the others.
    ``code`` is that of :class:`telemetry.records.Module`.
``grad_norms``
    ``[steps][modules]``: norm of the gradients of each module's own parameters.
``profiles``
    ``before``, ``at`` and ``after`` the fault (``when``), if these steps exist: ``step``, and a
    list over the modules for each of :data:`telemetry.layers.STATISTICS`; without a full step all
    but ``grad_norm`` are null.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry import untrusted
from telemetry.alert import Alert
from telemetry.layers import STATISTICS, LayerTable
from telemetry.layers.onset import FEWEST_TO_SHOW, Onset, onsets
from telemetry.plain_text import json_plain
from telemetry.records import Layout, StepRecord
from telemetry.records.batches import Batch
from telemetry.records.tensor import bad_among

FORMAT = "telemetry-flight-1"
MAX_ALERTS = 32
MAX_MODULES = 256
# Lists of ``steps``, by the attribute of a record.
_FACTS = {
    "step": "step", "wall_time": "wall_time", "loss": "loss", "total_grad_norm": "grad_norm",
    "learning_rates": "learning_rates", "loss_scale": "loss_scale", "skipped": "skipped",
    "full": "full",
}  # fmt: skip
_facts_of = attrgetter(*_FACTS)
_MAX_GROUPS = 16
_MAX_ONSETS = 8
_STEP_BYTES = 1000  # without its arrays
_COLUMNS = tuple([statistic.name for statistic in STATISTICS])
_NAME = re.compile(r"flight-([0-9]+)\.json")


class KeptStep(NamedTuple):
    """One step, from which the fields of a file are derived when it is written."""

    step: int
    full: bool
    facts: tuple[Any, ...]  # of each list of ``steps``
    layout: Layout
    grad_present: NDArray[np.bool_]
    module_grad_norms: NDArray[np.float64]
    nonfinite_module: str | None  # the first with NaN or infinity in its output, if measured
    table: LayerTable | None = None  # of a full step
    random_states: Mapping[str, bytes] | None = None  # of a full step

    @staticmethod
    def of(record: StepRecord) -> KeptStep:
        """Return a step without the table of a full one."""
        bad = (output.module_name for output in bad_among(record.outputs))
        return KeptStep(
            step=record.step,
            full=record.full,
            facts=_facts_of(record),
            layout=record.layout,
            grad_present=record.grad_present,
            module_grad_norms=record.module_grad_norms,
            nonfinite_module=next(bad, None),
        )

    @property
    def nbytes(self) -> int:
        nbytes = _STEP_BYTES + self.grad_present.nbytes + self.module_grad_norms.nbytes
        if self.table is not None:
            nbytes += self.table.values.nbytes + self.table.known.nbytes
            nbytes += sum(map(len, (self.random_states or {}).values()))
        return nbytes

    def norms_of(self, names: Sequence[str]) -> list[float | None]:
        """Return the gradient norms of modules; None for no gradient, or no module yet."""
        norms: list[float | None] = [None] * len(self.layout.modules)
        for place in self.layout.owners[self.grad_present].tolist():
            norms[place] = float(self.module_grad_norms[place])
        places = [self.layout.position.get(name) for name in names]
        return [None if place is None else norms[place] for place in places]

    def profile(self, names: Sequence[str]) -> dict[str, list[float | None] | None]:
        """Return all statistics, each a list over modules; None if it was not measured."""
        table = self.table
        if table is None:
            return dict.fromkeys(_COLUMNS) | {"grad_norm": self.norms_of(names)}
        rows = [self.layout.position.get(name) for name in names]
        return {
            column: [None if row is None else table.value(row, column) for row in rows]
            for column in _COLUMNS
        }


@dataclass(kw_only=True, eq=False)
class Fault:
    step: int
    before: KeptStep | None  # a full step well before it if there is one, else the oldest step
    at: KeptStep | None  # that step, or the last recorded one before it
    last_full: KeptStep | None  # the last full step up to it
    alerts: list[Alert]  # of the kept steps, and all since
    batches: tuple[Batch, ...] = ()  # of that step, with their ids
    exception: Mapping[str, str] | None = None  # that ended training, as in the file

    @property
    def first_bad_module(self) -> str | None:
        """The module of the first error; else the first one whose output is not finite."""
        for alert in self.alerts:
            if (
                alert.severity == "error"
                and alert.stage != "resolved"
                and alert.module_name is not None
            ):
                return alert.module_name
        return self.at.nonfinite_module if self.at is not None else None


def encode_flight(
    fault: Fault,
    steps: Sequence[KeptStep],
    latest: KeptStep | None,
    *,
    seed: int | None,
    complete: bool,
) -> bytes:
    """Return the bytes of a flight file; ``latest`` is the last of the steps, with its table.

    Steps are oldest first. ``complete``: this is the last version of the file.
    """
    modules = steps[-1].layout.modules if steps else ()
    names, culprit = [module.name for module in modules], fault.first_bad_module
    norms = [step.norms_of(names) for step in steps]
    rows = list(range(len(names)))
    if len(rows) > MAX_MODULES:
        moved = earliest_onsets(names, [step.step for step in steps], norms, fault.step)
        always = {culprit, *(onset.name for onset in moved)}
        even = set(np.linspace(0, len(rows) - 1, MAX_MODULES - len(always)).round().astype(int))
        rows = [row for row in rows if row in even or names[row] in always]
    shown = [names[row] for row in rows]
    at, full = fault.at, fault.last_full
    after = latest if latest is not None and (at is None or latest.step > at.step) else None
    states = (full.random_states if full is not None else None) or {}
    columns = enumerate(_FACTS.values())
    facts: dict[str, list[Any]] = {fact: [s.facts[at] for s in steps] for at, fact in columns}
    facts["wall_time"] = [round(wall_time, 3) for wall_time in facts["wall_time"]]
    facts["learning_rates"] = [rates[:_MAX_GROUPS] for rates in facts["learning_rates"]]
    moments = {"before": fault.before, "at": at, "after": after}
    contents = {
        "format": FORMAT,
        "complete": complete,
        "step": fault.step,
        "batch": fault.step,
        "batches": fault.batches,
        "first_bad_module": culprit,
        "alerts": fault.alerts[:MAX_ALERTS],
        "exception": fault.exception,
        "random": {
            "seed": seed,
            "step": full.step if full is not None and states else None,
            "states": {name: base64.b64encode(state).decode() for name, state in states.items()},
        },
        "steps": facts,
        "modules": {
            "name": shown,
            "type": [modules[row].type_name for row in rows],
            "code": [modules[row].code for row in rows],
            "left_out": len(names) - len(rows),
        },
        "grad_norms": [[of_step[row] for row in rows] for of_step in norms],
        "profiles": [
            {"when": when, "step": step.step, **step.profile(shown)}
            for when, step in moments.items()
            if step is not None
        ],
    }
    return json.dumps(json_plain(contents), allow_nan=False, separators=(",", ":")).encode("ascii")


def earliest_onsets(
    names: Sequence[str],
    steps: Sequence[int],
    norms: Sequence[Sequence[float | None]],
    fault_step: int,
) -> list[Onset]:
    """Return the modules whose gradient norm left its baseline before half of all did.

    ``norms`` holds each module's norm at each step, None if unknown; NaN counts as infinite. Steps
    after the fault are omitted: at the end of an explosion all modules are alike.
    """
    if not names:
        return []
    past = [
        [math.inf if norm is not None and norm != norm else norm for norm in row]
        for step, row in zip(steps, norms, strict=True)
        if step <= fault_step
    ]
    known = np.array(past, np.float64)  # None becomes NaN
    found = onsets(names, steps[: len(past)], known, fault_step, fewest=FEWEST_TO_SHOW) or []
    until = [onset.step for onset in found][len(names) // 2 : len(names) // 2 + 1]
    return [onset for onset in found if [onset.step] < until or not until][:_MAX_ONSETS]


# --- reading -----------------------------------------------------------------------------------


def flight_files(run: str | os.PathLike[str]) -> list[Path]:
    """Return the flight files in a log directory, in the order of their steps."""
    found = {path: _NAME.fullmatch(path.name) for path in Path(run).glob("flight-*.json")}
    steps = {path: int(parts[1]) for path, parts in found.items() if parts}
    return sorted(steps, key=lambda path: steps[path])


def read_flight(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of a flight file, which may be damaged or forged.

    They are the keys of the module's description except ``format`` and random states; of ``steps``
    the printed fields. Alerts and batches are objects, and profiles have all statistics, None for
    one that was not measured.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a flight file, or of an unknown version, or a field is missing or has
            a wrong value; the message names it.
    """
    name = os.fspath(path)
    try:
        with untrusted.open_file(path) as file:
            # One byte more than it may have shows whether it is too large.
            contents = untrusted.parse_json(file.read(untrusted.MAX_JSON_BYTES + 1))
        found = _FORMAT(contents)["format"]
    except ValueError as error:
        raise ValueError(
            f"{name}: not a flight file: {error}; give a flight-<step>.json, "
            "or the directory of a run"
        ) from None
    if found != FORMAT:
        raise ValueError(f"{name}: has the format {found[:100]!r}, not {FORMAT!r}")
    try:
        return _checked(contents)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


_NAMES = untrusted.Most(MAX_MODULES, untrusted.name)
_FORMAT = untrusted.check_of({"format": str})
_FLIGHT = untrusted.check_of(
    {
        "complete": bool,
        "step": int,
        "batch": int,
        "batches": tuple[Batch, ...],
        "first_bad_module": str | None,
        "alerts": untrusted.Most(MAX_ALERTS, Alert),
        "exception": untrusted.optional({"type": str, "message": str, "traceback": str}),
        "random": {"seed": untrusted.optional(untrusted.seed), "step": int | None},
        "steps": {
            "step": [int],
            "loss": [float | None],
            "grad_norm": [float | None],
            "learning_rates": [[float | None]],
        },
        "modules": {"name": _NAMES, "type": _NAMES, "code": _NAMES, "left_out": int},
        "grad_norms": [[float | None]],
        "profiles": untrusted.Most(
            3,
            {
                "when": str,
                "step": int,
                **dict.fromkeys(_COLUMNS, untrusted.optional([float | None])),
            },
        ),
    }
)


def _checked(contents: Any) -> dict[str, Any]:
    flight: dict[str, Any] = _FLIGHT(contents)
    names, profiles = flight["modules"]["name"], flight["profiles"]
    for profile, column in itertools.product(profiles, _COLUMNS):
        profile[column] = profile[column] or [None] * len(names)
    if len({len(column) for column in (*flight["steps"].values(), flight["grad_norms"])}) > 1:
        raise ValueError("steps: the lists and grad_norms differ in length")
    lists = {
        "modules": [flight["modules"]["type"], flight["modules"]["code"]],
        "grad_norms": flight["grad_norms"],
        "profiles": [profile[column] for profile in profiles for column in _COLUMNS],
    }
    for place, columns in lists.items():
        if any(len(column) != len(names) for column in columns):
            raise ValueError(f"{place}: a list is not as long as the list of names")
    return flight
