"""Baseline: figures of the whole run, with which detectors compare a step.

A window excludes the latest 20 steps, so that a slow rise does not raise its own limit. Outliers
are excluded too, unless they persist for 20 steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import itemgetter
from statistics import median, median_high
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts import shared
from telemetry.layers.module_types import LOOKUPS
from telemetry.layers.onset import LEAD, LOOK_BACK, NORMAL_CONSISTENT, Onset, onsets
from telemetry.plain_text import called, called_all, figure
from telemetry.records import Layout, StepRecord, once
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of

Figures = NDArray[np.float64]
Marks = NDArray[np.bool_]


class Window:
    """Last hundred values of a figure without the latest 20; of fewer than 40, the older half."""

    first: float = math.nan  # median of the first five values
    _firsts: tuple[float, ...] = ()
    _values: deque[float]
    _unusual: deque[float]

    def __init__(self) -> None:
        self._values, self._unusual = deque(maxlen=shared.LENGTH + shared.LATEST), deque()

    def add(self, value: float, *, unusual: bool = False) -> None:
        """Add the latest value."""
        if unusual:
            self._unusual.append(value)
            if len(self._unusual) <= shared.LATEST:
                return
            self._values.clear()
            self._values.extend(self._unusual)
        else:
            self._values.append(value)
            if len(self._firsts) < shared.RECENT:
                self._firsts = (*self._firsts, value)
                self.first = median_high(self._firsts)
        self._unusual.clear()

    def __len__(self) -> int:
        count = len(self._values)
        return count - min(shared.LATEST, count // 2)

    @property
    def values(self) -> list[float]:
        """The window, oldest first. The properties below need one value or more."""
        return [*self._values][: len(self)]

    @property
    def usual(self) -> float:
        """Median, the upper of two."""
        return median_high(self.values)

    @property
    def extremes(self) -> tuple[float, float]:
        """Lowest and highest value."""
        values = self.values
        return min(values), max(values)

    @property
    def highest(self) -> float:
        return max(self.values)

    @property
    def extremes_of_all(self) -> tuple[float, float]:
        """Lowest and highest value, the latest ones included."""
        return min(self._values), max(self._values)

    @property
    def range(self) -> float:
        """Highest minus lowest, at least a thousandth of the highest, also for a constant."""
        lowest, highest = self.extremes
        return max(highest - lowest, shared.TINY * abs(highest))

    def of_latest(self, count: int) -> tuple[float, float]:
        """Return median and standard deviation (from the median absolute one) of the latest."""
        latest = self.values[-count:]
        usual = median_high(latest)
        return usual, NORMAL_CONSISTENT * median_high([abs(value - usual) for value in latest])

    @property
    def noise(self) -> float:
        """Standard deviation from one value to the next (from the median); 0 for fewer than two."""
        changes = [abs(after - before) for before, after in pairwise(self.values)]
        return NORMAL_CONSISTENT * median_high(changes) / math.sqrt(2) if changes else 0.0

    def ranges_above(self, value: float) -> float:
        """Return the distance of a value above the highest, in ranges; -inf for a short window."""
        if len(self) < shared.FEWEST:
            return -math.inf
        return (value - self.highest) / self.range if self.range else -math.inf


class Logged(NamedTuple):
    """A loss and its step."""

    step: int
    loss: float


class LossJump(NamedTuple):
    """A rise of the loss."""

    before: float  # median of the last losses before it
    limit: float  # threshold of losses far above them
    first: Logged  # the first above the limit
    peak: Logged


class Loss:
    """Rise and fall of the loss, which may have any unit and sign.

    - Each loss is compared with the window.
    - The last five are compared with the latest twenty of the window: a loss may fall far in a
      hundred steps.
    - The last five are compared with the best five and the first five: half of the progress is
      lost, however slowly the loss rises, if the progress was more than noise.
    """

    window: Window  # losses that are not far above it
    high: deque[Logged]  # consecutive losses that are far above it
    latest: deque[Logged]
    recent: float = math.nan  # median of the last five losses
    best: float = math.inf  # the lowest median of five
    is_worse: bool = False  # the recent median is four standard deviations above the window
    is_better: bool = False  # the recent median is half a deviation below the window
    excess: float = 0.0  # (last loss - highest before) / |highest before|
    losses_lost: int = 0  # consecutive losses at which half of the progress was lost
    count: int = 0  # of losses
    outliers: int = 0  # losses that were far above the window
    limit: float = math.inf  # threshold of losses far above the window

    def __init__(self) -> None:
        self.window, self.high = Window(), deque(maxlen=shared.LATEST + 1)
        self.latest = deque(maxlen=3 * shared.LATEST)

    def median_of(self, count: int) -> float:
        """Return the median of the last ``count`` losses; NaN before the first."""
        latest = sorted([logged.loss for logged in islice(reversed(self.latest), count)])
        return latest[len(latest) // 2] if latest else math.nan

    @property
    def first(self) -> float:
        """Median of the first five losses that were not far above those before."""
        return self.window.first

    @property
    def has_not_fallen(self) -> bool:
        """Whether no five losses were lower than the first five by more than noise."""
        return self.best > (1 - shared.NOISE) * self.first > 0

    @property
    def floor(self) -> float:
        """The loss that is almost zero compared with the first: a rise to it loses nothing.

        Adam varies by a factor of 300 where a regression without noise has reached a
        ten-thousandth (regression_at_its_floor), and spikes (curve_at_its_floor). 0 while unknown.
        """
        return shared.NOISE * abs(self.first) if len(self.window) else 0.0

    def as_rare_as(self, losses: int) -> int:
        """Return how many consecutive losses far above the window are as rare as ``losses``.

        A window of few values is narrow where losses have heavy tails. If more than one in ten
        were far above it before, with probability p each, ``n`` in a row have probability ``p^n``.
        """
        share = (self.outliers - len(self.high)) / max(self.count, 1)
        if len(self.window) >= shared.LENGTH or not shared.FEW < share < 1:
            return losses
        return math.ceil(losses * math.log(shared.FEW) / math.log(share))

    def jump_since(self, since: int) -> LossJump:
        """Return the rise of the loss at step ``since`` or later."""
        before = [loss for step, loss in self.latest if step < since][-shared.LATEST :]
        after = [logged for logged in self.latest if logged.step >= since]
        limit = max(before) + shared.HALF * (max(before) - min(before)) if before else -math.inf
        peak = max(after, key=lambda logged: logged.loss)
        first = next((logged for logged in after if logged.loss > limit), peak)
        usual = median_high(before) if before else math.nan
        return LossJump(before=usual, limit=limit, first=first, peak=peak)

    def rise(self, peak: float) -> Rise:
        """Return the rise from the window to the highest loss up to now."""
        return Rise(first=self.first, usual=self.window.usual, peak=peak)

    @property
    def is_unbounded(self) -> bool:
        """Whether the loss is below -10 times the first one: it seems to have no lower limit."""
        return self.recent < 0 and self.recent < -10 * abs(self.first)

    def add(self, step: int, loss: float, *, judged: bool = True) -> None:
        """Add the finite loss of one step; ``judged``: whether rules judge this step."""
        self.latest.append(Logged(step, loss))
        recent = self.recent = self.median_of(shared.RECENT)
        if judged and len(self.window) >= shared.RECENT:
            usual, deviation = self.window.of_latest(shared.LATEST)
            deviation = max(deviation, shared.TINY * abs(usual))  # so that a constant has one
            self.is_worse = recent > usual + shared.WORSE * deviation
            self.is_better = recent < usual - shared.HALF * deviation
        if len(self.latest) >= shared.RECENT:
            self.best = min(self.best, recent)
            # A loss that is noise from the start has a best five by luck (weak_signal).
            is_lost = recent > (self.first + self.best) / 2 and self.first - self.best > max(
                shared.NOISE * abs(self.first), shared.WORSE * self.window.noise
            )
            self.losses_lost = self.losses_lost + 1 if is_lost else 0
        if len(self.window):
            highest = self.window.highest
            self.excess = (loss - highest) / abs(highest) if highest else 0.0
            few = _FAR_OF_FEW * abs(highest) if len(self.window) < shared.FEWEST else 0.0
            self.limit = highest + max(shared.HALF * self.window.range, few)
        self.count += 1
        self.outliers += loss > self.limit
        if loss > self.limit:
            self.high.append(Logged(step, loss))
        else:
            self.high.clear()
        self.window.add(loss, unusual=bool(self.high))


# Of the highest loss, for a short window: without it the healthy lora alarms.
_FAR_OF_FEW = 0.2


@dataclass(kw_only=True)
class Rise:
    """A loss that rose from its usual level."""

    first: float  # in the first steps of the run
    usual: float  # before the rise
    peak: float  # the highest since

    def is_undone(self, loss: float) -> bool:
        """Whether the latest loss undoes half of the rise.

        A rise above the loss of the first steps counts up to there: the loss of an untrained model
        is no recovery. If the loss had hardly fallen before it rose, it has to fall.
        """
        self.peak = max(self.peak, loss)
        learned = self.first - self.usual
        if abs(learned) <= shared.NOISE * abs(self.first):
            return loss < self.first - shared.NOISE * abs(self.first)
        top = min(self.peak, self.first) if learned > 0 else self.peak
        return loss < (self.usual + top) / 2


class Norm:
    """Distance of the total gradient norm from earlier ones, in decades; clipping hides it."""

    above_all: float = 0.0  # above the highest, the latest included; 0 in the first steps
    above_window: float = 0.0  # above the highest of the window
    below: float = 0.0  # below the lowest
    jump_step: int = -shared.NEVER  # at which it first rose to five times the highest
    _window: Window

    def __init__(self) -> None:
        self._window = Window()

    @property
    def usual(self) -> float:
        """Median norm of the window; 0 if it is empty."""
        return 10**self._window.usual if len(self._window) else 0.0

    @property
    def first(self) -> float:
        """Median of the first five norms."""
        return 10**self._window.first

    @property
    def is_usual(self) -> bool:
        """Whether the last one is within a factor of five of those before."""
        return max(self.above_all, self.below) < shared.FAR_ABOVE

    def add(self, total: float, step: int, interval: float) -> None:
        """Add the finite norm of one step; ``interval``: typical distance of recorded steps."""
        self.above_all = self.above_window = self.below = 0.0
        if total == 0:
            return
        level = math.log10(total)
        if len(self._window) >= shared.RECENT:
            lowest, highest = self._window.extremes_of_all
            self.above_all, self.below = level - highest, lowest - level
            self.above_window = level - self._window.highest
            ago = step - self.jump_step
            if self.above_all >= shared.FAR_ABOVE and ago > shared.LATEST * interval:
                self.jump_step = step
        self._window.add(level, unusual=self.above_all > math.log10(shared.THIRTYFOLD))


class LayerNorms:
    """Gradient norms of all layers at the last steps."""

    names: tuple[str, ...] = ()  # modules that own parameters
    levels: Figures  # log10 of their norms, [k, layers], oldest first; -inf for zero
    highest: Figures  # their highest ones since the layers are the same, [layers]
    growth: Figures  # distance of the last ones above their medians, [layers]; NaN if unknown
    steps: list[int]  # of each row
    usual: Figures  # their medians, at most 20 steps old, [layers]
    # Whether a layer's norm is suddenly zero, or differs for three steps from its median by a
    # factor of ten and four deviations, also without the change that all layers share. Layers that
    # were zero before (experts, embeddings) do not count.
    are_unusual: bool = False
    # Consecutive steps, [layers], at which a layer's norm over the median one of all layers was
    # thirty times its highest; such steps count for that only if they last.
    steps_apart: Figures
    apart: Figures  # log10 of how many times, [layers]
    _highest_share: Figures
    _finite_steps: Figures
    _limit: Figures
    _unusual_steps: Figures
    _since: int = 0

    def __init__(self, interval: float = 1) -> None:
        self._interval = interval
        self._begin(())

    def _begin(self, names: tuple[str, ...]) -> None:
        self.names, self.levels, self.steps = names, np.zeros((0, len(names))), []
        self.usual = self.growth = self._limit = np.full(len(names), np.nan)
        self.highest, self._highest_share = np.full((2, len(names)), -np.inf)
        self.steps_apart, self.apart, self._finite_steps = np.zeros((3, len(names)))
        self._unusual_steps, self._since = np.zeros(len(names)), 0

    @np.errstate(invalid="ignore")  # of -inf
    def add(self, record: StepRecord) -> None:
        """Add a step whose gradients are finite."""
        if record.layout.owner_names != self.names:
            self._begin(record.layout.owner_names)
        self.levels = np.concatenate([self.levels[1 - _ROWS :], record.owner_grad_levels[None]])
        self.highest = np.maximum(self.highest, self.levels[-1])
        self._compare_with_others()
        growth = self.growth = self.levels[-1] - self.usual
        finite = growth[np.isfinite(growth)]
        # A change of all layers is learning, or visible in the total norm.
        common = min(max(finite.min(), 0.0), finite.max()) if finite.size else 0.0
        off = (np.abs(growth) > self._limit) & (np.abs(growth - common) > self._limit)
        self._unusual_steps = np.where(off, self._unusual_steps + 1, 0)
        lasting = self._unusual_steps >= shared.SEVERAL
        self.are_unusual = bool((lasting | (off & np.isneginf(growth))).any())
        self.steps = [*self.steps[1 - _ROWS :], record.step]
        self._since += 1
        if self._since < (shared.LATEST if len(self.steps) > shared.LATEST else shared.FEWEST):
            return
        self._since, window = 0, self.levels[-shared.LENGTH :]
        ordered = np.sort(window, axis=0)
        self.usual = ordered[len(window) // 2]
        self.growth = self.levels[-1] - self.usual
        off = np.sort(np.abs(window - self.usual), axis=0)[len(window) // 2]
        self._limit = np.maximum(shared.TENFOLD, shared.WORSE * NORMAL_CONSISTENT * off)
        self._limit[ordered[0] == -np.inf] = np.nan

    def _compare_with_others(self) -> None:
        """Compare each norm with the median one: clipping leaves their ratio as it is."""
        finite = np.isfinite(self.levels[-1])
        self._finite_steps += finite
        if np.count_nonzero(finite) < shared.SEVERAL:
            return
        share = self.levels[-1] - np.median(self.levels[-1][finite])
        self.apart = share - self._highest_share
        is_apart = finite & (self.apart > math.log10(shared.THIRTYFOLD))
        is_apart &= self._finite_steps > shared.LATEST
        self.steps_apart = np.where(is_apart, self.steps_apart + 1, 0)
        is_usual = ~is_apart | (self.steps_apart > shared.LATEST)
        self._highest_share = np.where(
            is_usual, np.maximum(self._highest_share, share), self._highest_share
        )

    def onsets(self, since: int) -> Sequence[Onset]:
        """Return the layers whose norm had left its baseline by step ``since``, earliest first."""
        first, lead = since - LOOK_BACK * self._interval, LEAD * self._interval
        rows = [row for row, step in enumerate(self.steps) if first < step <= since]
        steps = [self.steps[row] for row in rows]
        return onsets(self.names, steps, 10 ** self.levels[rows], since, lead=lead) or ()


_ROWS = LOOK_BACK + shared.LATEST


class Baseline:
    """Figures of the whole run, for all detectors.

    Args:
        interval: Steps between two records; windows have as many records in any case.
    """

    loss: Loss
    norm: Norm
    layers: LayerNorms
    age: int = -1  # steps seen before this one
    step: int = 0  # the latest
    # At which the learning rate rose to three times the highest survived rate. A rate is survived
    # if the loss is not worse ten steps later.
    rate_jump_step: int = -shared.NEVER
    rate_before_jump: float = 0.0  # highest survived rate before the jump
    rate_after_jump: float = 0.0  # the rate after the rise
    rate: float = 0.0  # the highest learning rate of this step; 0 without an optimizer
    jumped: tuple[str, ...] = ()  # modules whose rate jumped, in forward order, if not all
    # That moved the median weight matrix by a fifth of its norm.
    large_step: int = -shared.NEVER
    step_ratio: float = 0.0  # median update ratio of the matrices at the last full step
    # Modules and sizes of their matrices at the first full step, relative to He initialization: a
    # root mean square of sqrt(2 / fan_in) (He et al., "Delving Deep into Rectifiers", 2015).
    _first_sizes: tuple[tuple[str, float], ...] = ()
    classes: int = 0  # units of the last output; of the widest matrix if unknown
    batches_vary: bool = False  # whether full steps had very different numbers of examples
    _examples: deque[tuple[int, int]]  # full steps, and their examples
    _ratio_rate: float = 0.0
    _survived_rate: float = 0.0
    _input_rms: float = 0.0  # root mean square at the last full step
    _rates: deque[float]
    _of_groups: tuple[float, ...] = ()
    _same_groups: int = 0  # steps since the number of parameter groups changed
    _groups: dict[str, set[int]]  # of each module's own parameters, in forward order

    def __init__(self, interval: float = 1) -> None:
        self.interval = interval
        self.loss, self.norm, self.layers = Loss(), Norm(), LayerNorms(interval)
        self._rates, self._groups = deque(maxlen=shared.LENGTH), {}
        self._examples = deque(maxlen=shared.LENGTH)

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        self.age, self.step = self.age + 1, record.step
        self._add_rates(record)
        for step, between in record.losses_between:
            if math.isfinite(between):
                self.loss.add(step, between, judged=False)
        if (loss := record.finite_loss) is not None:
            self.loss.add(record.step, loss)
        if record.all_grads_finite:
            self.norm.add(record.total_grad_norm, record.step, self.interval)
            self.layers.add(record)
        if record.examples:
            self._examples.append((record.step + record.loss_delay, record.examples))
            counts = [count for _, count in self._examples]
            self.batches_vary = max(counts) >= shared.HALF_MORE * min(counts)
        if ratios := matrix_ratios(record).values():
            self.step_ratio, self._ratio_rate = median(ratios), self.rate
            if self.step_ratio >= shared.LARGE_STEP:
                self.large_step = record.step
        if record.full and len(record.activations):
            widths = [record.layout.parameters[i].shape[0] for i in record.layout.matrices.values()]
            self.classes = int(record.activations.rows.unit_count[-1]) or max(widths, default=0)
        if not self._first_sizes:
            self._first_sizes = tuple(_sizes_over_he(record))
        if record.full and "" in record.inputs:
            self._input_rms = record.inputs[""].sketch.rms

    @property
    def loss_limit(self) -> float:
        """The limit of a usual loss, where all other figures are usual; else -infinity."""
        usual = self.norm.is_usual and not self.layers.are_unusual and not self.loss.high
        return self.loss.limit if usual and not self.follows_rate_jump else -math.inf

    @property
    def has_more_examples(self) -> bool | None:
        """Whether steps since the loss rose have more examples; None: the next full step shows it.

        Episodes become longer as a policy learns, and each of their steps adds to the loss.
        """
        if not self.batches_vary:
            return False
        since = (self.loss.high or [*self.loss.latest][-shared.RECENT :])[0].step
        counts = [count for step, count in self._examples if step < since]
        if len(counts) == len(self._examples):
            return None
        return not counts or self._examples[-1][1] >= shared.HALF_MORE * median(counts)

    @property
    def large_start(self) -> tuple[str, str]:
        """Module of one matrix that started far too large, and that as a cause, in the first steps.

        Two empty texts if no matrix did, or later.
        """
        name, largest = max(self._first_sizes, key=itemgetter(1), default=("", 0.0))
        others = [size for other, size in self._first_sizes if other != name]
        stands_out = others and largest >= 10**shared.TENFOLD * max(1.0, *others)
        if self.age >= shared.LATEST or not stands_out:
            return "", ""
        times = figure(largest, 2)
        return name, f"The initial weights of {called(name)} are {times}x He initialization"

    @property
    def large_inputs(self) -> str:
        """The size of the model's inputs as a cause in the first steps; empty if it is usual."""
        is_large = self.age < shared.LATEST and self._input_rms > shared.LARGE_INPUT
        return f"The root mean square of the inputs is {figure(self._input_rms)}" * is_large

    @property
    def began_small(self) -> list[str]:
        """Modules whose matrices started far smaller than most, as the last layer of a policy.

        Gradients before them start small and grow; a step moves them by many times their size.
        """
        usual = median([size for _, size in self._first_sizes] or [0.0])
        return [name for name, size in self._first_sizes if size * 10**shared.TENFOLD < usual]

    @property
    def began_zero(self) -> list[str]:
        """Modules with a matrix that started at zero."""
        return [name for name, size in self._first_sizes if size == 0]

    @property
    def since_rate_jump(self) -> int:
        """Steps since the learning rate jumped."""
        return self.step - self.rate_jump_step

    @property
    def follows_rate_jump(self) -> bool:
        """Whether the learning rate has just jumped, and so explains faults."""
        return self.since_rate_jump <= shared.LATEST

    @property
    def new_rate_in_words(self) -> str:
        """The learning rate after the jump, and its modules if not all, for messages."""
        where = f" in {called_all(self.jumped, shared.NAMED)}" if self.jumped else ""
        return f"{figure(self.rate_after_jump)}{where}"

    @property
    def lowest_rate(self) -> float:
        """The lowest above zero of the last hundred steps."""
        return min((rate for rate in self._rates if rate > 0), default=0.0)

    @property
    def risen_from(self) -> float:
        """The lowest rate above zero before the rate became as high as now; 0 if it did not rise.

        Optimizers that step in turn have rates in turn, and these are no rise.
        """
        rates = [*self._rates][-1 - self._same_groups :]
        lower = [place for place, rate in enumerate(rates) if rate * shared.JUMP <= self.rate]
        before = rates[: lower[-1] + 1] if lower else []
        positive = [rate for rate in before if rate > 0]
        return min(positive, default=0.0) if max(before, default=0.0) < self.rate else 0.0

    @property
    def ratio_now(self) -> float:
        """The update ratio of this step, estimated from the rate; 0 unless the rate has risen."""
        growth = self.rate / self._ratio_rate if self._ratio_rate > 0 else 0.0
        return self.step_ratio * growth if growth >= shared.JUMP else 0.0

    @property
    def since_norm_jump(self) -> int:
        """Recorded steps since the gradient norm jumped."""
        return round((self.step - self.norm.jump_step) / self.interval)

    @property
    def gradients_led(self) -> bool:
        """Whether gradients have just jumped and the learning rate has not."""
        led = self.norm.jump_step - self.rate_jump_step > shared.FEWEST
        return led and self.since_norm_jump <= shared.FEWEST

    def _add_rates(self, record: StepRecord) -> None:
        rates, earlier = record.learning_rates, self._of_groups
        rate = self.rate = max(rates, default=0.0)
        before = max(self._survived_rate, *[*self._rates][-shared.FEWEST :], 0.0)
        if len(self._rates) >= shared.RECENT and rate > shared.JUMP * before:
            self.rate_jump_step = record.step
            self.rate_before_jump, self.rate_after_jump = before, rate
            pairs = enumerate(zip(earlier, rates, strict=False))
            rose = {group for group, (before, after) in pairs if after > shared.JUMP * before}
            names = tuple([name for name, groups in self._groups.items() if rose & groups])
            self.jumped = names if len(names) < len(self._groups) else ()
        self._same_groups = self._same_groups + 1 if len(rates) == len(earlier) else 0
        self._of_groups = rates
        if record.groups.size:
            self._groups, layout = {}, record.layout
            for index in layout.depth_order[record.groups[layout.depth_order] >= 0].tolist():
                groups = self._groups.setdefault(layout.parameters[index].module_name, set())
                groups.add(int(record.groups[index]))
        if len(self._rates) >= shared.FEWEST and not self.loss.high and not self.loss.is_worse:
            self._survived_rate = max(self._survived_rate, self._rates[-shared.FEWEST])
        self._rates.append(rate)


