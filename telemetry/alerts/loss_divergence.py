"""A loss that rises because the steps are too large."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from statistics import median

import numpy as np

from telemetry.alerts.baseline import (
    AFTER_JUMP,
    JUMP,
    LARGE_STEP,
    LENGTH,
    NEVER,
    RECENT,
    Baseline,
    Figures,
    Rise,
    finite_loss,
)
from telemetry.alerts.detector import EXPLOSIONS, Detector, Finding
from telemetry.layers.module_types import AFFINE, NORMALIZATIONS
from telemetry.records import StepRecord
from telemetry.records.moments import mean_of, rms_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import figures_of


class LossDivergence(Detector):
    """Alerts when steps move the weights too far and the loss has risen since.

    A loss may rise for good reasons: a harder task, an annealed term, two networks that compete.
    The learning rate is to blame when an optimizer step moves the median weight matrix by at least
    ``update_ratio`` of its norm (healthy runs have 0.001 to 0.01; their first steps may be larger,
    but then the loss falls; between two measurements it grows with the learning rate), and

    - within 20 steps, ``losses`` in a row are all far above those before. One less is enough if the
      learning rate has just jumped above all former ones, or if it is that of the first steps and
      the loss has become several times as high; or
    - half of what was learned has been lost, after the first hundred steps.

    If gradients jumped and the learning rate did not, it is silent: ``exploding_gradient`` covers
    that. It is over when :class:`Rise` is undone.

    It alerts, too, when gradients are never zeroed, so that those of all steps add up and steps
    become ever larger (see :class:`SummedGradients`); the loss is high soon after.
    """

    kind = "loss_divergence"
    clear_after = 10  # losses
    explained_by = EXPLOSIONS | {"loss_spike", "dead_units", "saturated_units", "nonfinite"}
    update_ratio = LARGE_STEP
    losses = 3  # at 6 mlp_lr_high, cnn_lr30 and mlp_adam_lr_high are missed; tried 1
    _ratio: float = 0.0
    _large_at: int = -NEVER
    _sums: SummedGradients
    _rise: Rise | None = None

    def set_up(self) -> None:
        self._sums = SummedGradients()

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self._sums.add(record)
        ratio = baseline.step_ratio if record.update_ratios else baseline.ratio_now
        if ratio >= self.update_ratio:
            self._large_at, self._ratio = record.step, ratio
        loss = baseline.loss
        rises = loss.high or loss.losses_lost == RECENT
        several = baseline.since_rate_jump <= _JUST or self._sums.needs_full_step
        lasts = baseline.may_step_far or len(loss.high) != 1
        suspicious = several or (rises and lasts and not record.full)
        self.needs_full_step, self.full_steps_in_a_row = (
            bool(suspicious) and self.active_alert is None,
            3 if several else 1,
        )
        if self._sums.is_sure:
            return self._summed(record)
        if self.active_alert is not None or finite_loss(record) is None:
            return None
        is_new = baseline.is_young and loss.excess > _FAR
        enough = self.losses - (is_new or baseline.follows_rate_jump)
        lost = loss.losses_lost >= RECENT and baseline.age > LENGTH  # of fewer, the best is luck
        is_high = len(loss.high) >= enough or lost
        if not is_high or record.step - self._large_at > AFTER_JUMP or baseline.gradients_led:
            return None
        usual = loss.past.usual
        self._rise = Rise(first=loss.first, usual=usual, peak=usual)
        return self._found(record, baseline)

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        if (loss := finite_loss(record)) is None:
            return True
        return self._rise is not None and not self._rise.is_undone(loss)

    def _found(self, record: StepRecord, baseline: Baseline) -> Finding:
        rate, lowest = baseline.rate, baseline.lowest_rate
        at = f" at a learning rate of {rate:.3g}" if rate > 0 else ""
        if 0 < lowest * JUMP <= rate:
            at = f" since the learning rate rose from {lowest:.3g} to {rate:.3g}"
        ratio = f"{self._ratio:.0%} of" if self._ratio < 10 else f"{self._ratio:.2g} times"
        name, because = baseline.large_start
        return Finding(
            summary=f"The loss has risen to {record.loss:.4g}, far above earlier ones, and one "
            f"optimizer step moves the weights by {ratio} their norm{at}{because}",
            advice=_INITIALIZE if name else _LOWER,
            value=self._ratio,
            threshold=self.update_ratio,
            module_name=name or None,
        )

    def _summed(self, record: StepRecord) -> Finding:
        norm = record.total_grad_norm
        return Finding(
            summary="The gradients of each step are added to those of the steps before, which "
            f"nobody zeroes: their norm is {norm:.3g} by now, and steps become ever larger",
            advice=(
                "Call optimizer.zero_grad() in every step, before backward(). To accumulate "
                "gradients, step once for all of them, and zero them then.",
            ),
            value=norm,
            threshold=0.0,
        )


_LOWER = ("Divide the learning rate by 3 to 10", "Warm it up")
_INITIALIZE = (
    "Make these weights smaller (PyTorch's own begin at 0.4 times He's); if they are meant to be "
    "so, divide the learning rate by 3 to 10, and warm it up.",
)
_JUST = 2  # steps after a jump of the learning rate that are measured in full; tried 1 and 4
_FAR = 3.0  # times the loss itself; meta_learning, which learns, has 2.4 in its first steps


class SummedGradients:
    """Whether each step's gradients are added to those of the step before.

    A bias is added to each output of its layer, so its gradient is the sum of the gradients of
    these outputs (chain rule). Both sums are measured at full steps. At two of them in a row, the
    gradient of a bias is

    - that sum, if gradients are zeroed;
    - that sum plus the bias's gradient of the step before, if they are not.

    Clipping and loss scaling multiply all gradients by the same factor, which is therefore left
    open where there are several layers. Where neither holds (gradients averaged over ranks, a
    second backward pass, noise), nothing is said.
    """

    is_sure: bool = False  # two pairs of steps in a row have shown it, and none the contrary since
    needs_full_step: bool = False  # two full measurements in a row would tell
    _step: int = -2
    _biases: dict[str, float]
    _pairs: int = 0
    _norms: tuple[float, ...] = ()
    _asked: int = 0

    def __init__(self) -> None:
        self._biases = {}

    def add(self, record: StepRecord) -> None:
        """Look at one step."""
        if len(self._norms) <= _RISING:  # sums grow at each of the first steps
            self._norms = (*self._norms, record.total_grad_norm)
            rises = len(self._norms) > _RISING and bool(np.all(np.diff(self._norms) > 0))
            self._ask(rises and self._norms[-1] > _SUMMED * self._norms[0])
        is_first = len(self._norms) == 1
        if not record.full:
            return
        given, biases = _sums(record)
        if given:
            before = self._biases if record.step == self._step + 1 else {}
            self._judge(given, biases, before, is_first=is_first)
        self._step, self._biases = record.step, biases

    def _judge(
        self,
        given: Mapping[str, float],
        biases: Mapping[str, float],
        before: Mapping[str, float],
        *,
        is_first: bool,
    ) -> None:
        now = np.array([biases[name] for name in given])
        own = np.array(list(given.values()))
        if _is_one_factor(now, own):
            self._pairs, self.is_sure, self.needs_full_step = 0, False, False
        elif before.keys() >= given.keys():
            old = np.array([before[name] for name in given])
            self._pairs = self._pairs + 1 if _is_one_factor(now, own + old) else 0
            self.is_sure |= self._pairs >= _PAIRS
            self.needs_full_step &= not self.is_sure and self._pairs > 0
        elif is_first:  # there is nothing to add, so neither holds for this model
            self._asked = _ASKED
        else:
            self._ask(not self.is_sure)

    def _ask(self, might: bool) -> None:
        if might and not self.needs_full_step and self._asked < _ASKED:
            self.needs_full_step = True
            self._asked += 1


def _sums(record: StepRecord) -> tuple[dict[str, float], dict[str, float]]:
    """Of each layer's output gradients, where they do not cancel out; and of its bias's gradient.

    Those of cross entropy's logits cancel out exactly.
    """
    given, biases = {}, {}
    of_biases = figures_of(record.grads, _sum_of)
    totals = figures_of(record.activation_grads, _sum_of)
    sizes = figures_of(record.activation_grads, rms_of)
    counts = figures_of(record.activation_grads, attrgetter("count"))
    for module in record.layout.modules:
        name, bias = module.name, of_biases.get(f"{module.name}.bias")
        if module.type_name not in _ADD_BIAS or bias is None or not counts.get(name):
            continue
        biases[name] = bias
        if abs(totals[name]) > _ROUNDING * sizes[name] * counts[name]:
            given[name] = totals[name]
    return given, biases


def _sum_of(rows: Rows) -> Figures:
    """As if all values were finite."""
    sums: Figures = mean_of(rows) * rows.count
    return sums


def _is_one_factor(values: Figures, others: Figures) -> bool:
    """Whether values are others times one factor up to 1, which is 1 if there are few of them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = values / others
    if np.isnan(ratios).any():
        return False
    factor = median(ratios.tolist()) if len(ratios) >= _FEW else 1.0
    if factor > 1 + _NEAR:
        return False
    near = np.abs(ratios - factor) <= _NEAR * abs(factor)
    return bool(np.count_nonzero(near) > _MOST * len(near))


_ADD_BIAS = AFFINE | NORMALIZATIONS
# Of five norms in any order, one in 120 rises at each step; it costs full measurements, no alert.
_RISING = 4  # steps in a row with a larger norm than the one before
_SUMMED = 2.0  # times the first norm; five gradients that have nothing in common add up to 2.2
_PAIRS = 2  # so that a coincidence of one step does not pass
_ASKED = 3  # times; where neither holds, more looks would show nothing
_ROUNDING = 1e-4  # a thousand times float32's
_NEAR = 0.01  # sums are exact to 1e-5, in bfloat16 to 0.004
_MOST = 0.7  # of the layers: hooks of the user may change some
_FEW = 2
