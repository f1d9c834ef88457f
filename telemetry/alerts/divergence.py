"""Losses that diverge: steps are too large, or gradients are never zeroed and add up."""

from __future__ import annotations

from statistics import median

import numpy as np

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline, Figures
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.alerts.window import Rise
from telemetry.layers.module_types import AFFINE, NORMALIZATIONS
from telemetry.plain_text import figure
from telemetry.records import StepRecord
from telemetry.records.moments import mean_of, rms_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import figures_of


class LossDivergence(Detector):
    """Steps move the weights by too large a share of their norm. The loss stays far above its past
    or loses half of its progress. Or gradients are never zeroed and add up.

    Evidence: the learning rate, and the value before it rose.
    Causes: a learning rate that is too large; a missing ``optimizer.zero_grad()``.
    Remedies: divide the learning rate by 3 to 10, warm it up; zero gradients in every step.
    Silent: a harder task, an annealed term, gradients that jumped first.
    Example: optimizer = torch.optim.SGD(model.parameters(), lr=100.0)

    Healthy update ratios are 0.001 to 0.01, and larger in the first steps while the loss falls. The
    losses must rise within 20 steps of a large one.
    """

    kind = "loss_divergence"
    statistic = "update_ratio"
    clear_after = 10  # losses
    explained_by = shared.EXPLOSIONS | {"loss_spike", "dead_units", "saturated_units", "nonfinite"}
    after = frozenset({"loss_spike"})
    update_ratio: float = limit(
        shared.LARGE_STEP, "Share of its norm by which a step moves the median weight matrix."
    )
    # At 6 mlp_lr_high, cnn_lr30 and mlp_adam_lr_high are missed; tried 1
    losses: int = limit(3, "Consecutive losses far above those before.")
    _ratio: float = state(0.0)
    _large_at: int = state(-shared.NEVER)
    _sums: SummedGradients = state(lambda: SummedGradients())
    _rise: Rise | None = state(None)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self._sums.add(record)
        ratio = baseline.step_ratio if record.update_ratios else baseline.ratio_now
        if ratio >= self.update_ratio:
            self._large_at, self._ratio = record.step, ratio
        loss = baseline.loss
        rises = loss.high or loss.losses_lost == shared.RECENT
        several = baseline.since_rate_jump <= shared.SOON or self._sums.needs_full_step
        is_candidate = several or (rises and not record.full)
        self.needs_full_step = self._sums.needs_full_step
        self.needs_full_step |= bool(is_candidate) and self.active_alert is None
        self.full_steps_in_a_row = 3 if several else 1
        if self._sums.is_sure:
            norm = record.total_grad_norm
            return Finding(
                summary="Gradients add up from step to step: their norm is "
                f"{figure(norm)}, and grows",
                cause=_NEVER_ZEROED,
                advice=(
                    "Call optimizer.zero_grad() in every step, before backward()",
                    "To accumulate gradients, step once for all of them, and zero them then",
                ),
                value=norm,
                # The learning rate was blamed before.
                escalates=self.active_alert is not None
                and self.active_alert.cause != _NEVER_ZEROED,
            )
        now = record.finite_loss
        if self.active_alert is not None or now is None:
            return None
        is_new = baseline.age < shared.RECENT and loss.excess > shared.JUMP
        enough = self.losses - (is_new or baseline.follows_rate_jump)
        # With fewer than a hundred steps, the best loss may be luck.
        lost = loss.losses_lost >= shared.RECENT and baseline.age > shared.LENGTH
        is_high = len(loss.high) >= enough or lost
        if not is_high or record.step - self._large_at > shared.LATEST or baseline.gradients_led:
            return None
        if (explained := baseline.has_more_examples) is not False:
            self.needs_full_step |= explained is None
            return None
        self._rise = loss.rise(loss.window.usual)
        rate, lowest = baseline.rate, baseline.lowest_rate
        cause = f"The learning rate is {figure(rate)}" if rate > 0 else None
        if 0 < lowest * shared.JUMP <= rate:
            cause = f"The learning rate rose from {figure(lowest)} to {figure(rate)}"
        moved = f"{self._ratio:.0%} of" if self._ratio < 10 else f"{figure(self._ratio, 2)}x"
        name, too_large = baseline.large_start
        return Finding(
            summary=f"The loss rose to {figure(now, 4)}, and one optimizer step moves the "
            f"weights by {moved} their norm",
            cause=too_large or cause,
            advice=_INITIALIZE if name else _LOWER,
            value=self._ratio,
            threshold=self.update_ratio,
            module_name=name or None,
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        if (loss := record.finite_loss) is None:
            return True
        return self._rise is not None and not self._rise.is_undone(loss)


_NEVER_ZEROED = "They are never zeroed"
_LOWER = ("Divide the learning rate by 3 to 10", "Warm it up")
_INITIALIZE = (
    "Make these weights smaller: PyTorch's defaults start at 0.4x He initialization",
    *_LOWER,
)


class SummedGradients:
    """Test whether each step's gradients are added to those of the step before.

    A bias is added to each output of its layer, so its gradient is the sum of the gradients of
    these outputs (chain rule). If gradients are not zeroed, it is that sum plus the bias's gradient
    of the step before, which two consecutive full steps show. Clipping and loss scaling multiply
    all gradients by one factor, which is estimated if there are several layers. If neither holds
    (gradients averaged over ranks, a second backward pass, noise), the result is undecided.
    """

    is_sure: bool = False  # two consecutive pairs of steps show it, and none since contradicts
    needs_full_step: bool = False  # two consecutive full steps would decide
    _step: int = -2
    _biases: dict[str, float]
    _pairs: int = 0
    _norms: tuple[float, ...] = ()
    _requested: int = 0

    def __init__(self) -> None:
        self._biases = {}

    def add(self, record: StepRecord) -> None:
        if len(self._norms) <= _RISING:  # sums grow at each of the first steps
            self._norms = (*self._norms, record.total_grad_norm)
            rises = len(self._norms) > _RISING and bool(np.all(np.diff(self._norms) > 0))
            self._request(rises and self._norms[-1] > _SUMMED * self._norms[0])
        is_first = len(self._norms) == 1
        if not record.full:
            return
        given, biases = bias_gradients(record)
        before = self._biases if record.step == self._step + 1 else {}
        if given:
            now, own = np.array([biases[name] for name in given]), np.array([*given.values()])
            if _is_one_factor(now, own):
                self._pairs, self.is_sure, self.needs_full_step = 0, False, False
            elif before.keys() >= given.keys():
                old = np.array([before[name] for name in given])
                # Where nothing is clipped, the factor is 1. In SAM it is another one: the gradients
                # of the first of its passes are zeroed.
                whole, used = record.total_grad_norm_before_clipping, record.total_grad_norm
                factor = used / whole if whole else None
                self._pairs = self._pairs + 1 if _is_one_factor(now, own + old, factor) else 0
                self.is_sure |= self._pairs >= _PAIRS
                self.needs_full_step &= not self.is_sure and self._pairs > 0
            elif is_first:  # there is nothing to add: the test does not work for this model
                self._requested = shared.SEVERAL
            else:
                self._request(not self.is_sure)
        self._step, self._biases = record.step, biases

    def _request(self, might: bool) -> None:
        if might and not self.needs_full_step and self._requested < shared.SEVERAL:
            self.needs_full_step = True
            self._requested += 1


def bias_gradients(record: StepRecord) -> tuple[dict[str, float], dict[str, float]]:
    """Return the sums of each layer's output gradients, and its bias's gradient.

    Sums that cancel out are omitted, as for the logits of a cross entropy.
    """
    given, biases, layout = {}, {}, record.layout
    of_biases, rows = figures_of(record.grads, _sum_of), record.activation_grads.rows
    totals, limits = _sum_of(rows), _ROUNDING * rms_of(rows) * rows.count
    for row, name in enumerate(record.activation_grads):
        bias = of_biases.get(f"{name}.bias")
        adds_bias = layout.modules[layout.position[name]].type_name in _ADD_BIAS
        if bias is not None and adds_bias and rows.count[row]:
            biases[name] = bias
            if abs(totals[row]) > limits[row]:
                given[name] = float(totals[row])
    return given, biases


def _sum_of(rows: Rows) -> Figures:
    """Return the sums of the finite values, scaled to all values."""
    return mean_of(rows) * rows.count  # type: ignore[no-any-return]


def _is_one_factor(values: Figures, others: Figures, known: float | None = None) -> bool:
    """Whether ``values == factor * others`` for the known factor, or for any of at most 1.

    Of one value, it is 1.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = values / others
    if np.isnan(ratios).any():
        return False
    factor = median(ratios.tolist()) if len(ratios) >= _PAIRS else 1.0
    if factor > 1 + shared.ROUNDED or (known and abs(factor - known) > shared.FEW * known):
        return False
    near = np.abs(ratios - factor) <= shared.ROUNDED * abs(factor)
    return bool(np.count_nonzero(near) > shared.MOST * len(near))


_ADD_BIAS = AFFINE | NORMALIZATIONS
# Five random norms rise at each step once in 120 times: that costs full steps, no alert.
_RISING = 4  # consecutive steps with a larger norm than the one before
_SUMMED = 2.0  # times the first norm; five independent gradients add up to 2.2
_PAIRS = 2  # one may be a coincidence
_ROUNDING = 1e-4  # a thousand times float32's
