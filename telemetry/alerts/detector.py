"""What a detector is: one kind of alert, what it finds in one step, and when that is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_type_hints

from telemetry.alert import Alert, Severity
from telemetry.alerts.baseline import LATEST, Baseline, finite_loss
from telemetry.alerts.state import restore, to_plain
from telemetry.records import StepRecord
from telemetry.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a detector sees in one step."""

    summary: str  # what was seen and where, with figures; a sentence without its period
    advice: str  # what people usually try
    value: float  # the figure that was judged
    threshold: float  # what it was compared with, in the same unit
    module_name: str | None = None  # the culprit; None if it is the loss or the model
    observed_in: str | None = None  # the module that shows it, where that is not the culprit
    severity: Severity | None = None  # None: that of the detector
    confirmed: bool = False  # needs no confirmation
    momentary: bool = False  # is a fact of this step, which neither lasts nor ends
    escalates: bool = False  # makes a fault worse that has begun, though its severity is the same
    started_at: int | None = None  # the step at which it began; None: this one
    resolved: bool = False  # already


EXPLOSIONS = frozenset({"exploding_gradient", "exploding_activation"})
RISEN_LOSSES = frozenset({"loss_divergence", "loss_spike"})


class Detector(Rule):
    """One kind of alert. A subclass names it and says what it finds in one step.

    The engine does the rest: it asks for full measurements until a finding is confirmed, tells that
    a fault begins, grows worse and ends, and which faults only follow from another. Public numbers
    of the class are its limits, which ``alerts={kind: {...}}`` may set; what it remembers between
    steps is annotated, and saved with a run (see :mod:`telemetry.alerts.state`).

    Args:
        limits: Other values for some of them.
    """

    kind: ClassVar[str]
    # It looks at each step, those measured in full, or those of which a finite loss is known.
    on: ClassVar[Literal["step", "full", "loss"]] = "step"
    severity: ClassVar[Severity] = "warning"
    explained_by: ClassVar[frozenset[str]] = frozenset()  # kinds of faults that it may follow from
    persistent: ClassVar[bool] = False  # does not pass with what caused it
    explained_by_rate_jump: ClassVar[bool] = (
        False  # a learning rate that has just jumped explains it
    )
    confirm_after: ClassVar[int | str] = (
        1  # findings in a row that make an alert, or the limit that says
    )
    # Looks without a finding after which a fault is over; of several full steps, in 20 steps at
    # least: what comes and goes with each batch is one fault.
    clear_after: ClassVar[int] = 1

    # A full measurement would help; to be set by find(). While a finding of a full step waits to be
    # confirmed, one is asked for anyway.
    needs_full_step: bool = False
    full_steps_in_a_row: int = 1  # full steps that it then needs; it pauses after as many requests
    active_alert: Alert | None = None  # of the fault that is on
    _findings: int = 0
    _looks_without: int = 0
    _found_at: int = 0  # the last step at which it was there

    def __init__(self, **limits: float) -> None:
        known = self.limits()
        for name, value in limits.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__}({name}={value!r}): no such limit")
            setattr(self, name, value)
        self._own_baseline = Baseline()
        self.set_up()

    @classmethod
    def limits(cls) -> list[str]:
        """Names of its limits, in their order."""
        values = {name: v for part in reversed(cls.__mro__) for name, v in vars(part).items()}
        others = {*dir(Detector), *get_type_hints(cls)}
        return [
            name
            for name, value in values.items()
            if name[0] != "_" and type(value) in (int, float) and name not in others
        ]

    def set_up(self) -> None:
        """Make what it remembers and what cannot be shared by all detectors of the class."""

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        """What is wrong at this step; None if nothing is.

        Args:
            record: The step.
            baseline: What this run's figures were, this step included.
        """
        raise NotImplementedError

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        """Whether the fault that is on is still there, or not known to be over.

        Asked where :meth:`find` found nothing.
        """
        return False

    def find_in_loss(self, step: int, loss: float) -> Finding | None:
        """What is wrong with a loss just logged, NaN perhaps: its step may never end."""
        return None

    # --- what the engine calls -------------------------------------------------------------------

    def evaluate(self, record: StepRecord, baseline: Baseline) -> Iterator[Alert]:
        """Judge a step."""
        if not self._looks_at(record):
            return
        if (found := self.find(record, baseline)) is not None:
            self._findings += 1
            self._looks_without, self._found_at = 0, record.step
            if found.confirmed or self._findings >= self._enough:
                yield from self._tell(record.step, found)
        elif self.active_alert is not None and self.still_present(record, baseline):
            self._looks_without, self._found_at = 0, record.step
        else:
            self._findings = 0
            self._looks_without += 1
            is_brief = record.step - self._found_at < LATEST
            waits = self.on == "full" and self.clear_after > 1 and is_brief
            if (
                self.active_alert is not None
                and self._looks_without >= self.clear_after
                and not waits
            ):
                ended, self.active_alert = _ended(self.active_alert, record.step), None
                yield ended

    def on_loss(self, step: int, loss: float) -> Iterator[Alert]:
        if (found := self.find_in_loss(step, loss)) is not None:
            self._looks_without = 0
            yield from self._tell(step, found)

    @property
    def judges_losses(self) -> bool:
        """Whether :meth:`find_in_loss` does anything."""
        return type(self).find_in_loss is not Detector.find_in_loss

    @property
    def is_unconfirmed(self) -> bool:
        """Whether a finding waits to be confirmed by more steps."""
        return self._findings > 0 and self._findings < self._enough

    @property
    def requests_full_step(self) -> bool:
        """Whether it asks for a full measurement."""
        return self.needs_full_step or (self.on == "full" and self.is_unconfirmed)

    @property
    def full_steps_needed(self) -> int:
        """How many full steps it requests before it pauses."""
        waits = self.on == "full" and self.is_unconfirmed
        return max(self.full_steps_in_a_row, int(self._enough - self._findings) if waits else 0)

    @property
    def _enough(self) -> float:
        return (
            getattr(self, self.confirm_after)
            if isinstance(self.confirm_after, str)
            else self.confirm_after
        )

    # --- as a rule by itself ---------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.kind

    def __call__(self, record: StepRecord) -> Iterator[Alert]:
        self._own_baseline.add(record)
        return self.evaluate(record, self._own_baseline)

    def state_dict(self) -> dict[str, Any]:
        return {"detector": to_plain(self), "baseline": to_plain(self._own_baseline)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore(self, state["detector"])
        restore(self._own_baseline, state["baseline"])

    # ---------------------------------------------------------------------------------------------

    def _looks_at(self, record: StepRecord) -> bool:
        if self.on == "full":
            return record.full
        return self.on == "step" or finite_loss(record) is not None

    def _tell(self, step: int, found: Finding) -> Iterator[Alert]:
        """The alerts of a finding that needs no more confirmation."""
        begun = self.active_alert
        alert = Alert(
            kind=self.kind,
            severity=found.severity or self.severity,
            step=step if found.started_at is None else found.started_at,
            module_name=found.module_name,
            observed_in=found.observed_in,
            value=float(found.value),
            threshold=float(found.threshold),
            message=f"{found.summary}.\n{found.advice}",
        )
        grown = begun is not None and (begun.severity, alert.severity) == ("warning", "error")
        if found.momentary or found.resolved:
            yield alert
            if found.resolved:
                yield _ended(alert, step)
        elif begun is None or grown or found.escalates:
            self.active_alert = alert
            yield alert if begun is None else replace(alert, stage="escalated")


def _ended(begun: Alert, step: int) -> Alert:
    return replace(
        begun,
        severity="note" if begun.severity == "note" else "warning",
        step=step,
        stage="resolved",
        message=f"Over: {begun.kind.replace('_', ' ')}{begun.where}, begun at step {begun.step}.",
        consequences=(),
    )
