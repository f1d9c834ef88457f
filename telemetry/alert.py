"""Values: one training fault, as rules report it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from telemetry import untrusted
from telemetry.plain_text import called

Severity = Literal["note", "warning", "error"]
Stage = Literal["started", "escalated", "resolved"]


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One training fault: that it begins, grows worse or ends.

    Attributes:
        kind: What is wrong; those of the default rules are in ``docs/alerts.md``.
        severity: ``error``: the run is lost or wrong; ``warning``: look; ``note``: a fact, which
            may well be meant so: it is shown, but neither raised nor printed.
        step: Optimizer steps completed when the measurement was taken, from 0.
        module_name: The culprit, as in ``named_modules()``; None if it is the loss or the model.
        observed_in: The module whose numbers show the fault, if it is not ``module_name``: the ReLU
            that zeroes the outputs of a layer.
        value: The measured figure that the rule judged; of a fault that grew worse by another one
            that follows from it, the figure of that one.
        threshold: The figure it was compared with, in the same unit.
        message: What was seen, where, and what people usually try; at most three lines. The default
            rules list the consequences, too.
        consequences: Other faults that this one explains, in words; they have no alerts of their
            own.
        stage: Whether the fault begins, grows worse or has ended.
    """

    kind: str
    severity: Severity
    step: int
    module_name: str | None
    value: float
    threshold: float
    message: str
    consequences: tuple[str, ...] = ()
    stage: Stage = "started"
    observed_in: str | None = None

    @property
    def where(self) -> str:
        """The module, to follow the kind in a sentence: `` in fc1``; empty if there is none."""
        return f" in {called(self.module_name)}" if self.module_name else ""

    @property
    def title(self) -> str:
        """Kind, place and time in a few words: ``dead_units in fc1 at step 20``."""
        what = {"started": "", "escalated": " escalated", "resolved": " resolved"}[self.stage]
        return f"{self.kind}{self.where}{what} at step {self.step}"


def parse_alert(content: Any) -> Alert:
    """An alert from a JSON object with its fields.

    An unknown severity becomes ``warning``, an unknown stage ``begin``.

    Raises:
        ValueError: A field is missing or has a wrong value; the message names it.
    """
    known = _ALERT_FIELDS(content)
    severity, stage = known["severity"], known["stage"]
    known["consequences"] = tuple(known["consequences"])
    known["severity"] = severity if severity in _SEVERITIES else "warning"
    known["stage"] = stage if stage in _STAGES else "started"
    return Alert(**known)


def alert_fields(alert: Alert) -> dict[str, Any]:
    """The alert as a JSON object, which :func:`parse_alert` reads.

    ``value`` and ``threshold`` are ``"nan"``, ``"inf"`` or ``"-inf"`` where JSON has no number.
    """
    numbers = {"value": alert.value, "threshold": alert.threshold}
    plain = {name: n if math.isfinite(n) else str(float(n)) for name, n in numbers.items()}
    return asdict(alert) | plain


_SEVERITIES, _STAGES = get_args(Severity), get_args(Stage)
_ALERT_FIELDS = untrusted.fields(
    kind=untrusted.name,
    severity=untrusted.text,
    step=untrusted.whole,
    module_name=untrusted.optional(untrusted.name),
    value=untrusted.number,
    threshold=untrusted.number,
    message=untrusted.text,
    consequences=untrusted.listed(untrusted.text, most=1000),
    stage=untrusted.text,
    observed_in=untrusted.optional(untrusted.name),
)


class TelemetryAlert(RuntimeError):  # noqa: N818 - what is raised is the alert
    """Raised between two steps where the user asked for it (``on_alert="raise"``).

    Attributes:
        alert: The alert.
    """

    def __init__(self, alert: Alert) -> None:
        super().__init__(alert)  # not a text, so that a pickled one can be loaded
        self.alert = alert

    def __str__(self) -> str:
        return f"{self.alert.title}: {self.alert.message}"