def matrix_ratios(record: StepRecord) -> dict[str, float]:
    """Return the finite update ratios of the weight matrices, by name."""
    matrices, ratios = record.layout.matrices, record.update_ratios.items()
    return {name: r for name, r in ratios if name in matrices and math.isfinite(r)}


@once
def with_matrices(layout: Layout) -> Marks:
    """Mark the modules with a weight matrix among those that own parameters."""
    matrices = np.array([*layout.matrices.values()], np.intp)
    counts = np.bincount(layout.owners[matrices], minlength=len(layout.modules))
    return counts[layout.owning] > 0


@once
def matrix_sizes(record: StepRecord) -> dict[str, float]:
    """Return the root mean square of each weight matrix, by name."""
    sizes = figures_of(record.weights, rms_of)
    return {name: size for name, size in sizes.items() if name in record.layout.matrices}


def _sizes_over_he(record: StepRecord) -> Iterator[tuple[str, float]]:
    """Yield module and size of each matrix, relative to He initialization; without embeddings."""
    layout = record.layout
    for name, size in matrix_sizes(record).items():
        parameter = layout.parameters[layout.parameter_position[name]]
        module = layout.modules[layout.position[parameter.module_name]]
        if module.type_name not in LOOKUPS:
            yield module.name, size * math.sqrt(math.prod(parameter.shape[1:]) / 2)
