"""Activations and gradients that explode over the depth of the network or over time, and where."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from statistics import median_high
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline, Figures, LayerNorms, Marks
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.layers import table
from telemetry.layers.module_types import LOOKUPS
from telemetry.plain_text import called, figure
from telemetry.records import Layout, Output, StepRecord, once
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of


class ExplodingActivation(Detector):
    """Outputs of a module vary 100 times more than ever before, and the loss has risen.

    Evidence: the module, its variation, and the largest RMS before.
    Causes: weights that grew, a missing normalization, a learning rate that is too large.
    Remedies: lower the learning rate or warm it up, clip gradients, add normalization.
    Silent: a falling loss, outputs that are the same for every input, growth over depth, which
        ``exploding_gradient`` reports.
    """

    kind = "exploding_activation"
    statistic = "activation_rms"
    on = "full"
    confirm_after = shared.AGAIN
    clear_after = shared.SEVERAL
    explained_by = shared.RISEN_LOSSES | {"exploding_gradient", "saturated_units", "dead_units"}
    after = explained_by
    explained_by_rate_jump = True
    # chosen manually; tried 10 and 1000
    factor: float = limit(
        100.0, "Multiple of the largest RMS before, at two consecutive full steps."
    )
    _highest: dict[Output, float] = state(dict)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        grown = list[tuple[str, float]]()
        sizes = figures_of(record.outputs, rms_of)
        for output, now in figures_of(record.outputs, attrgetter("variation")).items():
            highest = self._highest.get(output, 0.0)
            if highest and now > self.factor * highest and baseline.loss.is_worse:
                grown.append((output.module_name, now / highest))
            elif highest < sizes[output] < math.inf:
                self._highest[output] = sizes[output]
        if not grown:
            return None
        name, times = grown[0]
        return Finding(
            summary=f"The output of {called(name)} is {figure(times, 2)}x as large as ever before",
            advice=(shared.WARM_UP, "Clip gradients", "Add normalization"),
            value=times,
            threshold=self.factor,
            module_name=name,
            # After non-finite gradients there is no second evaluation.
            confirmed=not record.all_grads_finite,
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return not record.all_grads_finite


class ExplodingGradient(Detector):
    """Gradients have a total norm far above the highest of the last 100 steps, or few layers'
    grow alone. Or they grow with the activations from layer to layer in the first steps.

    Evidence: the norm and its baseline; the layer with most of the growth, its range, or the batch.
    Causes: a learning rate that is too large, a bad batch, large initial weights, no clipping.
    Remedies: clip gradients, lower or warm up the learning rate, normalize, use He initialization.
    Silent: heavy-tailed data, warm restarts, a jump of the learning rate, a new weight of the loss.

    *Over time* it takes ``factor`` at three consecutive steps, or tenfold that at one; or fivefold
    the maximum, then a step of a fifth of the weights' norm and a loss above all before; or
    ``lasting_factor`` at ten more steps than not, and a risen loss; or tenfold, while a layer grows
    thirtyfold compared with most layers at three steps. Growth that comes from the loss
    does not count: the first full step shows how much the gradient of the output grew.

    *Over depth*, either growth alone is common: each must have a third of the decades, at the first
    full step and one more, or be thirty times larger at one. Later, where clipping hides the norm,
    both must have grown tenfold and the loss must have risen.
    """

    kind = "exploding_gradient"
    severity = "error"
    clear_after = shared.LONG
    explained_by = shared.RISEN_LOSSES | {"exploding_activation", "saturated_units"}
    after = shared.RISEN_LOSSES | {"saturated_units"}
    explained_by_rate_jump = True
    # Healthy runs stay within 10; tried 100 and 10,000
    factor: float = limit(1000.0, "Multiple of the highest past norm.")
    lasting_factor: float = limit(
        shared.THIRTYFOLD, "Multiple of the norm 20 steps before, if it stays."
    )
    depth_factor: float = limit(shared.DEPTH, "Growth through the network, forward times backward.")
    _depths: deque[float] = state(deque(maxlen=shared.LONG))
    # Amplification of the loss's gradient, and the norm, both before clipping, at usual steps.
    _gains: deque[tuple[float, float]] = state(deque(maxlen=shared.LENGTH))
    _from_loss: float | None = state(None)
    _may_be_from_loss: bool = state(False)
    _blame: Blame = state(lambda: Blame())
    # Step, norm and its baseline of an explosion whose layer is not certain before a full step.
    _held: tuple[int, float, float] | None = state(None)
    _latest_above: tuple[int, float, float] | None = state(None)  # the same of any high norm
    _total: float = state(0.0)  # the last norm; clipping makes it the same at each step
    _steps_far_above: int = state(0)
    _steps_lasting: int = state(0)
    _amplified_steps: int = state(0)
    _deep_steps: int = state(0)
    _began_deep: bool = state(True)  # at all full steps up to now
    _is_deep: bool = state(False)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        found = None
        if not record.all_grads_finite:  # it may have overflowed before it was confirmed
            just_jumped = baseline.gradients_led and baseline.since_norm_jump < shared.FEWEST
            if self.active_alert is None and (self._deep_steps or just_jumped or self._held):
                self._held = None
                found = self._found(
                    baseline,
                    summary="The gradients grew until they overflowed",
                    value=math.inf,
                    threshold=self.depth_factor,
                )
        else:
            self._blame.add(record, baseline)
            found = (
                self._in_time(record, baseline)
                or self._in_few_layers(record, baseline)
                or self._before_clipping(record, baseline)
                or self._over_depth(record, baseline)
            )
        is_candidate = baseline.since_norm_jump < shared.FEWEST and not record.full
        is_candidate |= self._amplified_steps == 1 or self._deep_steps > 0 or self._may_be_from_loss
        total, before = record.total_grad_norm, self._total
        is_clipped, self._total = abs(total - before) < shared.TINY * total, total
        is_candidate |= is_clipped and not record.full and bool(baseline.layers.steps_apart.any())
        self.needs_full_step = self.active_alert is None and is_candidate
        return found

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        lasts = self._is_deep or self._amplified_steps > 0 or baseline.loss.is_unbounded
        return lasts or not record.all_grads_finite

    def _in_time(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        norm, loss = baseline.norm, baseline.loss
        is_unbounded = loss.is_unbounded
        lasting = shared.FAR_ABOVE if is_unbounded else math.log10(self.lasting_factor)
        lasts = norm.above_window >= lasting
        now = gain(record)
        if not lasts:
            self._from_loss = None
        elif self._from_loss is None and not math.isnan(now) and self._gains:
            usual = median_high([amplified for amplified, _ in self._gains])
            self._from_loss = max(norm.above_window - now + usual, 0.0)
        self._may_be_from_loss = lasts and self._from_loss is None and len(self._gains) > 0
        from_loss, decades = self._from_loss or 0.0, math.log10(self.factor)
        far_above = norm.above_all - from_loss >= decades
        lasts &= norm.above_window - from_loss >= lasting
        self._steps_far_above = self._steps_far_above + 1 if far_above else 0
        # A single batch with small gradients does not reset the count.
        self._steps_lasting = max(0, self._steps_lasting + (1 if lasts else -1))
        # Near the end of training, a norm that is large now was usual once.
        is_large = record.total_grad_norm >= norm.first or loss.losses_lost > 0
        lost = (loss.is_worse and is_large) or is_unbounded
        explodes = norm.above_all >= decades + shared.TENFOLD
        explodes |= self._steps_far_above >= shared.SEVERAL
        # Without a jump, no full step has shown yet how much came from the loss.
        explodes |= self._steps_lasting >= shared.FEWEST and lost and not self._may_be_from_loss
        led = baseline.gradients_led and baseline.large_step >= norm.jump_step
        explodes |= led and len(loss.high) >= shared.AGAIN
        now_at = record.step, record.total_grad_norm, norm.usual
        if record.total_grad_norm > norm.usual:
            self._latest_above = now_at
        # After a jump of the rate, loss_divergence needs some losses.
        if not (explodes or self._held) or baseline.since_rate_jump < shared.RECENT:
            return None
        # It may be confirmed at a step without a gradient.
        step, total, usual = self._held or self._latest_above or now_at
        waits = self.active_alert is None and self._blame.is_open
        self._held = (step, total, usual) if waits else None
        if waits:
            return None
        falls = ", while the loss falls without bound" if is_unbounded else ""
        return self._found(
            baseline,
            confined_growth(record, usual),
            summary=f"The gradient norm is {figure(total)}, {figure(total / usual)}x above usual"
            + falls,
            value=total,
            threshold=usual * self.lasting_factor,
            advice=_UNBOUNDED if is_unbounded else (),
            started_at=step,
        )

    def _in_few_layers(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        """Return an explosion of some layers alone; if it is clipped, full steps show the norm."""
        layers, known = baseline.layers, [norm for _, norm in self._gains]
        (apart,) = (layers.steps_apart >= shared.SEVERAL).nonzero()
        has_grown = baseline.norm.above_window >= shared.TENFOLD
        if record.full and known:
            has_grown |= norm_before_clipping(record) > 10**shared.TENFOLD * max(known)
        if not len(apart) or not has_grown or baseline.follows_rate_jump:
            return None
        last, times = layers.names[apart[-1]], float(10 ** layers.apart[apart[-1]])
        return Finding(
            summary=f"The gradient of {called(last)} is {figure(times)}x as large, compared with "
            "that of most layers, as ever before",
            advice=_ONE_LAYER,
            value=times,
            threshold=shared.THIRTYFOLD,
            module_name=last,
        )

    def _before_clipping(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        """Return an explosion that clipping hides from the optimizer, at full steps."""
        norm, now = norm_before_clipping(record), gain(record)
        if math.isnan(now):
            return None
        usual, highest = map(max, zip(*self._gains, strict=True)) if self._gains else (now, norm)
        # The gradient of the last module alone falls if it is of another head, or of an expert
        # without samples: then the norm has not grown.
        far = now - usual >= math.log10(self.factor) and norm > 10**shared.TENFOLD * highest
        far &= len(self._gains) > 1
        self._amplified_steps = self._amplified_steps + 1 if far else 0
        if not far and not baseline.layers.steps_apart.any():
            self._gains.append((now, norm))
        if self._amplified_steps < shared.AGAIN:
            return None
        times = 10 ** (now - usual)
        scale = norm / record.total_grad_norm if record.total_grad_norm > 0 else 1.0
        what = "Before clipping the" if scale > 1 + shared.TINY else "The"
        return self._found(
            baseline,
            confined_growth(record, norm / times, scale),
            summary=f"{what} gradient norm is {figure(norm)}, {figure(times, 2)}x the usual for "
            "such a gradient of the loss",
            value=norm,
            threshold=norm / times * self.factor,
        )

    def _over_depth(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if not record.outputs or not record.output_grads:
            return None
        forward, backward = forward_growth(record), backward_growth(record)
        product = forward.decades + backward.decades
        smaller, least = min(forward.decades, backward.decades), math.log10(self.depth_factor)
        certain = False
        deep = self._is_deep = product >= least and smaller >= least * _SMALLER_SHARE
        self._began_deep &= deep
        if self._began_deep:
            certain = product >= least + math.log10(shared.THIRTYFOLD)
        else:
            usual = median_high(self._depths) if self._depths else smaller
            deep = smaller >= usual + shared.TENFOLD and baseline.loss.is_worse
        self._deep_steps = self._deep_steps + 1 if deep else 0
        if not deep:
            self._depths.append(smaller)
        if self._deep_steps < shared.AGAIN and not certain:
            return None
        large, _ = baseline.large_start
        where = Stretch(large, large) if large else forward.stretch
        assert where is not None
        return Finding(
            summary=f"Activations grow {figure(10**forward.decades, 2)}-fold in the forward pass, "
            f"and gradients {figure(10**backward.decades, 2)}-fold in the backward pass",
            cause=where.growth,
            advice=_WEIGHTS if self._began_deep else _STEPS_TOO_LARGE,
            value=10**product,
            threshold=self.depth_factor,
            module_name=where.first,
            statistic="activation_grad_rms",
        )

    def _found(
        self, baseline: Baseline, confined: Stretch | None = None, *, advice: Any = (), **found: Any
    ) -> Finding:
        """Return a finding that blames the layers or the batch that grew first."""
        blame, where, batch, cause = self._blame, None, 0.0, None
        if not baseline.follows_rate_jump:
            where, batch = blame.stretch, blame.batch
            if where is None and confined is None and baseline.since_norm_jump <= shared.LATEST:
                found["batch_steps"] = [baseline.norm.jump_step]
            if blame.is_alike and confined is None:
                cause = "All gradients grew alike: because of the batch or of several layers"
        if batch:
            cause = f"The values of the batch are {figure(batch, 2)}x as large as before"
        elif confined is not None and where in (None, confined):
            where, advice = confined, advice or _ONE_LAYER
            cause = f"Most of the growth is in the gradient of {confined}"
        elif where is not None:
            cause = where.growth + ", whose gradient alone did not grow" * blame.by_weights
        advice = advice or (_BATCH if batch else _STEPS_TOO_LARGE)
        return Finding(cause=cause, advice=advice, module_name=where and where.first, **found)


_SMALLER_SHARE = 1 / 3  # at 2/3 resnet_nonorm_explodes is missed; tried 1/6

_WEIGHTS = (
    "Make the initial weights smaller (He or Xavier initialization)",
    "Scale down the branches of residual blocks",
    "Add normalization",
)
_BATCH = ("Check the data and the normalization of that batch", shared.CLIP)
_UNBOUNDED = ("Check for a term of the loss with the wrong sign, or without a lower limit",)
_ONE_LAYER = (
    "Check for a term of the loss, a backward function or a hook of this layer",
    shared.CLIP,
)
_STEPS_TOO_LARGE = (shared.CLIP, shared.WARM_UP, "Check the batch")


class Stretch(NamedTuple):
    """Modules over which a pass grows, from the first to the last; often a single one."""

    first: str
    last: str

    def __str__(self) -> str:
        if self.first == self.last:
            return called(self.first)
        return f"{called(self.first)} to {called(self.last)}"

    @property
    def growth(self) -> str:
        """Sentence about the module or modules that grow."""
        return f"The growth is {'in' if self.first == self.last else 'spread over'} {self}"


class Growth(NamedTuple):
    """Growth of a pass from its beginning to its largest value."""

    names: Sequence[str]  # modules in the order of the pass
    levels: Figures  # log10 of their sizes

    @property
    def decades(self) -> float:
        """log10 of the ratio of the largest to the first; 0 if there are fewer than two."""
        return float(self.levels.max() - self.levels[0]) if len(self.levels) > 1 else 0.0

    @property
    def stretch(self) -> Stretch | None:
        """The module that has half of the growth, or those that have most of it."""
        if self.decades <= 0:
            return None
        top = int(self.levels.argmax())
        share = (self.levels[: top + 1] - self.levels[0]) / self.decades
        steepest = int(np.diff(share).argmax()) + 1
        if share[steepest] - share[steepest - 1] >= shared.HALF:
            return Stretch(self.names[steepest], self.names[steepest])
        begin = int(np.flatnonzero(share <= shared.FEW)[-1])
        end = begin + int(np.flatnonzero(share[begin:] >= 1 - shared.FEW)[0])
        return Stretch(self.names[begin + 1], self.names[end])


@once
def forward_growth(record: StepRecord) -> Growth:
    """Return the growth of outputs, from the RMS of the first to the variation of the others.

    A large constant does not count. Neither does growth in a normalization, which returns numbers
    around 1 for all inputs, as behind embeddings of 0.02, nor after the last parameters.
    """
    layout, activations = record.layout, record.activations
    ran = [layout.position[name] for name in activations]
    sizes, variation = np.full((2, len(layout.modules)), math.nan)
    sizes[ran], variation[ran] = rms_of(activations.rows), activations.rows.variation
    modules = _to_last_owner(layout, _with_scale(layout, sizes))
    variation[modules[:1]] = sizes[modules[:1]]
    return _growth(layout, modules, variation, free=_normalizations(layout)[modules])


@once
def backward_growth(record: StepRecord) -> Growth:
    """Return the growth of the gradients of these outputs, from the last module back.

    Growth in a normalization does not count: it divides gradients and inputs alike.
    """
    modules, sizes = _gradients(record)
    modules = _to_last_owner(record.layout, modules)
    free = np.concatenate([[False], _normalizations(record.layout)[modules[:0:-1]]])
    return _growth(record.layout, modules[::-1], sizes, free=free)


def norm_before_clipping(record: StepRecord) -> float:
    """Return the norm of all gradients before clipping, which only makes it smaller."""
    return max(record.total_grad_norm_before_clipping or 0.0, record.total_grad_norm)


def gain(record: StepRecord) -> float:
    """Return the amplification of the loss's gradient by the network, whatever the loss's unit.

    That is log10 of the norm of all parameter gradients, before clipping, over the RMS of the
    gradient of the last module's output; NaN where that is zero or was not measured.
    """
    if not record.output_grads:  # as at most steps
        return math.nan
    total, (modules, sizes) = norm_before_clipping(record), _gradients(record)
    is_known = len(modules) > 0 and 0 < total < math.inf
    return math.log10(total / sizes[modules[-1]]) if is_known else math.nan


@once
def _gradients(record: StepRecord) -> tuple[NDArray[np.intp], Figures]:
    """Return modules with a scale, and the RMS of the gradients of all modules' outputs."""
    sizes = table(record).column("activation_grad_rms")
    return _with_scale(record.layout, sizes), sizes


