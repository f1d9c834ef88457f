"""Activations whose outputs lie on the flat part of their curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from telemetry.alert import Alert
from telemetry.alerts.episode import EpisodeRule
from telemetry.alerts.modules import Forward
from telemetry.layers import table
from telemetry.layers.module_types import (
    AFFINE,
    BOUNDED,
    STANDARD,
    Bounded,
    Flat,
    bucket_of,
)
from telemetry.plain_text import called, printable
from telemetry.records import Output, StepRecord
from telemetry.sketch import Sketch


class SaturatedUnits(EpisodeRule):
    """Alerts when most outputs of a layer lie where its activation function is flat.

    There it passes hardly any gradient. Which part is flat depends on the type of the module. Of
    tanh and sigmoid, three quarters of these outputs must also lie where hardly any slope is left,
    which healthy networks do not reach. For modules of unknown type and without parameters, the
    flat part is the ends of the range that their outputs have had, if hardly any gradient passes
    them. Functions that are not modules show in their neighbors: a layer's outputs are large, what
    the next layer receives is not, and hardly any gradient comes back.

    A gate that scales whole feature maps, as in squeeze and excitation, may be open or closed: what
    it scales keeps its gradients.

    The network's own outputs may be flat because predictions are right, so only layers that are
    followed by others with parameters count. Hidden layers may become flat by training (binary
    codes), so a layer must have been flat from the beginning, or have become flat within 20 steps
    without an improvement of the loss, or while the loss rose.

    Args:
        fraction: Share of the outputs that are flat.
        looks: Number of full measurements in a row.
    """

    name = "saturated_units"
    # Healthy hidden layers have 21 % at most, faulty ones 90 % or more; the exception are the gates
    # of highway_carry_gates, which _FLATTEST is for. Tried 0.4 and 0.95.
    fraction = 0.8
    looks = 2  # the fewest that confirm each other; tried 1 and 4
    _calm = 3  # by eye: one more than begin it
    _layers: dict[Output, _Layer]
    _ranges: dict[Output, tuple[float, float]]
    _undecided: bool = False

    def _set_up(self) -> None:
        self._layers = {}
        self._ranges = {}

    @property
    def wants_full(self) -> bool:
        """Whether a layer is flat, but not for long enough."""
        return self._undecided and not self._episode.is_on

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.course.follow(record)
        if not record.full or not record.all_grads_finite:
            return ()
        self._undecided = False
        found = None
        shares = list(self._flat_shares(record))
        for output, share in shares:
            if self._is_faulty(output, share, record.step) and found is None:
                found = self._found(record, output, share)
        layer = self._episode.module_name
        if found is None and any(
            output.module_name == layer and share >= _FINE for output, share in shares
        ):
            return ()
        return self._episode.update(record.step, found)

    def _found(self, record: StepRecord, output: Output, share: float) -> Alert:
        name, layout = output.module_name, record.layout
        what = f"{share:.0%} of the outputs of {called(str(output))}"
        if any(parameter.module_name == name for parameter in layout.parameters):
            message = (
                f"{what} are so large that what follows is most likely flat there; hardly any "
                "gradient comes back.\n"
                "People usually make its weights smaller or normalize: queries and keys where they "
                "go into a softmax, else what goes into the activation."
            )
        else:
            kind = printable(layout.modules[layout.position[name]].type_name)
            message = (
                f"{what} lie on the flat part of {kind}; hardly any gradient gets through.\n"
                "People usually scale or center the inputs, make the initial weights smaller, and "
                "add normalization before the activation."
            )
        return self._alert(record.step, name, share, self.fraction, message)

    def _is_faulty(self, output: Output, share: float, step: int) -> bool:
        layer = self._layers.setdefault(output, _Layer())
        if share < self.fraction:
            layer.looks, layer.is_suspect = 0, False
            layer.fine_at = step if share < _FINE else layer.fine_at
            return False
        layer.looks += 1
        sudden = layer.fine_at is None or step - layer.fine_at <= _SUDDEN
        if self.course.loss.is_worse or (sudden and not self.course.loss.is_better):
            layer.is_suspect = True
        self._undecided |= layer.looks < self.looks
        return layer.is_suspect and layer.looks >= self.looks

    def _flat_shares(self, record: StepRecord) -> Iterator[tuple[Output, float]]:
        """Outputs of hidden layers, and the share of each that is flat, in forward order."""
        forward = Forward.of(record)
        for index in forward.hidden:
            output, type_name = forward.outputs[index], forward.types[index]
            after = forward.outputs[index + 1]
            if type_name in BOUNDED:
                if not forward.is_gate(index):
                    yield output, _share_flat(record, output, BOUNDED[type_name])
            elif forward.owned[index]:
                if forward.types[index + 1] in AFFINE:
                    yield output, _share_lost(record, output, after)
            elif type_name not in STANDARD and index > 0:
                yield output, self._share_at_ends(record, output, forward.outputs[index - 1])

    def _share_at_ends(self, record: StepRecord, output: Output, before: Output) -> float:
        """Share of a module's outputs at the ends of its range; 0 if gradients pass it."""
        sketch = record.outputs[output].sketch
        low, high = self._ranges.get(output, (math.inf, -math.inf))
        low, high = min(low, sketch.min), max(high, sketch.max)
        self._ranges[output] = low, high
        gradient = record.output_grads.get(before)
        if gradient is None or _share_faint(gradient.sketch) < _BLOCKED or low == high:
            return 0.0
        if low == 0:  # a kind of ReLU: zero is its flat part, and not a fault
            return Flat(high=high).share(sketch)
        return Flat(low=low, high=high).share(sketch)


