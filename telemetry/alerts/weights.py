"""Weights that jump, or that steps hardly move; trends by a factor."""

from __future__ import annotations

import math
from collections import deque
from itertools import compress
from statistics import median

import numpy as np

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline, Figures, matrix_sizes, with_matrices
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.layers import table
from telemetry.plain_text import called, called_all, figure
from telemetry.records import StepRecord


class WeightJump(Detector):
    """Weight matrices became three times as large between two full steps, though the optimizer had
    hardly changed them before. A note if they became smaller.

    Evidence: the parameter, and the last full step before the change.
    Causes: code that writes to it (a copy, a wrong checkpoint), a gradient that was far too large.
    Remedies: find writes outside of the optimizer; clip gradients.
    Silent: the first three full steps, jumps of a third of the matrices or of the learning rate.
    Example: model[0].weight.data.mul_(10.0)

    In logarithms, it is thirty times more per step than ever before. A note since layers are pruned
    and reset on purpose.
    """

    kind = "weight_jump"
    statistic = "weight_norm"
    on = "full"
    explained_by = shared.DIVERGED | {"nonfinite", "dead_units", "saturated_units"}
    after = explained_by
    # Healthy runs have 2.3, after a spike (llm_spike_recovers)
    factor: float = limit(shared.JUMP, "Growth of a matrix between two full steps.")
    _names: tuple[str, ...] | None = state(None)
    _steps: tuple[int, ...] = state(())  # the latest full steps
    _levels: Figures = state(np.zeros(0))  # logarithms of the sizes at the last one
    _fastest: Figures = state(np.zeros(0))  # change per step

    @np.errstate(divide="ignore", invalid="ignore")  # of weights that are zero
    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        sizes = matrix_sizes(record)
        names, levels = tuple(sizes), np.log([*sizes.values()])
        known, before, fastest = self._steps, self._levels, self._fastest
        self._levels = levels
        if names != self._names:
            self._names, self._steps, self._fastest = names, (record.step,), np.zeros(len(names))
            return None
        changes, steps = levels - before, record.step - known[-1]
        changes[~np.isfinite(before)] = math.inf  # growth from zero has no limit
        self._steps = (*known[-shared.SEVERAL :], record.step)
        self._fastest = np.maximum(fastest, np.abs(changes) / steps)
        usual = fastest * steps
        least = np.maximum(shared.THIRTYFOLD * np.maximum(usual, _STEADY), math.log(self.factor))
        # Matrices that have never moved were frozen, and have no usual speed.
        judged = (changes < math.inf) & (fastest > 0)
        (jumped,) = (judged & (np.abs(changes) > least)).nonzero()
        is_new = len(known) <= shared.SEVERAL or known[-1] - known[0] < steps
        is_several = len(jumped) > max(1, len(names) / 3)
        if is_new or not len(jumped) or is_several or baseline.since_rate_jump <= steps:
            return None
        most = jumped[np.abs(changes[jumped]).argmax()]
        times = math.exp(changes[most])
        parameter = record.layout.parameters[record.layout.parameter_position[names[most]]]
        smaller = f"{figure(1 / times)}x smaller than" if times else "0, unlike"
        size = f"{figure(times)}x larger than" if times > 1 else smaller
        return Finding(
            summary=f"{called(parameter.name)} is {size} at step {known[-1]}, after "
            f"changes of {figure(math.expm1(usual[most]), 2)} of its size at most in as many steps",
            advice=(
                "Check for code that writes to it: a copy, a reset, a checkpoint, another unit",
                "Clip gradients if one batch did it",
            ),
            value=times,
            threshold=self.factor if times > 1 else 1 / self.factor,
            module_name=parameter.module_name,
            severity=None if times > 1 else "note",
            momentary=True,
        )


_STEADY = 0.02  # in natural logarithms, as all here


