"""Detector: one kind of alert, its finding in one step, and its stages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from telemetry.alert import Alert, Severity
from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline
from telemetry.alerts.state import LIMIT, restore, to_plain
from telemetry.plain_text import steps_in_words
from telemetry.records import StepRecord
from telemetry.records.batches import Batch
from telemetry.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault that a detector finds in one step.

    Fields that :class:`Alert` has, too, mean the same there.
    """

    summary: str
    value: float
    threshold: float = 0.0
    cause: str | None = None
    advice: tuple[str, ...] = ()
    module_name: str | None = None
    observed_in: str | None = None
    severity: Severity | None = None  # None: the detector's
    started_at: int | None = None  # step at which the fault started; None: this one
    confirmed: bool = False  # needs no confirmation by later steps
    momentary: bool = False  # an event of this step, which neither lasts nor resolves
    escalates: bool = False  # escalates an active alert though its severity is the same
    resolved: bool = False  # is over already
    statistic: str | None = None  # of layers, that shows it; None: the detector's
    batch_steps: Iterable[int] = ()  # steps with a batch that may be the cause


_Moment = Literal["step", "full", "loss"]
_MOMENTS = get_args(_Moment)


def limit(default: float, meaning: str) -> Any:
    """Declare a limit of a detector, which ``alerts={kind: {...}}`` may set.

    Args:
        default: Its value; with its type.
        meaning: One sentence, for users.
    """
    return field(default=default, metadata={LIMIT: meaning})


def state(initial: Any) -> Any:
    """Declare state of a detector, which is saved with a run: a value, or what creates it."""
    if isinstance(initial, Hashable) and not callable(initial):
        return field(init=False, default=initial)
    create = initial if callable(initial) else partial(copy, initial)
    return field(init=False, default_factory=create)


