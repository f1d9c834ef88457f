"""A model that is given the same batch again and again."""

from __future__ import annotations

import math
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.episode import Episode
from telemetry.records import LightSteps, StepRecord
from telemetry.rule import Rule


class SameBatch(Rule):
    """A note when the model was given the same values at all steps that were looked at.

    A loader that begins anew after each epoch repeats its batches, too. So the rule compares steps
    whose distances have no common divisor: then no period but that of a single batch explains it.
    It cannot know whether the data set is a single batch.

    Args:
        steps: Distance of the first and the last of these steps, at least.
    """

    name = "same_batch"
    _given: tuple[float, ...]
    _first: int
    _divisor: int
    _refuted: bool
    _wants: bool
    _episode: Episode

    def __init__(
        self,
        *,
        steps: int = 100,  # by eye: PPO takes up to 80 steps on what it has collected
    ) -> None:
        self._needed = steps
        self._given = ()
        self._first = 0
        self._divisor = 0
        self._refuted = False
        self._wants = False
        self._episode = Episode(1)

    @property
    def wants_full(self) -> bool:
        """Whether one more step would tell a loader's period from a single batch."""
        return self._wants

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        given = record.fingerprints
        if not given or not all(map(math.isfinite, given)):
            return ()
        if given != self._given:
            self._refuted = self._refuted or self._divisor > 0
            self._given, self._first, self._divisor, self._wants = given, record.step, 0, False
            return self._episode.update(record.step, None)
        distance = record.step - self._first
        self._divisor = math.gcd(self._divisor, distance)
        self._wants = self._divisor > 1 and not self._refuted
        found = self._divisor == 1 and distance >= self._needed
        return self._episode.update(record.step, self._alert(record, distance) if found else None)

    def quiet_steps(self, steps: LightSteps) -> int:
        return len(steps)

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