def _with_scale(layout: Layout, sizes: Figures) -> NDArray[np.intp]:
    """Return the modules with a positive, finite size, but no embeddings: any scale suits them."""
    return ((sizes > 0) & (sizes < math.inf) & ~_lookups(layout)).nonzero()[0]


def _to_last_owner(layout: Layout, modules: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the modules up to the last with parameters: later ones choose a unit, or a range."""
    until: NDArray[np.intp] = modules[modules <= layout.owning.max(initial=-1)]
    return until


def _growth(layout: Layout, modules: NDArray[np.intp], sizes: Figures, *, free: Marks) -> Growth:
    """Return the growth over modules with these sizes, ``[all modules]``, without ``free`` ones."""
    values = sizes[modules]
    known = (values > 0).nonzero()[0]
    levels = np.array([math.log10(size) for size in values[known].tolist()])
    steps = levels[1:] - levels[:-1]
    levels[1:] -= np.where(free[known[1:]] & (steps > 0), steps, 0.0).cumsum()
    return Growth(names=[layout.modules[index].name for index in modules[known]], levels=levels)


@once
def _lookups(layout: Layout) -> Marks:
    return np.array([module.type_name in LOOKUPS for module in layout.modules], bool)


@once
def _normalizations(layout: Layout) -> Marks:
    return np.array(["Norm" in module.type_name for module in layout.modules], bool)


# --- over time ------------------------------------------------------------------------------------


class Blame:
    """Modules that caused a sudden growth of the gradients; the first evidence counts.

    If a module's weights grew, so did its outputs and all later ones, which a full step shows. The
    culprit has most of this growth: one module, several that grew alike, or the batch. The norms
    alone can show a single culprit, too: in a network of ReLUs all gradients grow except its own,
    which does not contain its weight. A step or two later everything has changed.
    """

    stretch: Stretch | None = None  # the culprits; None if nothing grows or they are unknown
    batch: float = 0.0  # growth of the batch's values, if the batch is the culprit
    is_alike: bool = False  # all gradients grew alike, and nothing else is known
    by_weights: bool = False  # the norms alone show a layer whose weights grew
    is_open: bool = False  # that layer may also be on another branch: the next full step decides
    _outputs: dict[str, float]
    _gradients: dict[str, float]

    def __init__(self) -> None:
        self._outputs, self._gradients = {}, {}

    def add(self, record: StepRecord, baseline: Baseline) -> None:
        """Add a step whose gradients are finite."""
        is_calm = baseline.norm.is_usual and baseline.since_norm_jump > shared.FEWEST
        is_calm &= not baseline.loss.high and not baseline.loss.is_worse
        has_outputs = record.inputs or record.outputs
        outputs = self._grown_outputs(record, is_calm=is_calm) if has_outputs else None
        grown = grown_gradients(baseline.layers, record.step)
        first = self._first_grown(record) if record.full else None
        if grown is None and outputs is None:
            self.stretch, self.batch, self.is_alike, self.is_open = None, 0.0, False, False
        elif self.stretch is None and not self.batch and not self.is_alike:
            self.stretch = grown and grown.origin
            self.by_weights = grown is not None and grown.by_weights
            self.is_open = grown is not None and not grown.is_sure
            if self.stretch is None and outputs is not None:
                self.stretch = outputs.stretch
            if outputs is not None and outputs.levels[0] > outputs.levels.max() / 2:
                self.stretch, self.batch = None, 10 ** outputs.levels[0]
            several = len(baseline.layers.names) > shared.SEVERAL
            self.is_alike = self.stretch is None and not record.full and several
        if self.is_open and record.full:
            self.is_open = False
            if outputs is None and first is not None:  # no output grew, so no weights did
                self.stretch, self.by_weights = Stretch(first, first), False
        self.is_open &= baseline.since_norm_jump < shared.FEWEST

    def _grown_outputs(self, record: StepRecord, *, is_calm: bool) -> Growth | None:
        """Return the growth of the batch and then of each output; None if none has grown.

        Outputs also grow as the model learns: a calm step is the new baseline.
        """
        given, rows = record.inputs.get(""), record.activations.rows
        batch, batch_size = math.nan, math.nan
        if given is not None:
            batch, batch_size = given.variation, rms_of(given.rows)[given.row]
        names = [_BATCH_KEY, *record.activations]
        now = np.concatenate([[batch], rows.variation])
        sizes = np.concatenate([[batch_size], rms_of(rows)])
        usual = np.array([self._outputs.get(name, math.nan) for name in names])
        with np.errstate(all="ignore"):
            levels = np.where((now > 0) & (now < math.inf) & (usual > 0), np.log10(now / usual), 0)
        usual_now = (levels <= shared.TENFOLD) | is_calm
        for place in (usual_now & (sizes > 0) & (sizes < math.inf)).nonzero()[0]:
            self._outputs[names[place]] = float(sizes[place])
        has_grown = levels.max() > shared.TENFOLD
        return Growth(names=["", *names[1:]], levels=levels) if has_grown else None

    def _first_grown(self, record: StepRecord) -> str | None:
        """Return the module whose output's gradient grew tenfold first in the backward pass."""
        grown, usual = [], self._gradients
        for name, now in figures_of(record.activation_grads, rms_of).items():
            if name in usual and now > 10**shared.TENFOLD * usual[name]:
                grown.append(name)
            elif 0 < now < math.inf:
                usual[name] = now
        return max(grown, key=record.layout.position.__getitem__, default=None)


class GrownGradients(NamedTuple):
    """Growth of the layers' gradient norms at a step: of most tenfold, or of a few hundredfold.

    The origin is known if the layers are of two groups, a decade apart. A single layer whose
    gradient grew far less than all others has the larger weights, which are no factor of it; so
    have two or three in a row, if they are parallel. Otherwise, growth entered at the last of the
    layers that grew: those behind it have their usual gradients.
    """

    origin: Stretch | None = None
    by_weights: bool = False
    is_sure: bool = True  # a layer with its usual gradient may also be on another branch


def grown_gradients(layers: LayerNorms, step: int) -> GrownGradients | None:
    """Return the growth of the gradients at a recent step above their medians; None for none.

    Clipping divides all norms by the same number, which the smaller group shows.
    """
    with np.errstate(invalid="ignore"):  # of -inf
        growth = layers.levels[layers.steps.index(step)] - layers.usual
    order = np.flatnonzero(np.isfinite(growth))
    order = order[growth[order].argsort()]
    if len(order) < shared.AGAIN:
        return None
    levels = growth[order]
    count = int(np.diff(levels).argmax()) + 1
    low, is_apart = order[:count], levels[count] - levels[count - 1] > shared.TENFOLD
    if is_apart:
        levels = levels - min(np.median(levels[:count]) + shared.TENFOLD, 0.0)
    highest_low, last = levels[count - 1], layers.names[order[count:].max()]
    if 2 * np.count_nonzero(levels > shared.TENFOLD) > len(order) >= shared.SEVERAL:
        is_behind = count > 1 and low.min() > order[count:].max() and highest_low <= shared.TENFOLD
        if is_apart and is_behind:
            return GrownGradients(Stretch(last, last))
        if not is_apart or count > min(shared.SEVERAL, len(order) // 2) or np.ptp(low) >= count:
            return GrownGradients()
        own = Stretch(layers.names[low.min()], layers.names[low.max()])
        return GrownGradients(own, True, bool(highest_low > shared.TENFOLD / 2))
    are_few = 2 * count >= len(order) and highest_low <= shared.TENFOLD
    if is_apart and are_few and levels[count] > 2 * shared.TENFOLD:
        return GrownGradients(Stretch(last, last))
    return None


def confined_growth(record: StepRecord, usual: float, scale: float = 1.0) -> Stretch | None:
    """Return the layer at which growth entered, if the norm is ``usual`` without few layers.

    That is the last of them, where the backward pass starts. Clipping divided norms by ``scale``.
    """
    norms = record.owner_grad_norms * scale
    order = norms.argsort()
    others = np.sqrt(np.cumsum(norms[order] ** 2))
    grown = order[others > 10**shared.TENFOLD * usual]
    if not 0 < len(grown) <= max(1, shared.FEW * len(norms)) or len(norms) < shared.SEVERAL:
        return None
    last = record.layout.owner_names[int(grown.max())]
    return Stretch(last, last)


_BATCH_KEY = "(batch)"