@dataclass(kw_only=True, eq=False, repr=False)
class Detector(Rule):
    """One kind of alert. A subclass names it and implements :meth:`find`.

    The engine does the rest: it requests full steps until a finding is confirmed, reports that a
    fault started, escalated or resolved, and suppresses faults that another one explains. Each
    subclass is a dataclass: its fields are declared by :func:`limit` and :func:`state`. Its
    arguments are other values for some limits.
    """

    kind: ClassVar[str]
    # Which steps it evaluates: each, full steps, or those with a finite loss.
    on: ClassVar[_Moment] = "step"
    severity: ClassVar[Severity] = "warning"
    statistic: ClassVar[str] = "grad_norm"  # of layers, that shows the fault
    explained_by: ClassVar[frozenset[str]] = frozenset()  # kinds that may be its root cause
    # Kinds that are judged first, so that they are the cause if both start at the same step. Kinds
    # that explain it, and that it does not explain, are.
    after: ClassVar[frozenset[str]] = frozenset()
    persistent: ClassVar[bool] = False  # may outlast its root cause
    explained_by_rate_jump: ClassVar[bool] = False  # a recent jump of the learning rate explains it
    # Debounce: consecutive findings that make an alert, or the name of the limit that holds them.
    confirm_after: ClassVar[int | str] = 1
    # Evaluations without a finding until the alert resolves; of full steps over 20 steps at least,
    # so that a fault that comes and goes with the batches is one alert.
    clear_after: ClassVar[int] = 1

    # Set by find() to request a full step. An unconfirmed finding of a full step requests one, too.
    needs_full_step: bool = state(False)
    full_steps_in_a_row: int = state(1)  # consecutive full steps that it needs
    active_alert: Alert | None = state(None)  # noqa: RUF009 - a field
    requests_full_step: bool = state(False)
    is_unconfirmed: bool = state(False)  # a finding is not confirmed yet
    _findings: int = state(0)
    _evaluations_without: int = state(0)
    _found_at: int = state(0)  # the last step with the fault

    if TYPE_CHECKING:  # each subclass has its own

        def __init__(self, **limits: float) -> None: ...

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        declared = {each.name for each in fields(cls)}
        if hidden := declared & vars(cls).keys() - inspect.get_annotations(cls).keys():
            name = min(hidden)
            raise TypeError(f"{cls.__name__}.{name}: declare it as {name}: float = limit(...)")
        dataclass(kw_only=True, eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        self._check()
        self._own_baseline = Baseline()
        self.set_up()

    @classmethod
    def limits(cls) -> dict[str, str]:
        """Return the meaning of each of its limits, by name."""
        return {each.name: each.metadata[LIMIT] for each in fields(cls) if LIMIT in each.metadata}

    def _check(self) -> None:
        """Raise ValueError for attributes of the class that have no meaning."""
        after, kind = self.confirm_after, getattr(self, "kind", "")
        counts = after in self.limits() if isinstance(after, str) else after >= 1
        for name, is_valid, meaning in (
            ("kind", re.fullmatch("[a-z0-9_]+", kind), "letters a-z, 0-9 and _"),
            ("on", self.on in _MOMENTS, f"one of {', '.join(_MOMENTS)}"),
            ("severity", self.severity in get_args(Severity), "one of note, warning, error"),
            ("confirm_after", counts, "a number from 1 on, or the name of a parameter"),
            ("explained_by", not isinstance(self.explained_by, str), "a set of kinds"),
        ):
            if not is_valid:
                given = f"{type(self).__name__}.{name} = {getattr(self, name, None)!r}"
                raise ValueError(f"{given}: must be {meaning}")

    @property
    def _active_module(self) -> str:
        """Module that the active alert names; empty if it names none."""
        return (self.active_alert and self.active_alert.module_name) or ""

    def set_up(self) -> None:
        """Create state that depends on the limits."""

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        """Return the fault of this step, which ``baseline`` includes; None if it has none."""
        raise NotImplementedError

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        """Whether the active fault is still present, or not known to be over.

        Called where :meth:`find` found nothing. A lower threshold here is the hysteresis.
        """
        return False

    def may_follow(self, cause: Alert) -> bool:
        """Whether a reported alert of one of the kinds ``explained_by`` may be the root cause."""
        return True

    def find_in_loss(self, step: int, loss: float) -> Finding | None:
        """Return the fault of a loss that was just logged, which may be NaN."""
        return None

    # --- called by the engine --------------------------------------------------------------------

    def evaluate(self, record: StepRecord, baseline: Baseline) -> list[Alert]:
        """Judge a step."""
        is_full_only, alerts = self.on == "full", list[Alert]()
        has_loss = self.on != "loss" or record.finite_loss is not None
        if not has_loss or (is_full_only and not record.full):
            return []
        if (found := self.find(record, baseline)) is not None:
            self._findings += 1
            self._evaluations_without, self._found_at = 0, record.step
            if found.confirmed or self._findings >= self._required:
                alerts = self._report(record.step, found)
        elif self.active_alert is not None and self.still_present(record, baseline):
            self._evaluations_without, self._found_at = 0, record.step
        else:
            self._findings = 0
            self._evaluations_without += 1
            is_recent = record.step - self._found_at < shared.LATEST
            is_early = is_full_only and self.clear_after > 1 and is_recent
            clears = self._evaluations_without >= self.clear_after and not is_early
            if self.active_alert is not None and clears:
                alerts, self.active_alert = [_resolved(self.active_alert, record.step)], None
        self.is_unconfirmed = 0 < self._findings < self._required
        self.requests_full_step = self.needs_full_step or (is_full_only and self.is_unconfirmed)
        return alerts

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        if (found := self.find_in_loss(step, loss)) is None:
            return ()
        self._evaluations_without = 0
        return self._report(step, found)

    @property
    def full_steps_needed(self) -> int:
        """Consecutive full steps that it requests."""
        is_waiting = self.on == "full" and self.is_unconfirmed
        missing = int(self._required - self._findings) if is_waiting else 0
        return max(self.full_steps_in_a_row, missing)

    @property
    def _required(self) -> float:
        """Consecutive findings that make an alert."""
        after = self.confirm_after
        return getattr(self, after) if isinstance(after, str) else after

    # --- as a rule without an engine -------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.kind

    def __call__(self, record: StepRecord) -> list[Alert]:
        self._own_baseline.add(record)
        return self.evaluate(record, self._own_baseline)

    def state_dict(self) -> dict[str, Any]:
        return {"detector": to_plain(self), "baseline": to_plain(self._own_baseline)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore(self, state["detector"])
        restore(self._own_baseline, state["baseline"])

    # ---------------------------------------------------------------------------------------------

    def _report(self, step: int, found: Finding) -> list[Alert]:
        """Return the alerts of a confirmed finding."""
        active = self.active_alert
        alert = Alert(
            kind=self.kind,
            severity=found.severity or self.severity,
            step=step if found.started_at is None else found.started_at,
            module_name=found.module_name,
            observed_in=found.observed_in,
            value=float(found.value),
            threshold=float(found.threshold),
            summary=found.summary,
            cause=found.cause,
            advice=found.advice,
            batches=tuple([Batch(step=max(step, 0)) for step in found.batch_steps]),
            statistic=found.statistic or self.statistic,
        )
        grown = active is not None and (active.severity, alert.severity) == ("warning", "error")
        if found.resolved:
            return [alert, _resolved(alert, step)]
        if found.momentary:
            return [alert]
        if active is not None and not grown and not found.escalates:
            return []
        self.active_alert = alert
        return [alert if active is None else replace(alert, stage="escalated")]


def _resolved(alert: Alert, step: int) -> Alert:
    duration = steps_in_words(step - alert.step)
    return replace(
        alert,
        severity="note" if alert.severity == "note" else "warning",
        step=step,
        stage="resolved",
        summary=f"Resolved {duration} after it started at step {alert.step}",
        cause=None,
        advice=(),
        consequences=(),
        batches=(),
    )
