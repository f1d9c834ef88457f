"""Ranks that should agree and do not, or that do and should not."""

from __future__ import annotations

from collections.abc import Sequence

from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding
from telemetry.plain_text import printable, ranks_in_words
from telemetry.records import Divergence, RankFacts, StepRecord

_ASKED = 60  # steps: three times three in a row; by eye


class RanksDiverge(Detector):
    """Alerts when parameters that should be equal on several ranks differ, or one rank is lost.

    Copies of a parameter, as DDP and HSDP keep them, begin equal and take equal steps. Once their
    bits differ they drift apart, and every rank trains another model. That is looked at whenever a
    step is measured in full, and is over when they are equal again: then they are averaged from
    time to time, and are not reported any more. Where neither DDP nor a ``DTensor`` says that
    parameters are copies, only those are that are still equal after the first steps: each rank may
    have a model, or an expert, of its own, which may begin like the others.

    One rank alone is lost if its loss, an output or a parameter is NaN or infinite and no other
    rank has such a value of its own: then the fault is in its part of the batch or in its hardware.
    """

    kind = "ranks_diverge"
    severity = "error"
    clear_after = 20
    _moved: bool = False  # parameters, by a step
    _settled: bool = False  # they were looked at after that
    _apart: set[str]  # of which ranks may have different ones
    _told: set[str]

    def set_up(self) -> None:
        self._apart, self._told = set(), set()

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if record.ranks is None:
            return None
        diverged = None
        if len(record.ranks.measured) > 1:
            diverged = self._begins(record, record.ranks)
        # Averages may never fall on the schedule's steps.
        since = record.step if self.active_alert is None else record.step - self.active_alert.step
        self.needs_full_step = bool(self._told) and since < _ASKED
        rates = record.learning_rates
        self._moved = self._moved or not rates or any(rate != 0 for rate in rates)
        if diverged is not None or record.skipped:
            return diverged
        return _alone(record.ranks)

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return record.ranks is None or bool(self._told)

    def _begins(self, record: StepRecord, facts: RankFacts) -> Finding | None:
        """Look for copies that differ; the finding if none did at the look before."""
        self._apart |= self._told - {found.parameter for found in facts.diverged}
        if not self._settled:
            self._apart |= {found.parameter for found in facts.diverged if not found.declared}
            self._settled = self._moved
        diverged = [found for found in facts.diverged if found.parameter not in self._apart]
        begins = bool(diverged and not self._told)
        self._told = {found.parameter for found in diverged}
        return _diverged(record, facts, diverged) if begins else None


class RanksSameBatch(Detector):
    """Alerts when several ranks of data parallelism are given the same batch, again and again.

    Each should be given a part of the data; the same on all of them is computed in vain.
    """

    kind = "ranks_same_batch"
    on = "full"
    confirm_after = 3
    clear_after = 3

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        facts = record.ranks
        if facts is None or len(facts.same_batch) < 2:
            return None
        return Finding(
            summary=f"{ranks_in_words(facts.same_batch)} of {facts.size} are given the same batch",
            advice=(
                "Give the DataLoader a torch.utils.data.DistributedSampler",
                "Seed random data of each rank by its number",
            ),
            value=len(facts.same_batch),
            threshold=1.0,
        )


def _diverged(record: StepRecord, facts: RankFacts, diverged: Sequence[Divergence]) -> Finding:
    first, count = diverged[0], len(diverged)
    more = f" and {count - 1} more parameters" if count > 1 else ""
    differ, those = ("are", "those") if count > 1 else ("is", "that")
    owner = {p.name: p.module_name for p in record.layout.parameters}
    return Finding(
        summary=f"{printable(first.parameter)}{more} on {facts.called(first.rank)} {differ} no "
        f"longer equal to {those} on {facts.called(first.other)}",
        advice=(
            "Ignore it if weights are averaged now and then: it resolves when they are equal",
            "Check for passes under no_sync() or around DDP (model.module)",
            "Check for code of some ranks that changes parameters or random numbers",
            "Check for parameters that DDP does not know of, and for faulty memory",
            "Resume from a checkpoint",
        ),
        value=count,
        threshold=0.0,
        module_name=owner.get(first.parameter),
    )


def _alone(facts: RankFacts) -> Finding | None:
    """One rank of several holds NaN or infinity of its own."""
    if facts.first_nonfinite is None or facts.nonfinite != 1 or len(facts.held) < 2:
        return None
    rank, where = facts.first_nonfinite
    return Finding(
        summary=f"NaN or infinity on {facts.called(rank)} alone, first seen in {printable(where)}",
        advice=(
            "Check the samples of this rank",
            "Exclude the host if it happens there again",
        ),
        value=1.0,
        threshold=0.0,
    )
