"""Ranks whose copies differ, or that get the same batch."""

from __future__ import annotations

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding, state
from telemetry.plain_text import printable, ranks_in_words
from telemetry.records import RankFacts, StepRecord


class RanksDiverge(Detector):
    """Copies of a parameter that DDP, HSDP or tensor parallelism keep on several ranks are not
    equal, bit for bit. Or one rank alone has NaN or infinity.

    Evidence: rank, host and parameter.
    Causes: passes under ``no_sync()`` or around DDP (``model.module``), bad samples, hardware.
    Remedies: synchronize before the step; exclude the host and restart from a checkpoint.
    Silent: shards, ``post_localSGD_hook``, parameters that nothing marks as copies.

    It resolves when they are equal again, as averaged ones are, and reports these never again. If
    neither DDP nor a ``DTensor`` declares copies, parameters that are still equal after the first
    steps count: each rank may have its own expert.
    """

    kind = "ranks_diverge"
    statistic = "weight_norm"
    severity = "error"
    clear_after = shared.LATEST
    _moved: bool = state(False)  # a step changed the parameters
    _settled: bool = state(False)  # they were compared after that
    _apart: set[str] = state(set)  # parameters that may differ between ranks
    _reported: set[str] = state(set)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if record.ranks is None:
            return None
        diverged = None
        if len(record.ranks.measured) > 1:
            diverged = self._begins(record, record.ranks)
        # Averages may never fall on scheduled full steps.
        since = record.step if self.active_alert is None else record.step - self.active_alert.step
        self.needs_full_step = bool(self._reported) and since < shared.LONG
        rates = record.learning_rates
        self._moved = self._moved or not rates or any(rate != 0 for rate in rates)
        if diverged is not None or record.skipped:
            return diverged
        return _alone(record.ranks)

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return record.ranks is None or bool(self._reported) or not record.all_grads_finite

    def _begins(self, record: StepRecord, facts: RankFacts) -> Finding | None:
        """Return the finding of copies that differ, if none did at the comparison before."""
        self._apart |= self._reported - {found.parameter for found in facts.diverged}
        if not self._settled:
            self._apart |= {found.parameter for found in facts.diverged if not found.declared}
            self._settled = self._moved
        diverged = [found for found in facts.diverged if found.parameter not in self._apart]
        begins = bool(diverged and not self._reported)
        self._reported = {found.parameter for found in diverged}
        if not begins:
            return None
        first, count = diverged[0], len(diverged)
        more = f" and {count - 1} more parameters differ" if count > 1 else " differs"
        owner = {p.name: p.module_name for p in record.layout.parameters}
        return Finding(
            summary=f"{printable(first.parameter)}{more} between {facts.called(first.rank)} "
            f"and {facts.called(first.other)}",
            advice=(
                "Ignore it if weights are averaged now and then: it resolves when they are equal",
                "Check for passes under no_sync() or around DDP (model.module)",
                "Check for code that only some ranks run and that changes parameters or random "
                "numbers",
                "Check for parameters that DDP does not know of, and for faulty memory",
                "Resume from a checkpoint",
            ),
            value=count,
            module_name=owner.get(first.parameter),
        )


class RanksSameBatch(Detector):
    """Ranks of DDP or FSDP get the same batch at three full steps in a row.

    Evidence: the ranks.
    Causes: a DataLoader without ``DistributedSampler``, generators with the same seed.
    Remedies: use ``torch.utils.data.DistributedSampler``; seed generators by rank.
    Silent: ranks of tensor, context and pipeline parallelism.
    Example: loader = DataLoader(data, batch_size=64)  # on every rank
    """

    kind = "ranks_same_batch"
    on = "full"
    confirm_after = shared.SEVERAL
    clear_after = shared.SEVERAL

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        facts = record.ranks
        if facts is None or len(facts.same_batch) < 2:
            return None
        return Finding(
            summary=f"{ranks_in_words(facts.same_batch)} of {facts.size} get the same batch",
            advice=(
                "Give the DataLoader a torch.utils.data.DistributedSampler",
                "Seed random data of each rank by its number",
            ),
            value=len(facts.same_batch),
            threshold=1.0,
        )


def _alone(facts: RankFacts) -> Finding | None:
    """Return the finding that one rank alone has NaN or infinity."""
    if facts.first_nonfinite is None or facts.nonfinite != 1 or len(facts.held) < 2:
        return None
    rank, where = facts.first_nonfinite
    return Finding(
        summary=f"NaN or infinity on {facts.called(rank)} alone, first in {printable(where)}",
        advice=("Check the samples of this rank", "Exclude the host if it happens there again"),
        value=1.0,
    )
