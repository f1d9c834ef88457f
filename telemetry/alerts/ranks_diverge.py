"""Ranks that should agree and do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from telemetry.alert import Alert
from telemetry.alerts.episode import CALM_STEPS, DefaultRule, Episode
from telemetry.records import Divergence, RankFacts, StepRecord
from telemetry.shared.plain_text import printable


class RanksDiverge(DefaultRule):
    """Alerts when parameters that should be equal on several ranks differ, or one rank is lost.

    Copies of a parameter, as DDP and HSDP keep them, begin equal and take equal steps. Once their
    bits differ they drift apart, and every rank trains another model. That is looked at whenever a
    step is measured in full. It is lasting, so it is reported once. Where neither DDP nor a
    ``DTensor`` says that parameters are copies, those that are not equal at the first look are
    none: each rank may have a model, or an expert, of its own.

    One rank alone is lost if its loss, an output or a parameter is NaN or infinite and no other
    rank has such a value of its own: then the fault is in its part of the batch or in its hardware.
    """

    name = "ranks_diverge"
    _reported: bool = False
    _looked: bool = False
    _apart: set[str]
    _alone: Episode

    def _set_up(self) -> None:
        self._apart = set()
        self._alone = Episode(CALM_STEPS)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        facts = record.ranks
        if facts is None:
            return
        diverged = self._copies_that_differ(facts)
        if diverged and not self._reported:
            self._reported = True
            yield self._diverged(record, facts, diverged)
        yield from self._alone.update(record.step, self._found_alone(record, facts))

    def _copies_that_differ(self, facts: RankFacts) -> Sequence[Divergence]:
        if not self._looked and len(facts.measured) > 1:
            self._looked = True
            self._apart = {found.parameter for found in facts.diverged if not found.declared}
        return [found for found in facts.diverged if found.parameter not in self._apart]

    def _diverged(
        self, record: StepRecord, facts: RankFacts, diverged: Sequence[Divergence]
    ) -> Alert:
        first, count = diverged[0], len(diverged)
        owner = {p.name: p.module_name for p in record.layout.parameters}
        more = f" and {count - 1} more parameters" if count > 1 else ""
        message = (
            f"{printable(first.parameter)}{more} on {facts.called(first.rank)} is no longer equal "
            f"to that on {facts.called(first.other)}.\n"
            "People usually look for code that runs on some ranks only and changes parameters or "
            "random numbers, for parameters that DDP does not know of, and for faulty memory; then "
            "they go back to a checkpoint."
        )
        place = owner.get(first.parameter)
        return self._alert(record.step, place, count, 0.0, message, "error")

    def _found_alone(self, record: StepRecord, facts: RankFacts) -> Alert | None:
        """One rank of several holds NaN or infinity of its own."""
        is_alone = facts.nonfinite == 1 and len(facts.held) > 1
        if facts.first_nonfinite is None or not is_alone or record.skipped:
            return None
        rank, where = facts.first_nonfinite
        message = (
            f"NaN or infinity on {facts.called(rank)} alone, first seen in {printable(where)}.\n"
            "People usually look at the samples that this rank was given, and exclude the host if "
            "it happens there again."
        )
        return self._alert(record.step, None, 1.0, 0.0, message, "error")