@dataclass(kw_only=True)
class _Layer:
    """What the rule remembers of one layer.

    Attributes:
        looks: Number of full measurements in a row at which it was flat.
        fine_at: The last step at which it was not; None if it never was.
        is_suspect: Whether it became flat in a way that training does not explain.
    """

    looks: int = 0
    fine_at: int | None = None
    is_suspect: bool = False


_FLATTEST = 0.75  # so that nearly closed gates pass; by eye; tried 0.375 and 0.95
_FINE = 0.5  # by eye; tried 0.25 and 0.95
_SUDDEN = 20  # by eye, in steps: two full measurements in faultbench; tried 10 and 40
# By eye; tried 0.14 and 0.95. Beyond 1, where nothing counts, lecun_tanh_saturates is missed.
_BLOCKED = 0.7
_FAINT = 1e-3  # by eye; tried 0.0005 and 0.002
_LARGE = 10.0  # tanh has slope 1e-8 there; tried 2 and 50
# Bounded functions return 1 at most, and few sums of them are much larger. At 0.4
# rnncell_saturated is missed; tried 1 and 10.
_SMALL = 2.0


def _share_flat(record: StepRecord, output: Output, function: Bounded) -> float:
    """Share of outputs where the function is flat, if most are where it is flattest.

    The first share is the layer's ``saturation`` in :data:`telemetry.layers.STATISTICS`.
    """
    share = table(record).value(record.layout.position[output.module_name], "saturation") or 0.0
    if function.flattest is None:
        return share
    return min(share, function.flattest.share(record.outputs[output].sketch) / _FLATTEST)


def _share_faint(sketch: Sketch) -> float:
    """Share of the values that are a thousand times smaller than the RMS."""
    if not sketch.finite_count or sketch.sum_squares == 0:
        return 1.0
    limit = bucket_of(_FAINT * sketch.rms)
    return float(sketch.counts[np.abs(sketch.buckets) < limit].sum() / sketch.finite_count)


def _share_lost(record: StepRecord, output: Output, after: Output) -> float:
    """Share of a layer's positive outputs that get no gradient because a bounded function follows.

    Negative outputs prove nothing, as a ReLU may follow. What the next layer receives is estimated
    from what it returns and from the norm of its weights.
    """
    sketch, gradient = record.outputs[output].sketch, record.output_grads.get(output)
    received = _received(record, after)
    if gradient is None or received is None or received > _SMALL or sketch.rms < _LARGE:
        return 0.0
    negative = Flat(low=-math.ulp(0.0)).share(sketch)
    faint = _share_faint(gradient.sketch)
    return max(faint - negative, 0.0) / (1 - negative) if negative < 1 else 0.0


def _received(record: StepRecord, output: Output) -> float | None:
    """RMS of the input of a linear or convolutional layer: ``rms_out * sqrt(out) / ||W||``."""
    for parameter in record.layout.parameters:
        if parameter.module_name == output.module_name and len(parameter.shape) > 1:
            weight = record.weights.get(parameter.name)
            if weight is None or weight.sketch.norm == 0:
                return None
            rms, units = record.outputs[output].sketch.rms, parameter.shape[0]
            return float(rms * units**0.5 / weight.sketch.norm)
    return None
