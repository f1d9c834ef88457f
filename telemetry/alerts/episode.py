"""What the default rules share: parameters, how alerts are made, and episodes.

An episode reports a fault when it begins, grows worse and ends, rather than at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from telemetry.alert import Alert, Severity
from telemetry.alerts.course import Course
from telemetry.rule import Rule

# Steps without a finding after which a fault is over, for rules with no number of their own: two
# full measurements of every ten steps; by eye.
CALM_STEPS = 20


class DefaultRule(Rule):
    """A rule whose parameters are the public numbers of its class that have no annotation.

    What it remembers is annotated (see :mod:`telemetry.alerts.memory`).

    Args:
        parameters: Other values for some of them.

    Attributes:
        course: How the run develops; its own, and may be replaced by one that rules share.
    """

    def __init__(self, **parameters: float) -> None:
        known = self.parameters()
        for name, value in parameters.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__}({name}={value!r}): no such parameter")
            setattr(self, name, value)
        self.course = Course()
        self._set_up()

    @classmethod
    def parameters(cls) -> list[str]:
        """Names of the parameters, in their order."""
        own = vars(cls).items()
        return [n for n, value in own if n[0] != "_" and type(value) in (int, float)]

    def _set_up(self) -> None:
        """Make what the rule remembers and what cannot be shared by all rules of the class."""

    def _alert(
        self,
        step: int,
        module_name: str | None,
        value: float,
        threshold: float,
        message: str,
        severity: Severity = "warning",
    ) -> Alert:
        return Alert(
            kind=self.name,
            severity=severity,
            step=step,
            module_name=module_name,
            value=float(value),
            threshold=float(threshold),
            message=message,
        )


class EpisodeRule(DefaultRule):
    """A rule whose fault lasts; it is over after ``_calm`` looks in a row that found nothing."""

    _calm = 1
    _episode: Episode

    def __init__(self, **parameters: float) -> None:
        self._episode = Episode(self._calm)
        super().__init__(**parameters)


class Episode:
    """Turns what a rule finds, step by step, into alerts.

    Args:
        calm: Number of calls in a row without a finding after which the fault is over.
    """

    _looks_without: int = 0
    _current: Alert | None = None

    def __init__(self, calm: int) -> None:
        self._calm = calm

    @property
    def is_on(self) -> bool:
        """Whether a fault has begun and not ended."""
        return self._current is not None

    @property
    def module_name(self) -> str | None:
        """The module that the fault's alert has named; None if it is not on."""
        return self._current.module_name if self._current is not None else None

    def update(self, step: int, found: Alert | None) -> Iterator[Alert]:
        """Add what a rule found at a step; None if it looked and found nothing."""
        begun = self._current
        if found is not None:
            self._looks_without = 0
            if begun is None:
                self._current = found
                yield found
            elif (begun.severity, found.severity) == ("warning", "error"):
                self._current = found
                yield replace(found, stage="worse")
        elif begun is not None:
            self._looks_without += 1
            if self._looks_without >= self._calm:
                self._current = None
                yield _ended(begun, step)


def _ended(begun: Alert, step: int) -> Alert:
    return replace(
        begun,
        severity="note" if begun.severity == "note" else "warning",
        step=step,
        stage="end",
        message=f"Over: {begun.kind.replace('_', ' ')}{begun.where}, begun at step {begun.step}.",
        consequences=(),
    )
