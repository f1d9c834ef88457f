"""Activations whose outputs lie on the flat part of their curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from telemetry.alerts.course import CourseRule
from telemetry.alerts.episode import Episode
from telemetry.alerts.forward import Forward
from telemetry.layers import table
from telemetry.layers.module_types import (
    BOUNDED,
    NORMALIZATIONS,
    STANDARD,
    Bounded,
    Flat,
    bucket_of,
)
from telemetry.plain_text import called
from telemetry.records import Alert, Output, StepRecord
from telemetry.sketch import Sketch


class SaturatedUnits(CourseRule):
    """Finds layers most of whose outputs lie where their activation no longer passes gradients.

    Which part is flat depends on what the module is; of tanh and sigmoid three quarters of it
    must lie where hardly any slope is left, as in no healthy net. For modules it does not know,
    and that have no parameters, the ends of the range they have kept to are taken, if the
    gradient hardly gets back through them. Functions that are no modules are seen through their
    neighbors: a layer's outputs are large, what the next layer receives is not, and hardly any
    gradient comes back.

    A gate that scales whole feature maps, as in squeeze and excitation, may be open or closed: what
    it scales has its gradients all the same.

    Outputs of the network may be flat because the predictions are right; only layers before others
    with parameters count. So may hidden ones after training (binary codes); so it speaks of layers
    that were flat from the beginning, that became so within 20 steps and to no advantage, or while
    the loss rose.

    Args:
        fraction: Of the outputs that are flat.
        looks: Full measurements in a row.
    """

    name = "saturated_units"
    _layers: dict[Output, _Layer]
    _ranges: dict[Output, tuple[float, float]]
    _undecided: bool
    _episode: Episode

    def __init__(self, *, fraction: float = 0.8, looks: int = 2) -> None:
        super().__init__()
        self._fraction = fraction
        self._looks_needed = looks
        self._layers = {}
        self._ranges = {}
        self._undecided = False
        self._episode = Episode(_CALM_LOOKS)

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
        for output, share in self._flat_shares(record):
            if self._is_faulty(output, share, record.step) and found is None:
                found = _alert(record, output, share, self._fraction)
        return self._episode.update(record.step, found)

    def _is_faulty(self, output: Output, share: float, step: int) -> bool:
        layer = self._layers.setdefault(output, _Layer())
        if share < self._fraction:
            layer.looks, layer.is_suspect = 0, False
            layer.fine_at = step if share < _FINE else layer.fine_at
            return False
        layer.looks += 1
        sudden = layer.fine_at is None or step - layer.fine_at <= _SUDDEN
        if self.course.loss.is_worse or (sudden and not self.course.loss.is_better):
            layer.is_suspect = True
        self._undecided |= layer.looks < self._looks_needed
        return layer.is_suspect and layer.looks >= self._looks_needed

    def _flat_shares(self, record: StepRecord) -> Iterator[tuple[Output, float]]:
        """Outputs of hidden layers and which share of them is flat, in forward order."""
        forward = Forward.of(record)
        for index in forward.hidden:
            output, type_name = forward.outputs[index], forward.types[index]
            after = forward.outputs[index + 1]
            if type_name in BOUNDED:
                if not forward.is_gate(index):
                    yield output, _share_flat(record, output, BOUNDED[type_name])
            elif forward.owned[index]:
                if forward.owned[index + 1] and forward.types[index + 1] not in NORMALIZATIONS:
                    yield output, _share_lost(record, output, after)
            elif type_name not in STANDARD and index > 0:
                yield output, self._share_at_ends(record, output, forward.outputs[index - 1])

    def _share_at_ends(self, record: StepRecord, output: Output, before: Output) -> float:
        """Of a module's outputs at the ends of its range, if gradients do not pass it."""
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
    """What is known of one layer.

    Attributes:
        looks: Full measurements in a row at which it was flat.
        fine_at: The last step at which it was not; None if it never was.
        is_suspect: Whether its being flat is no success of training.
    """

    looks: int = 0
    fine_at: int | None = None
    is_suspect: bool = False


_FLATTEST = 0.75
_FINE = 0.5
_SUDDEN = 20
_BLOCKED = 0.7
_CALM_LOOKS = 3
_LARGE = 10.0
_SMALL = 2.0


def _share_flat(record: StepRecord, output: Output, function: Bounded) -> float:
    """Of outputs where the function is flat, three quarters of which must be where it is flattest.

    The former is the layer's ``saturation``, as it is shown everywhere.
    """
    share = table(record).value(record.layout.position[output.module_name], "saturation") or 0.0
    if function.flattest is None:
        return share
    return min(share, function.flattest.share(record.outputs[output].sketch) / _FLATTEST)


def _share_faint(sketch: Sketch) -> float:
    """Of values a thousand times below the RMS."""
    if not sketch.finite_count or sketch.sum_squares == 0:
        return 1.0
    limit = bucket_of(1e-3 * sketch.rms)
    return float(sketch.counts[np.abs(sketch.buckets) < limit].sum() / sketch.finite_count)


def _share_lost(record: StepRecord, output: Output, after: Output) -> float:
    """Of a layer's positive outputs; lost to the gradient if what follows is bounded.

    Negative ones prove nothing, as a ReLU may follow. What the next layer receives is estimated
    from what it returns and the size of its weights.
    """
    sketch, gradient = record.outputs[output].sketch, record.output_grads.get(output)
    received = _received(record, after)
    if gradient is None or received is None or received > _SMALL or sketch.rms < _LARGE:
        return 0.0
    negative = Flat(low=-math.ulp(0.0)).share(sketch)
    faint = _share_faint(gradient.sketch)
    return max(faint - negative, 0.0) / (1 - negative) if negative < 1 else 0.0


def _received(record: StepRecord, output: Output) -> float | None:
    """RMS of what a linear or convolutional layer was given: ``rms_out * sqrt(out) / ||W||``."""
    for parameter in record.layout.parameters:
        if parameter.module_name == output.module_name and len(parameter.shape) > 1:
            weight = record.weights.get(parameter.name)
            if weight is None or weight.sketch.norm == 0:
                return None
            rms, units = record.outputs[output].sketch.rms, parameter.shape[0]
            return float(rms * units**0.5 / weight.sketch.norm)
    return None


def _alert(record: StepRecord, output: Output, share: float, fraction: float) -> Alert:
    return Alert(
        kind=SaturatedUnits.name,
        severity="warning",
        step=record.step,
        module_name=output.module_name,
        value=share,
        threshold=fraction,
        message=(
            f"{share:.0%} of the outputs of {called(str(output))} lie on the flat part of their "
            "activation; hardly any gradient gets through.\n"
            "People usually scale or center the inputs, make the initial weights smaller, and add "
            "normalization before the activation."
        ),
    )
