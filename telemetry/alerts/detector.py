"""What a detector is: one kind of alert, what it finds in one step, and when that is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_type_hints

from telemetry.alert import Alert, Severity
from telemetry.alerts.baseline import LATEST, Baseline, finite_loss
from telemetry.alerts.memory import restore, to_plain
from telemetry.records import StepRecord
from telemetry.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a detector sees in one step."""

    seen: str  # what was seen and where, with figures; a sentence without its period
    advice: str  # what people usually try
    value: float  # the figure that was judged
    limit: float  # what it was compared with, in the same unit
    module_name: str | None = None  # the culprit; None if it is the loss or the model
    seen_in: str | None = None  # the module that shows it, where that is not the culprit
    severity: Severity | None = None  # None: that of the detector
    certain: bool = False  # needs no confirmation
    told_once: bool = False  # is a fact of this step, which neither lasts nor ends
    is_worse: bool = False  # makes a fault worse that has begun, though its severity is the same
    begun_at: int | None = None  # the step at which it began; None: this one
    is_over: bool = False  # already


EXPLOSIONS = frozenset({"exploding_gradient", "exploding_activation"})
RISEN_LOSSES = frozenset({"loss_divergence", "loss_spike"})


class Detector(Rule):
    """One kind of alert. A subclass names it and says what it finds in one step.

    The engine does the rest: it asks for full measurements until a finding is confirmed, tells that
    a fault begins, grows worse and ends, and which faults only follow from another. Public numbers
    of the class are its limits, which ``alerts={kind: {...}}`` may set; what it remembers between
    steps is annotated, and saved with a run (see :mod:`telemetry.alerts.memory`).

    Args:
        limits: Other values for some of them.
    """

    kind: ClassVar[str]
    # It looks at each step, those measured in full, or those of which a finite loss is known.
    on: ClassVar[Literal["step", "full", "loss"]] = "step"
    severity: ClassVar[Severity] = "warning"
    explained_by: ClassVar[frozenset[str]] = frozenset()  # kinds of faults that it may follow from
    lasting: ClassVar[bool] = False  # does not pass with what caused it
    by_large_steps: ClassVar[bool] = False  # a learning rate that has just jumped explains it
    confirm: ClassVar[int | str] = 1  # findings in a row that make an alert, or the limit that says
    # Looks without a finding after which a fault is over; of several full steps, in 20 steps at
    # least: what comes and goes with each batch is one fault.
    over_after: ClassVar[int] = 1

    # A full measurement would help; to be set by find(). While a finding of a full step waits to be
    # confirmed, one is asked for anyway.
    undecided: bool = False
    in_a_row: int = 1  # full steps that it then needs; it pauses after as many requests
    alert: Alert | None = None  # of the fault that is on
    _findings: int = 0
    _looks_without: int = 0
    _found_at: int = 0  # the last step at which it was there

    def __init__(self, **limits: float) -> None:
        known = self.limits()
        for name, value in limits.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__}({name}={value!r}): no such limit")
            setattr(self, name, value)
        self._own_base = Baseline()
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

    def find(self, record: StepRecord, base: Baseline) -> Finding | None:
        """What is wrong at this step; None if nothing is.

        Args:
            record: The step.
            base: What this run's figures were, this step included.
        """
        raise NotImplementedError

    def lasts(self, record: StepRecord, base: Baseline) -> bool:
        """Whether the fault that is on is still there, or not known to be over.

        Asked where :meth:`find` found nothing.
        """
        return False

    def find_in_loss(self, step: int, loss: float) -> Finding | None:
        """What is wrong with a loss just logged, NaN perhaps: its step may never end."""
        return None

    # --- what the engine calls -------------------------------------------------------------------

    def look(self, record: StepRecord, base: Baseline) -> Iterator[Alert]:
        """Judge a step."""
        if not self._looks_at(record):
            return
        if (found := self.find(record, base)) is not None:
            self._findings += 1
            self._looks_without, self._found_at = 0, record.step
            if found.certain or self._findings >= self._enough:
                yield from self._tell(record.step, found)
        elif self.alert is not None and self.lasts(record, base):
            self._looks_without, self._found_at = 0, record.step
        else:
            self._findings = 0
            self._looks_without += 1
            is_brief = record.step - self._found_at < LATEST
            waits = self.on == "full" and self.over_after > 1 and is_brief
            if self.alert is not None and self._looks_without >= self.over_after and not waits:
                ended, self.alert = _ended(self.alert, record.step), None
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
    def wants_full(self) -> bool:
        """Whether it asks for a full measurement."""
        return self.undecided or (self.on == "full" and self.is_unconfirmed)

    @property
    def needs_full(self) -> int:
        """How many full steps it requests before it pauses."""
        waits = self.on == "full" and self.is_unconfirmed
        return max(self.in_a_row, int(self._enough - self._findings) if waits else 0)

    @property
    def _enough(self) -> float:
        return getattr(self, self.confirm) if isinstance(self.confirm, str) else self.confirm

    # --- as a rule by itself ---------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.kind

    def __call__(self, record: StepRecord) -> Iterator[Alert]:
        self._own_base.add(record)
        return self.look(record, self._own_base)

    def state_dict(self) -> dict[str, Any]:
        return {"detector": to_plain(self), "baseline": to_plain(self._own_base)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore(self, state["detector"])
        restore(self._own_base, state["baseline"])

    # ---------------------------------------------------------------------------------------------

    def _looks_at(self, record: StepRecord) -> bool:
        if self.on == "full":
            return record.full
        return self.on == "step" or finite_loss(record) is not None

    def _tell(self, step: int, found: Finding) -> Iterator[Alert]:
        """The alerts of a finding that needs no more confirmation."""
        begun = self.alert
        alert = Alert(
            kind=self.kind,
            severity=found.severity or self.severity,
            step=step if found.begun_at is None else found.begun_at,
            module_name=found.module_name,
            seen_in=found.seen_in,
            value=float(found.value),
            threshold=float(found.limit),
            message=f"{found.seen}.\n{found.advice}",
        )
        grown = begun is not None and (begun.severity, alert.severity) == ("warning", "error")
        if found.told_once or found.is_over:
            yield alert
            if found.is_over:
                yield _ended(alert, step)
        elif begun is None or grown or found.is_worse:
            self.alert = alert
            yield alert if begun is None else replace(alert, stage="worse")


def _ended(begun: Alert, step: int) -> Alert:
    return replace(
        begun,
        severity="note" if begun.severity == "note" else "warning",
        step=step,
        stage="end",
        message=f"Over: {begun.kind.replace('_', ' ')}{begun.where}, begun at step {begun.step}.",
        consequences=(),
    )