class LayersNotLearning(Detector):
    """Weights with gradients move a thousand times less than others, for 100 steps.

    Evidence: the layers, and their update ratio compared with the largest.
    Causes: a learning rate that falls too fast from layer to layer, a parameter group with rate 0.
    Remedies: check the learning rates of the parameter groups.
    Silent: frozen layers, missing gradients, layers that move by a hundredth, as in fine-tuning.
    Example:
        groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
    """

    kind = "layers_not_learning"
    statistic = "update_ratio"
    on = "full"
    clear_after = shared.SEVERAL
    explained_by = (
        shared.INACTIVE
        | shared.EXPLOSIONS
        | {"no_learning", "output_collapse", "untrained_parameters"}
    )
    # Embeddings of rare words have 0.02, fine-tuning with a decay of 0.65 over 12 layers 0.006.
    share: float = limit(
        shared.TINY, "Update ratio over that of the fastest quarter of the layers."
    )
    steps: int = limit(shared.LENGTH, "Steps over which three full steps show this.")
    full_steps_in_a_row: int = state(shared.AGAIN)
    _names: tuple[str, ...] = state(())
    _since: Figures = state(np.zeros(0))
    _evaluations: Figures = state(np.zeros(0))
    _is_left: bool = state(False)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        layout, names = record.layout, record.layout.owner_names
        if names != self._names:
            self._names = names
            self._since, self._evaluations = np.zeros((2, len(names)))
        ratios = table(record).column("update_ratio")[layout.owning]
        ratios[~with_matrices(layout)] = np.nan
        moved = ratios[np.isfinite(ratios) & (ratios > 0)]
        if not moved.size:
            return None
        usual = float(np.quantile(moved, shared.MOST))
        if usual < _STILL:  # none of the layers learns
            return None
        limit, has_gradient = self.share * usual, record.owner_grad_norms > 0
        slow, learns = (ratios < limit) & has_gradient, ratios >= limit
        self._is_left = bool(((ratios < shared.JUMP * limit) & has_gradient).any())
        self._since = np.where(slow & (self._evaluations == 0), record.step, self._since)
        self._evaluations = np.where(learns, 0, self._evaluations + slow)
        lasts = slow & (record.step - self._since >= self.steps)
        found = lasts & (self._evaluations >= shared.SEVERAL)
        self.needs_full_step = bool((lasts & ~found).any())
        if not found.any():
            return None
        layers, ratio = [*compress(names, found)], float(ratios[found].max())
        fallen = 1.0
        if baseline.layers.names == names:
            fallen = 10 ** (baseline.layers.highest - record.owner_grad_levels)[found].min()
        has_faded = fallen > 1 / shared.TINY
        cause = "They get gradients, so their learning rate or their precision is too low"
        if has_faded:
            cause = f"Their gradients have become {figure(fallen, 2)}x smaller"
        return Finding(
            summary=f"A step moves {called_all(layers, shared.NAMED)} by {figure(ratio, 2)} of "
            f"their norm at most, and other layers by {figure(usual, 2)}",
            cause=cause,
            advice=_FADED if has_faded else _SLOW,
            # A loss that is switched off, or that is learned, trains no layer.
            severity="note" if has_faded else None,
            value=ratio,
            threshold=limit,
            module_name=layers[0],
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return not record.update_ratios or self._is_left


_STILL = 1e-9  # of a weight's norm
_SLOW: tuple[str, ...] = (
    "Check the learning rate of their parameter group, and layer-wise decay",
    "Keep weights in float32: bfloat16 rounds steps below 0.4 % of a value away",
    shared.FREEZE,
)
_FADED = (
    "Check the part of the loss that trains them: it may be saturated",
    "Check the other models that it depends on, such as a discriminator that wins",
)


class ExponentialTrend(Detector):
    """Figures change by the same factor at each step: weights, loss, or learning rate.

    Evidence: the factor per step, and how far it went.
    Causes: weight decay too strong or of wrong sign, a multiplying schedule, a discount above 1.
    Remedies: check weight decay (times the rate, 1e-6 to 1e-3 is usual), penalties, the schedule.
    Silent: strong weight decay where the loss falls, warm-ups by a factor.
    Example: scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1.1)

    A trend is steady if each quarter has 0.6 to 3 times the rate of the quarter before, and its
    increments grow: Adam moves weights by the same amount, not factor. Of the loss, growth above
    3 % of the first counts, and the gradient norm must have a third of it. At the grown rate a step
    moves the median matrix by 2 % of its norm; a warm-up ends below that. Each is reported once.
    """

    kind = "exponential_trend"
    statistic = "weight_norm"
    explained_by = shared.DIVERGED | {"nonfinite", "dead_units", "saturated_units"}
    after = explained_by
    # Healthy matrices keep at least 0.7 of their size
    shrinkage: float = limit(2.0, "Shrinkage of the median weight matrix while the loss stays.")
    # warm_restarts has 4.8 in a hundred steps
    weight_growth: float = limit(10.0, "Growth of the median weight matrix while the loss stays.")
    # dqn_cartpole, whose values grow, has 10
    loss_growth: float = limit(shared.THIRTYFOLD, "Growth of the loss, in medians of ten.")
    # as JUMP
    rate_growth: float = limit(
        shared.JUMP, "Growth of the learning rate, by one number four times in a row."
    )
    _reported: tuple[str, ...] = state(())
    _names: tuple[str, ...] = state(())
    _first_weights: tuple[float, ...] = state(())
    _weights: deque[tuple[int, float]] = state(deque(maxlen=shared.LENGTH))
    _block: list[tuple[float, float]] = state(list)
    _levels: deque[tuple[int, float, float]] = state(deque(maxlen=shared.LENGTH))
    _rates: deque[float] = state(deque(maxlen=shared.LENGTH))

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        found = self._of_rate(baseline) or self._of_loss(record, baseline)
        if record.weights:
            found = self._of_weights(record, baseline) or found
        return found

    def _of_weights(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        sizes = matrix_sizes(record)
        names = tuple(sizes)
        if names != self._names:
            self._names, self._first_weights = names, tuple(sizes.values())
            self._weights.clear()
        pairs = zip(sizes.values(), self._first_weights, strict=True)
        changes = [now / first for now, first in pairs if first > 0 and 0 < now < math.inf]
        if not changes:
            return None
        self._weights.append((record.step, math.log10(median(changes))))
        steps, levels = np.array(self._weights).T
        loss = baseline.loss
        learns = not loss.recent > (1 - shared.FEW) * abs(loss.first)
        shrinks = not learns and -levels[-1] > math.log10(self.shrinkage) / 2
        self.needs_full_step = bool(shrinks and len(steps) < 2 * shared.RECENT)
        now, least = 10 ** levels[-1], math.log10(self.weight_growth)
        if shrinks and (rate := _steady(steps, -levels, math.log10(self.shrinkage))):
            return self._found(
                "weights",
                f"The weights shrink by {figure(1 - 10**-rate, 2)} of their size at each step, "
                f"to {figure(now, 2)} of their first size, and the loss does not fall",
                ("Lower the weight decay; usual are 1e-6 to 1e-3, times the learning rate",),
                now,
                1 / self.shrinkage,
            )
        if not loss.is_better and (rate := _steady(steps, levels, least, compound=shared.HALF)):
            return self._found(
                "weights",
                f"The weights grow by {figure(10**rate - 1, 2)} of their size at each step, "
                f"to {figure(now)}x their first size",
                ("Check the signs of weight decay, penalties and loss", "Check the learning rate"),
                now,
                self.weight_growth,
            )
        return None

    def _of_loss(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if record.loss is not None:
            self._block.append((record.loss, record.total_grad_norm))
        if len(self._block) < shared.FEWEST:
            return None
        loss, norm = np.median(self._block, axis=0)
        self._block.clear()
        # A sum over more and more examples grows, too.
        if baseline.batches_vary or not (0 < loss < math.inf and 0 < norm < math.inf):
            self._levels.clear()
            return None
        # A rise up to the floor loses nothing, however far below it was.
        level = math.log10(max(loss, baseline.loss.floor))
        self._levels.append((record.step, level, math.log10(norm)))
        steps, losses, norms = np.array(self._levels).T
        least = math.log10(self.loss_growth)
        rate = _steady(steps, losses, least)
        if not rate or not _steady(steps, norms, least / 3):
            return None
        return self._found(
            "loss",
            f"The loss grows by {figure(10**rate - 1, 2)} of its size at each step, from "
            f"{figure(10 ** losses.min())} to {figure(loss)}, and the gradients with it",
            (
                "Check targets that the model makes: the discount, the target network",
                "Check the signs of penalties and decay",
            ),
            loss,
            self.loss_growth * 10 ** losses.min(),
        )

    def _of_rate(self, baseline: Baseline) -> Finding | None:
        if not self._rates or baseline.rate != self._rates[-1]:
            self._rates.append(baseline.rate)
        moves = max(baseline.step_ratio, baseline.ratio_now)
        if (
            baseline.age % shared.FEWEST
            or moves < shared.LARGE_STEP / 10
            or len(self._rates) <= _CHANGES
        ):
            return None
        with np.errstate(all="ignore"):
            changes = np.diff(np.log(self._rates))
            others = np.flatnonzero(~np.isclose(changes, changes[-1], rtol=shared.TINY, atol=0))
        count = len(changes) - (others[-1] + 1 if len(others) else 0)
        began = self._rates[-1 - count]
        if count < _CHANGES or not baseline.rate >= self.rate_growth * began > 0:
            return None
        return self._found(
            "rate",
            f"The learning rate is multiplied by {figure(math.exp(changes[-1]), 4)} again and "
            f"again, from {figure(began)} to {figure(baseline.rate)}, and steps move the weights "
            f"by {figure(moves, 2)} of their norm",
            ("Check the factor of the schedule: it has to be below 1 to decay",),
            baseline.rate,
            self.rate_growth * began,
        )

    def _found(
        self, what: str, seen: str, advice: tuple[str, ...], value: float, limit: float
    ) -> Finding | None:
        if what in self._reported:
            return None
        self._reported = (*self._reported, what)
        return Finding(summary=seen, advice=advice, value=value, threshold=limit, momentary=True)


def _steady(steps: Figures, levels: Figures, least: float, *, compound: float = -math.inf) -> float:
    """Return how fast levels (log10) rise per step: steadily up to the last, by ``least``; else 0.

    The last quarter has to rise faster than the one before, by the figure to the power of
    ``compound``: 1 if each step adds a share of it, 0 if each adds the same amount.
    """
    for first in range(len(levels) - shared.RECENT, -1, -1):
        if levels[-1] - levels[first] < least:
            continue
        at = np.linspace(steps[first], steps[-1], _PARTS + 1)
        levels_at = np.interp(at, steps[first:], levels[first:])
        parts, (*_, before, last) = np.diff(levels_at), np.diff(10 ** (levels_at - levels_at[-1]))
        with np.errstate(all="ignore"):
            faster = parts[1:] / parts[:-1]
            power = np.log10(last / before) / parts[-2:].mean()
        is_steady = parts.min() > 0 and faster.min() >= _SLOWER and faster.max() <= shared.JUMP
        if is_steady and power >= compound:
            return float((levels[-1] - levels[first]) / (steps[-1] - steps[first]))
    return 0.0


_PARTS = 4
_SLOWER = 0.6  # learning slows down
_CHANGES = 4  # of the learning rate: two warm restarts or drops are fewer
