"""A forward pass that grows beyond what it was."""

from __future__ import annotations

import math
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.episode import EpisodeRule
from telemetry.alerts.growth import forward_growth
from telemetry.plain_text import called
from telemetry.records import Output, StepRecord


class ExplodingActivation(EpisodeRule):
    """Compares the variation of each module's output with the largest RMS that it has had.

    The variation (:attr:`TensorRecord.variation`), because what is the same for every input is no
    activation, however large it is: the layers before it may be dead.

    It alerts when an output is ``factor`` times larger than ever before, in two full measurements
    in a row, and the loss has risen as well; or when activations grow ``depth_factor``-fold through
    the network at the very first and at a second one of the first steps.

    Args:
        factor: Ratio to the largest RMS that the module's output has had.
        depth_factor: Ratio of the largest variation in the network to the RMS of the first module.
    """

    name = "exploding_activation"
    factor = 100.0  # by eye; tried 10 and 1000
    depth_factor = 1e4  # as in ExplodingGradient; tried 1e3 and 1e5
    _calm = 3  # by eye: one more than begin it
    _highest: dict[Output, float]
    _looks: int = 0
    _began_deep: bool | None = None

    def _set_up(self) -> None:
        self._highest = {}

    @property
    def wants_full(self) -> bool:
        """Whether one measurement was large and a second one would decide."""
        return self._looks == 1

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.course.follow(record)
        if not record.outputs:
            return ()
        found = self._grown(record)
        self._looks = self._looks + 1 if found else 0
        overflown = not record.all_grads_finite  # there will be no second look
        certain = self._looks >= 2 or overflown
        if not found and self._began_deep and self._is_deep(record):
            return ()  # as in the beginning
        return self._episode.update(record.step, found if certain else None)

    def _grown(self, record: StepRecord) -> Alert | None:
        found = None
        for output, tensor in record.outputs.items():
            name, now = output.module_name, tensor.variation
            highest = self._highest.get(output, 0.0)
            if highest and now > self.factor * highest and self.course.loss.is_worse:
                times = now / highest
                if found is None:
                    seen = f"The output of {called(name)} is {times:.2g} times as large as ever"
                    message = f"{seen} before.\n{_STEPS_TOO_LARGE}"
                    found = self._alert(record.step, name, times, self.factor, message)
            elif highest < tensor.sketch.rms < math.inf:
                self._highest[output] = tensor.sketch.rms
        growth = forward_growth(record)
        deep = self._is_deep(record)
        self._began_deep = deep if self._began_deep is None else self._began_deep
        if found is None and self.course.is_young and deep and self._began_deep:
            where, times = growth.stretch, 10**growth.decades
            assert where is not None
            seen = f"Activations grow {times:.2g}-fold through the network, most of all in "
            message = f"{seen}{where.shared}.\n{_WEIGHTS}"
            found = self._alert(record.step, where.first, times, self.depth_factor, message)
        return found

    def _is_deep(self, record: StepRecord) -> bool:
        return forward_growth(record).decades > math.log10(self.depth_factor)


_WEIGHTS = (
    "People usually make the initial weights smaller (He or Xavier initialization), scale the "
    "inputs, and add normalization."
)
_STEPS_TOO_LARGE = (
    "People usually lower the learning rate or warm it up, clip gradients, and add normalization."
)
