"""Ranks that should agree and do not."""

from __future__ import annotations

from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.episode import Episode
from telemetry.plain_text import printable
from telemetry.records import LightSteps, RankFacts, StepRecord
from telemetry.rule import Rule


class RanksDiverge(Rule):
    """Alerts when parameters that should be equal on several ranks differ, or one rank is lost.

    Copies of a parameter, as DDP and HSDP keep them, begin equal and take equal steps. Once their
    bits differ they drift apart, and every rank trains another model. That is looked at whenever a
    step is measured in full. It is lasting, so it is reported once.

    One rank alone is lost if its loss, an output or a parameter is NaN or infinite and no other
    rank has such a value of its own: then the fault is in its part of the batch or in its hardware.
    """

    name = "ranks_diverge"
    _reported: bool
    _alone: Episode

    def __init__(self) -> None:
        self._reported = False
        self._alone = Episode(_CALM_STEPS)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        facts = record.ranks
        if facts is None:
            return
        if facts.diverged and not self._reported:
            self._reported = True
            yield _diverged(record, facts)
        yield from self._alone.update(record.step, _alone(record, facts))

    def quiet_steps(self, steps: LightSteps) -> int:
        return len(steps)


_CALM_STEPS = 20  # by eye


def _diverged(record: StepRecord, facts: RankFacts) -> Alert:
    first, count = facts.diverged[0], len(facts.diverged)
    owner = {p.name: p.module_name for p in record.layout.parameters}
    more = f" and {count - 1} more parameters" if count > 1 else ""
    return Alert(
        kind=RanksDiverge.name,
        severity="error",
        step=record.step,
        module_name=owner.get(first.parameter),
        value=float(count),
        threshold=0.0,
        message=(
            f"{printable(first.parameter)}{more} on {facts.called(first.rank)} is no longer equal "
            f"to that on {facts.called(first.other)}.\n"
            "People usually look for code that runs on some ranks only and changes parameters or "
            "random numbers, for parameters that DDP does not know of, and for faulty memory; then "
            "they go back to a checkpoint."
        ),
    )


def _alone(record: StepRecord, facts: RankFacts) -> Alert | None:
    if facts.first_nonfinite is None or facts.nonfinite != 1 or len(facts.held) < 2:
        return None
    if record.skipped:
        return None
    rank, where = facts.first_nonfinite
    return Alert(
        kind=RanksDiverge.name,
        severity="error",
        step=record.step,
        module_name=None,
        value=1.0,
        threshold=0.0,
        message=(
            f"NaN or infinity on {facts.called(rank)} alone, first seen in {printable(where)}.\n"
            "People usually look at the samples that this rank was given, and exclude the host if "
            "it happens there again."
        ),
    )
