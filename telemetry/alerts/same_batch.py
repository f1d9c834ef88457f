"""A model that is given the same batch again and again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.episode import Episode
from telemetry.alerts.history import median
from telemetry.records import StepRecord
from telemetry.rule import Rule


class SameBatch(Rule):
    """A note when the model was given the same values at all steps that were looked at.

    A loader that begins anew after each epoch repeats its batches, too. So the rule compares steps
    whose distances have no common divisor: then no period but that of a single batch explains it.

    Where the values were other ones before, the loader is stuck. Where they are the same from the
    first step on, the data set may be a single batch, as a graph is; then the rule is silent until
    the loss says that this batch is being learned by heart.

    Args:
        steps: Distance of the first and the last of these steps, at least.
        share: Of the first losses; below it, a batch that was the only one is known by heart.
    """

    name = "same_batch"
    _given: tuple[float, ...] = ()
    _first: int = 0
    _divisor: int = 0
    _refuted: bool = False
    _varied: bool = False
    _wants: bool = False
    _first_losses: tuple[float, ...] = ()
    _losses: deque[float]
    _episode: Episode

    def __init__(
        self,
        *,
        steps: int = 100,  # by eye: PPO takes up to 80 steps on what it has collected
        # The healthy gcn, trained on one graph with dropout, stays above 0.09; constant_batch and
        # first_batch_forever come to 0.0002 and 0.01.
        share: float = 0.05,
    ) -> None:
        self._needed = steps
        self._share = share
        self._losses = deque(maxlen=_LOSSES)
        self._episode = Episode(1)

    @property
    def wants_full(self) -> bool:
        """Whether one more step would tell a loader's period from a single batch, or decide."""
        return self._wants or (self._waits_for_loss and self._is_known_by_heart())

    @property
    def _waits_for_loss(self) -> bool:
        """Whether the batch is the only one so far, and its loss decides."""
        return self._divisor == 1 and not self._varied and not self._episode.is_on

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if record.loss is not None and math.isfinite(record.loss):
            if len(self._first_losses) < _LOSSES:
                self._first_losses = (*self._first_losses, record.loss)
            self._losses.append(record.loss)
        given = record.fingerprints
        if not given or not all(map(math.isfinite, given)):
            return ()
        if given != self._given:
            self._refuted = self._refuted or self._divisor > 0
            self._varied = bool(self._given)
            self._given, self._first, self._divisor, self._wants = given, record.step, 0, False
            return self._episode.update(record.step, None)
        distance = record.step - self._first
        self._divisor = math.gcd(self._divisor, distance)
        self._wants = self._divisor > 1 and not self._refuted
        found = self._divisor == 1 and distance >= self._needed
        found &= self._varied or self._is_known_by_heart()
        return self._episode.update(record.step, self._alert(record, distance) if found else None)

    def _is_known_by_heart(self) -> bool:
        """Whether the loss has come down to next to nothing; True if none is logged."""
        if not self._losses:
            return True
        return median(self._losses) <= self._share * median(self._first_losses)

    def _alert(self, record: StepRecord, distance: int) -> Alert:
        return Alert(
            kind=self.name,
            severity="note",
            step=record.step,
            module_name=None,
            value=float(distance),
            threshold=float(self._needed),
            message=(
                f"The model was given the same values at each step that was measured since step "
                f"{self._first}.\n"
                "Check that the loop takes a new batch at each step (next(iter(loader)) begins "
                "anew), unless the data are a single batch."
            ),
        )


_LOSSES = 10  # by eye
