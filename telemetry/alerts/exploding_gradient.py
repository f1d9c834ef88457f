"""Gradients that grow far beyond what they were, or from layer to layer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts.depth import backward_growth, forward_growth
from telemetry.alerts.episode import Episode
from telemetry.alerts.history import History, LossTrend
from telemetry.alerts.modules import Modules
from telemetry.records import Alert, StepRecord


class ExplodingGradient:
    """Compares the gradients with the run's own past, and the layers with each other.

    *In time*: how far the total norm lies above the highest of the last 100 steps, on a logarithmic
    scale. Heavy-tailed data, rare classes and warm restarts stay within a factor of ten of their
    own maximum. It explodes when it exceeds that maximum ``factor`` times in two steps in a row or
    ten times as much in one; or, for ten steps, ``lasting_factor`` times what it was more than 20
    steps ago, while the loss, too, has left its range and does not come back. (A loss that is given
    another weight, or harder data, raises both as well; then the loss falls again.)

    *Over depth*: an explosion that is there from the beginning multiplies activations on their way
    forward and gradients on their way back, both from layer to layer. Either alone is common: small
    inputs, outputs in large units, side branches with small gradients. The product of both growths
    is an explosion from ``depth_factor`` on, if each has a third of its decades and they are there
    in the first steps, before training can have caused them. It takes two measurements, or one that
    is thirty times larger. Later, where clipping hides the norm, both must have grown tenfold, and
    the loss risen.

    Args:
        factor: Above the highest norm of the last 100 steps, for two steps.
        lasting_factor: Above that of older steps, for ten steps with a loss that has risen.
        depth_factor: Growth of activations from the first module to the largest, times that of
            their gradients on the way back.
        loss: Where the loss is followed; rules may share it.
    """

    kind = "exploding_gradient"

    def __init__(
        self,
        *,
        factor: float = 1000.0,
        lasting_factor: float = 30.0,
        depth_factor: float = 1e4,
        loss: LossTrend | None = None,
    ) -> None:
        self._decades = math.log10(factor)
        self._lasting_decades = math.log10(lasting_factor)
        self._depth_decades = math.log10(depth_factor)
        self._totals = History(100)
        self._older: deque[float] = deque(maxlen=_OLDER)
        self._long_ago = History(100)
        self._depths = History(50)
        self._loss = loss or LossTrend()
        self._blame = _Blame()
        self._steps_far_above = 0
        self._steps_above = 0
        self._deep_looks = 0
        self._first_step: int | None = None
        self._episode = Episode(_CALM_STEPS)

    @property
    def wants_full(self) -> bool:
        """Whether a full measurement would help to decide."""
        return not self._episode.is_on and (self._steps_above > 0 or self._deep_looks > 0)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self._loss.see(record)
        if self._first_step is None:
            self._first_step = record.step
        if not record.grad_finite.all():
            found = self._cut_short(record)
            return self._episode.update(record, found) if found else ()
        return self._episode.update(record, self._in_time(record) or self._over_depth(record))

    def _in_time(self, record: StepRecord) -> Alert | None:
        self._blame.add(record)
        total = record.total_grad_norm
        if total == 0:
            return None
        level = math.log10(total)
        if len(self._totals) < _SHORTEST_HISTORY:
            self._totals.add(level)
            return None
        above = level - self._totals.highest
        far = level - self._long_ago.highest if len(self._long_ago) else above
        self._steps_far_above = self._steps_far_above + 1 if above >= self._decades else 0
        self._steps_above = self._steps_above + 1 if far >= self._lasting_decades else 0
        usual = self._long_ago.median if len(self._long_ago) else self._totals.median
        self._remember(level, above)
        lost = self._loss.is_worse and not self._loss.is_recovering
        explodes = (
            self._steps_far_above >= 2
            or above >= self._decades + 1
            or (self._steps_above >= _LASTING and lost)
        )
        if not explodes:
            return None
        return _alert(
            record,
            module_name=self._blame.module_name,
            value=total,
            threshold=10 ** (usual + self._lasting_decades),
            seen=f"The gradient norm is {total:.3g}, it used to be {10**usual:.3g}",
        )

    def _remember(self, level: float, above: float) -> None:
        """What explodes is not what is usual, unless it lasts."""
        if above < self._lasting_decades or self._steps_above > _NEW_NORMAL:
            self._totals.add(level)
            if len(self._older) == _OLDER:
                self._long_ago.add(self._older[0])
            self._older.append(level)

    def _over_depth(self, record: StepRecord) -> Alert | None:
        if not record.activations or not record.activation_grads:
            return None
        forward, backward = forward_growth(record), backward_growth(record)
        product = forward.decades + backward.decades
        smaller = min(forward.decades, backward.decades)
        if self._is_early(record):
            deep = product >= self._depth_decades and smaller >= self._depth_decades / 3
            certain = deep and product >= self._depth_decades + _CERTAIN
        else:
            usual = self._depths.median if len(self._depths) else smaller
            deep = smaller >= usual + 1 and self._loss.is_worse
            certain = False
        self._deep_looks = self._deep_looks + 1 if deep else 0
        if not deep:
            self._depths.add(smaller)
        if self._deep_looks < 2 and not certain:
            return None
        return _alert(
            record,
            module_name=forward.module_name,
            value=10**product,
            threshold=10**self._depth_decades,
            seen=(
                f"Activations grow {10**forward.decades:.2g}-fold through the network and their "
                f"gradients {10**backward.decades:.2g}-fold on the way back"
            ),
        )

    def _cut_short(self, record: StepRecord) -> Alert | None:
        """An explosion that was about to be told when the numbers overflowed."""
        if self._episode.is_on or not (self._deep_looks or self._steps_above):
            return None
        return _alert(
            record,
            module_name=self._blame.module_name,
            value=math.inf,
            threshold=10**self._depth_decades,
            seen="Gradients grew until the numbers overflowed",
        )

    def _is_early(self, record: StepRecord) -> bool:
        return self._first_step is not None and record.step < self._first_step + _EARLY


_SHORTEST_HISTORY = 10
_LASTING = 10
_NEW_NORMAL = 50
_OLDER = 20
_CERTAIN = 1.5
_EARLY = 5
_CALM_STEPS = 50


class _Blame:
    """Which module is behind a sudden growth of the gradients.

    If its weights grew, its outputs do, which a full measurement shows: of the modules whose
    outputs grew, it runs first. From the norms alone: in a network of ReLUs all gradients grow but
    its own, which does not contain its weight.
    """

    def __init__(self) -> None:
        self._modules: Modules | None = None
        self._norms = np.zeros(0)
        self._outputs: dict[str, float] = {}
        self.module_name: str | None = None

    def add(self, record: StepRecord) -> None:
        before = self._modules
        if before is None or before.layout is not record.layout:
            self._modules = Modules(record.layout)
            names = before.names if before is not None else ()
            self._norms = self._modules.carry(self._norms, names, np.nan)
        modules = self._modules
        assert modules is not None
        grown_output = self._first_grown_output(record)
        if grown_output is not None:
            self.module_name = grown_output
        norms = modules.grad_norms(record)
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = np.log10(norms / self._norms)
        self._remember(norms, growth, modules)

    def _remember(
        self, norms: NDArray[np.float64], growth: NDArray[np.float64], modules: Modules
    ) -> None:
        known = np.isfinite(growth)
        if known.sum() >= 3 and np.median(growth[known]) > 1:
            order = np.sort(growth[known])
            if order[1] - order[0] > 1:
                self.module_name = modules.names[int(np.where(known, growth, np.inf).argmin())]
            return
        usual = np.isnan(self._norms) | (norms > 0)
        self._norms = np.where(usual, norms, self._norms)

    def _first_grown_output(self, record: StepRecord) -> str | None:
        first = None
        for name, output in record.activations.items():
            rms = output.sketch.rms
            before = self._outputs.get(name)
            if before is not None and rms > _GROWN * before:
                first = first if first is not None else name.partition("[")[0]
            elif 0 < rms < math.inf:
                self._outputs[name] = rms
        return first


_GROWN = 10.0


def _alert(
    record: StepRecord, *, module_name: str | None, value: float, threshold: float, seen: str
) -> Alert:
    where = f", most likely because of {module_name}" if module_name else ""
    return Alert(
        kind=ExplodingGradient.kind,
        severity="error",
        step=record.step,
        module_name=module_name,
        value=value,
        threshold=threshold,
        message=(
            f"{seen}{where}.\n"
            "People usually clip gradients (clip_grad_norm_), lower the learning rate or warm it "
            "up, check the batch and the initialization, and add normalization."
        ),
    )
