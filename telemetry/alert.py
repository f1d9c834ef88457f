"""Values: an alert about one training fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from telemetry.plain_text import called, html_table, printable
from telemetry.records import CodeLocation, Layout
from telemetry.records.batches import Batch

Severity = Literal["error", "warning", "note"]
Stage = Literal["started", "escalated", "resolved"]

# Lines of a message.
_MAX_BATCHES = 5


@dataclass(frozen=True, kw_only=True)
class Consequence:
    """Another fault that an alert explains and suppresses."""

    kind: str
    module_name: str | None = None

    def __str__(self) -> str:
        where = f" in {called(self.module_name)}" if self.module_name else ""
        kind = "NaN or infinity" if self.kind == "nonfinite" else self.kind.replace("_", " ")
        return f"{kind}{where}"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One training fault that started, escalated or resolved.

    Sentences are composed of the fields only where they are shown: :attr:`title`, :attr:`message`.

    Attributes:
        kind: Kind of fault; ``docs/alerts/`` lists those of the default rules.
        severity: ``error``: the run is lost or wrong; ``warning``: worth a look; ``note``: a fact
            that may be intended: it neither raises nor stops.
        step: Optimizer steps completed when the measurement was taken, from 0.
        module_name: The culprit, as in ``named_modules()``; None if it is the loss or the model.
        batches: Batches that may be the cause, with the ids that ``HookLogger.batch`` received.
        observed_in: The module whose numbers show the fault, if it is not ``module_name``: the ReLU
            that zeroes the outputs of a layer.
        statistic: The statistic of layers that shows the fault, as on the page.
        value: The measured figure that the rule judged; of an escalated alert that of the
            consequence that escalated it.
        threshold: The figure it was compared with, in the same unit.
        summary: Sentences without the last period: the measured figures, and where.
        added: In the same form, what a consequence added at the step of an escalated alert, whose
            summary is that of its start; None where the summary itself is new.
        measured_at: Step of the figures in ``summary``; None: that of the alert.
        cause: One sentence about the reason, if it is known.
        advice: Usual remedies, a short phrase each.
        location: The user's own code that ran the module, if it is known.
        consequences: Other faults that this one explains, the latest last.
        stage: Whether the fault started, escalated or resolved.
    """

    kind: str
    severity: Severity
    step: int
    module_name: str | None
    value: float
    threshold: float
    summary: str
    added: str | None = None
    measured_at: int | None = None
    cause: str | None = None
    advice: tuple[str, ...] = ()
    location: CodeLocation | None = None
    consequences: tuple[Consequence, ...] = ()
    stage: Stage = "started"
    observed_in: str | None = None
    batches: tuple[Batch, ...] = ()
    statistic: str = "grad_norm"

    def __post_init__(self) -> None:
        for name, known in (("severity", Severity), ("stage", Stage)):
            if (value := getattr(self, name)) not in get_args(known):
                raise ValueError(
                    f"Alert({name}={value!r}): must be one of {', '.join(get_args(known))}"
                )

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that the alert stands for: its own, and those of its consequences."""
        return frozenset({self.kind, *(c.kind for c in self.consequences)})

    @property
    def where(self) -> str:
        """The module, to follow the kind in a sentence: `` in fc1``; empty for the whole model."""
        return f" in {called(self.module_name)}" if self.module_name else ""

    @property
    def title(self) -> str:
        """Kind, module and step in a few words: ``dead_units in fc1 at step 20``.

        What happened first comes first: ``loss_spike, then dead units in fc1 at step 20``.
        """
        stage = "" if self.stage == "started" else f" {self.stage}"
        if self.stage == "escalated" and self.consequences:
            stage = f", then {self.consequences[-1]}"
        return f"{self.kind}{self.where}{stage} at step {self.step}"

    @property
    def message(self) -> str:
        """Addition, summary and cause, code, consequences, and advice, in one line each."""
        lines = [] if self.added is None else [_sentences(f"Since step {self.step}: {self.added}")]
        measured = "" if self.measured_at is None else f" (measured at step {self.measured_at})"
        lines.append(_sentences(f"{self.summary}{measured}", self.cause or ""))
        if self.location is not None:
            lines.append(f"Code: {printable(str(self.location))}")
        if self.consequences:
            lines.append(_sentences(f"Consequences: {', '.join(map(str, self.consequences))}"))
        lines += [_sentences(str(batch)) for batch in self.batches if batch.ids][:_MAX_BATCHES]
        return "\n".join([*lines, *([_sentences(*self.advice)] if self.advice else [])])

    @property
    def news(self) -> str:
        """The part of the message that no earlier alert of this fault has, to follow the title."""
        return self.message if self.added is None else _sentences(self.added)

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        return html_table(self.title, {self.severity: self.message})


def listed_alerts(alerts: Iterable[Alert]) -> str:
    """Return a line for each alert that started."""
    lines = [f"{alert.severity}: {alert.title}" for alert in alerts if alert.stage == "started"]
    return "\n".join(lines) or "none"


def _sentences(*parts: str) -> str:
    """Join sentences, each with a period unless it ends with a mark."""
    return " ".join(p if p.endswith((".", "!", "?")) else f"{p}." for p in parts if p)


def located(alert: Alert, layout: Layout | None) -> Alert:
    """Return the alert with the location of the user's code that ran its module."""
    place = None if layout is None else layout.position.get(alert.module_name or "")
    if layout is None or place is None or alert.module_name is None or alert.stage == "resolved":
        return alert
    return replace(alert, location=layout.modules[place].user_code)


class TelemetryAlert(RuntimeError):  # noqa: N818 - what is raised is the alert
    """Raised between two steps where the user requested it (``on_alert="raise"``).

    Attributes:
        alert: The alert.
    """

    def __init__(self, alert: Alert) -> None:
        super().__init__(alert)  # not a text, so that a pickled one can be loaded
        self.alert = alert

    def __str__(self) -> str:
        return f"{self.alert.title}: {self.alert.message}"
