"""Units that do not learn: dead, or saturated in the flat part of their activation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline, Marks
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.layers import table
from telemetry.layers.module_types import AFFINE, BOUNDED, DROPOUTS, STANDARD, TWO_SIDED, Flat
from telemetry.layers.record import ForwardOutputs
from telemetry.layers.units import ranges, saturated_units
from telemetry.plain_text import called, printable
from telemetry.records import Output, StepRecord, once
from telemetry.records.buckets import bucket_of
from telemetry.records.moments import rms_of, zero_fraction_of
from telemetry.records.rows import Rows
from telemetry.records.sketch import Sketch
from telemetry.records.tensor import Tensors


class DeadUnits(Detector):
    """Units of a layer are zero for every sample: nearly all in several batches, or nine in ten for
    50 steps. An error if all are dead. Or all inputs of a layer are zero.

    Evidence: the share, the layer, its units (``telemetry.read(run).units(layer)``), the ReLU
        behind it.
    Causes: a learning rate that is too large, a bad bias, a penalty that pushes below zero.
    Remedies: lower the learning rate; check biases and penalties; use LeakyReLU or GELU.
    Silent: sparsity, units that are rarely active in small batches, branches that begin at zero.
    Example: nn.init.constant_(model[0].bias, -100.0)  # before a ReLU

    A unit is dead in a batch

    - after an activation module: if it is zero for all samples, or negligible (a thousandth of the
      input) for inputs that are all negative, as after SiLU;
    - before a functional activation: if it is negative for all samples, and at least as large a
      share of its gradients is exactly zero.

    Zero outputs of modules with own parameters count only if these get no gradient. Silent units
    confirm each other, so ``samples`` is divided by the square root of their number. A share alone
    takes 50 steps since units near the limit recover. It resolves when a quarter is active.

    If no layer has dead units, a function may return zeros: then the weights of the next layer have
    a gradient of exactly zero while its outputs have another, at full steps over 20 steps.
    """

    kind = "dead_units"
    statistic = "dead_units"
    on = "full"
    clear_after = shared.SEVERAL
    explained_by = shared.DIVERGED | {
        "nonfinite",
        "vanishing_gradient",
        "exponential_trend",
        "loss_stuck",
    }
    after = shared.RISEN_LOSSES | {"exploding_gradient"}
    persistent = True
    explained_by_rate_jump = True
    # Healthy layers have 47 % at most, dead ones 96 %. At 0.75 the vanishing mlp_overwrite_tiny is
    # missed; at 0.99 mlp_dies_slowly is found 50 steps later.
    fraction: float = limit(0.9, "Share of dead units that counts after 50 steps.")
    batches: int = limit(shared.AGAIN, "Consecutive full steps with nearly all units dead.")
    # Chosen manually; tried 50, and 5000, which delays alerts by up to 60 steps.
    samples: float = limit(500.0, "Values of each unit, fewer if more units are dead.")
    full_steps_in_a_row: int = state(shared.AGAIN)
    _silence: dict[Output, _Silence] = state(dict)
    _without_input: dict[str, int] = state(dict)  # modules without one, and the step since when

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self.needs_full_step, units = False, _silent_units(record)
        for output in self._silence.keys() & {o for o, share, _ in units if share < self.fraction}:
            del self._silence[output]
        dead = [
            output
            for output, share, silent in units
            if share >= self.fraction and self._is_dead(output, silent, record)
        ]
        # If there is no gradient at all, the loss does not depend on the model.
        gradients = [record.output_grads[output].sketch.sum_squares for output in dead]
        if not dead:
            return self._get_zeros(record, baseline)
        if not (record.total_grad_norm > 0 or any(gradients)):
            return None
        if self.active_alert is not None:  # the first layer without any unit left escalates it
            dead.sort(key=lambda output: self._silence[output].whole < self.batches)
        # Layers behind a dead one get constants: the first is the cause.
        silence = self._silence[dead[0]]
        size, is_whole = silence.silent.size, silence.whole >= self.batches
        count = size if is_whole else int(silence.silent.sum())
        batches = silence.whole if is_whole else silence.batches
        which = "" if is_whole else f" ({ranges(silence.silent)})"
        # A layer before a ReLU returns no zeros: its dead units are observed behind it.
        behind = next((output for output in dead[1:2] if self._is_zero(output, record)), None)
        is_zero = self._is_zero(dead[0], record)
        observed_in = None if is_zero or behind is None else behind.module_name
        first, *others = (
            called(str(output)) for output in dead[:4] if output.module_name != observed_in
        )
        module = record.layout.modules[record.layout.position[dead[0].module_name]]
        what = "are zero for every input" if is_zero else "get no gradient"
        in_batches = f"{batches} batches" if batches > 1 else "one batch"
        also = f"; also units of {', '.join(others)}" if others else ""
        cause = f"{called(str(behind))} zeroes all they return" if observed_in else None
        place = [output for output, _, _ in units].index(dead[0])
        were_alive = all(share < shared.MOST for _, share, _ in units[max(place - 1, 0) : place])
        advice = _DROPPED if module.type_name in DROPOUTS and were_alive else _ADVICE
        if module.name in baseline.began_zero:
            cause, advice = "All its weights started at 0", _RANDOM
        elif baseline.age >= shared.FEWEST and baseline.loss.has_not_fallen:
            advice = (_NO_PROGRESS, *advice)
        return Finding(
            summary=f"{count} of {size} units of {first}{which} {what} in {in_batches}{also}",
            cause=cause,
            advice=advice,
            value=count / size,
            threshold=self.fraction,
            module_name=module.name,
            observed_in=observed_in,
            severity="error" if is_whole or record.total_grad_norm == 0 else "warning",
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        """Whether most units of the reported layer are still silent."""
        units = _silent_units(record)
        shares = [share for output, share, _ in units if output.module_name == self._active_module]
        return max(shares, default=0.0) > shared.MOST or self._active_module in self._without_input

    def _get_zeros(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        """Return the finding of the first layer that gets only zeros.

        One whose gradients have all been zero from the first step on may get them on purpose, such
        as the first of an unrolled iteration.
        """
        of_layers = zip(baseline.layers.names, baseline.layers.highest, strict=True)
        learned = {name for name, highest in of_layers if highest > -math.inf}
        idle = [name for name in _idle_layers(record) if name in learned]
        since = {name: self._without_input.get(name, record.step) for name in idle}
        self._without_input = since
        name, steps = next(((n, record.step - s) for n, s in since.items()), ("", 0))
        if steps < shared.LATEST:
            self.needs_full_step |= bool(name)
            return None
        return Finding(
            summary=f"The weights of {called(name)} get a gradient of exactly 0 for {steps} steps, "
            "while its outputs get another",
            cause=f"The inputs of {called(name)} are 0 for all samples, or a hook clears it",
            advice=("Check the unit and the range of its inputs, and functions before it",),
            value=1.0,
            threshold=self.fraction,
            module_name=name,
            statistic="grad_norm",
        )

    def _is_zero(self, output: Output, record: StepRecord) -> bool:
        """Whether all silent units return zero; else they only get no gradient."""
        zero = record.outputs[output].zero_units
        return zero is None or bool(zero[self._silence[output].silent].all())

    def _is_dead(self, output: Output, silent: Marks, record: StepRecord) -> bool:
        """Add this batch to those before, and return whether the units are dead."""
        kept = self._silence.get(output)
        is_new = kept is None or kept.silent.shape != silent.shape
        if kept is None or is_new or (silent & kept.silent).mean() < self.fraction:
            kept = self._silence[output] = _Silence(silent=silent, since=record.step)
        kept.silent = silent & kept.silent
        kept.batches += 1
        kept.samples += record.outputs[output].sketch.finite_count / silent.size
        kept.whole = kept.whole + 1 if silent.all() else 0
        count = kept.silent.sum()
        enough = kept.batches >= self.batches and kept.samples * count**0.5 >= self.samples
        self.needs_full_step |= not enough
        are_nearly_all = silent.size - count <= max(1, (1 - _NEARLY_ALL) * silent.size)
        return bool(enough and (are_nearly_all or record.step - kept.since >= shared.LONG))


_ADVICE = (
    "Lower the learning rate",
    "Check biases, initialization and penalties",
    "Use LeakyReLU or GELU",
)
_NO_PROGRESS = "The loss has not fallen yet: check that each target belongs to its input"
_RANDOM = ("Initialize the weights at random, such as with He or Xavier initialization",)
_DROPPED = ("Check the probability of this dropout: it is the share that is dropped",)
_NEARLY_ALL = 0.93  # or all but one; in sparsity_too_strong they are 0.945


@dataclass(kw_only=True)
class _Silence:
    """Units of one output that were silent in all of the last batches."""

    silent: Marks  # [units]
    since: int  # first step
    batches: int = 0
    samples: float = 0.0
    whole: int = 0  # batches, up to the latest, in which every unit was silent


@once
def _silent_units(record: StepRecord) -> Sequence[tuple[Output, float, Marks]]:
    """Return outputs that get a gradient, in forward order: the share and marks of silent units."""
    forward, layout = ForwardOutputs.of(record), record.layout
    if not forward.outputs:
        return ()
    # Modules all of whose gradients exist and are exactly zero.
    no_gradient = record.grad_present & (record.grad_norms == 0)
    idle = {*layout.owners[no_gradient].tolist()} - {*layout.owners[~no_gradient].tolist()}
    units, sizes = forward.rows.units, forward.rows.unit_count
    two_sided = np.array([kind in TWO_SIDED for kind in forward.types])
    is_idle = np.array([layout.position[o.module_name] in idle for o in forward.outputs])
    gradients = Tensors.of(record.output_grads)
    row_of = {output: row for row, output in enumerate(gradients)}
    places = np.array([row_of.get(output, -1) for output in forward.outputs])
    lowest, highest = units.T  # reducing an axis of two is slow
    zero, negative = (lowest == 0) & (highest == 0), highest < 0
    # Whether the share of zero gradients is at least the share of negative units.
    rows = np.arange(len(sizes)).repeat(sizes)
    share = np.bincount(rows, negative, minlength=len(sizes)) / np.maximum(sizes, 1)
    no_gradients = np.concatenate([zero_fraction_of(gradients.rows), [math.nan]])[places]
    cut_off = no_gradients >= share
    cut_off[:-1] &= ~two_sided[1:]
    # An affine layer with gradients behind it, and none of its weights, gets zeros: no unit died.
    is_idle &= ~(np.array([kind in AFFINE for kind in forward.types]) & (no_gradients < 1))
    of_owned = (zero & is_idle[rows]) | (negative & cut_off[rows])
    silent = np.where(np.array(forward.owned)[rows], of_owned, zero | _negligible(forward.rows))
    shares = (np.bincount(rows, silent, len(sizes)) / sizes).tolist()
    ends, sizes = sizes.cumsum().tolist(), sizes.tolist()
    return [
        (output, shares[i], silent[ends[i] - sizes[i] : ends[i]])
        for i, output in enumerate(forward.outputs)
        if output in row_of and sizes[i] > 1 and not two_sided[i]  # single units do not count
    ]


def _negligible(rows: Rows) -> Marks:
    """Mark units with negligible outputs whose inputs, the output before, were all negative.

    The input of the first output is itself.
    """
    sizes = rows.unit_count
    as_many = np.concatenate([[True], sizes[1:] == sizes[:-1]]).repeat(sizes)
    back = np.concatenate([[0], sizes[1:]]).repeat(sizes)
    inputs = rows.units[np.arange(len(rows.units)) - back, 1]
    largest = np.maximum(*np.abs(rows.units.T))
    negligible: Marks = as_many & (inputs < 0) & (largest <= -shared.TINY * inputs)
    return negligible


def _idle_layers(record: StepRecord) -> list[str]:
    """Return affine layers whose weights have a zero gradient and whose outputs have another.

    The gradient of the weights is that of the outputs times the inputs; that of the bias has no
    such factor. If that is zero, too, something sets both to zero.
    """
    layout, outputs = record.layout, table(record).column("activation_grad_rms") > 0
    weights = np.array([*layout.matrices.values()], np.intp)
    idle = layout.owners[weights[record.grad_present[weights] & (record.grad_norms[weights] == 0)]]
    size = len(layout.modules)
    has_bias = np.bincount(layout.owners, record.grad_present, size) > 1
    bias_learns = np.bincount(layout.owners, record.grad_norms > 0, size) > 0
    reached = np.where(has_bias, bias_learns, outputs)
    chosen = [layout.modules[index] for index in sorted(idle[reached[idle]].tolist())]
    return [module.name for module in chosen if module.type_name in AFFINE]


class SaturatedUnits(Detector):
    """Outputs of a layer lie mostly on the flat part of its activation function.

    Evidence: the layer and the share of its outputs.
    Causes: inputs or initial weights that are too large, a learning rate that is too large.
    Remedies: scale or center the inputs, use smaller initial weights, add normalization.
    Silent: the network's outputs, gates of feature maps, layers that became flat as the loss fell.
    Example: model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))  # inputs of 1e4

    The flat part depends on the module's type. For tanh and sigmoid, three quarters of it must have
    hardly any slope. For unknown types without parameters, it is the ends of their range, if hardly
    any gradient passes. Functions show in their neighbors: large outputs, a small input of the next
    layer. A layer must be flat from the first step on, or become flat within 20 steps while the
    loss does not improve.
    """

    kind = "saturated_units"
    statistic = "saturation"
    on = "full"
    clear_after = shared.SEVERAL
    explained_by = shared.DIVERGED | {"exponential_trend"}
    after = shared.RISEN_LOSSES
    persistent = True
    explained_by_rate_jump = True
    # Healthy hidden layers have 21 % at most, faulty ones 90 % or more, except for the gates of
    # highway_carry_gates, hence MOST. Tried 0.4 and 0.95.
    fraction: float = limit(0.8, "Share of the outputs that are flat.")
    evaluations: int = limit(shared.AGAIN, "Consecutive full steps.")
    _layers: dict[Output, _Layer] = state(dict)
    _shares: dict[str, float] = state(dict)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self.needs_full_step, self._shares, found = False, {}, None
        if not record.all_grads_finite:
            return None
        for output, share in _flat_shares(record):
            self._shares[output.module_name] = share
            layer = self._layers.setdefault(output, _Layer())
            if share < self.fraction:
                layer.evaluations, layer.is_candidate = 0, False
                layer.fine_at = record.step if share < shared.HALF else layer.fine_at
                continue
            layer.evaluations += 1
            sudden = layer.fine_at is None or record.step - layer.fine_at <= shared.LATEST
            layer.is_candidate |= baseline.loss.is_worse or (sudden and not baseline.loss.is_better)
            is_sure = layer.evaluations >= self.evaluations
            self.needs_full_step |= not is_sure
            if layer.is_candidate and is_sure and found is None:
                found = self._found(record, output, share, baseline)
        self.needs_full_step &= self.active_alert is None
        return found

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        share = self._shares.get(self._active_module, 0.0)
        return not record.all_grads_finite or share >= shared.HALF

    def _found(
        self, record: StepRecord, output: Output, share: float, baseline: Baseline
    ) -> Finding:
        name, layout = output.module_name, record.layout
        what, advice = f"{share:.0%} of the outputs of {called(str(output))}", _SMALLER
        if name in layout.owner_names:
            summary = f"{what} are large and pass hardly any gradient"
            cause = "The following activation is most likely flat there"
        else:
            kind = layout.modules[layout.position[name]].type_name
            units = record.outputs[output].rows.units_of(record.outputs[output].row)
            which = "" if units is None else ranges(saturated_units(kind, units))
            named = f"unit{'' if which.isdecimal() else 's'} {which}"
            summary = f"{what} are saturated" + (f"; {named} for all inputs" if which else "")
            cause, advice = f"{printable(kind)} is flat there and passes no gradient", _CENTERED
        large, why = baseline.large_start
        if large and layout.position[large] <= layout.position[name]:
            cause = why
            advice = f"Make the initial weights of {called(large)} smaller", *_SMALLER[1:]
        return Finding(
            summary=summary,
            cause=cause,
            advice=advice,
            value=share,
            threshold=self.fraction,
            module_name=name,
        )


def _flat_shares(record: StepRecord) -> list[tuple[Output, float]]:
    """Return the outputs of hidden layers and the flat share of each, in forward order."""
    forward, layout, shares = ForwardOutputs.of(record), record.layout, []
    rms = rms_of(forward.rows).tolist()
    for index in forward.hidden:
        output, type_name = forward.outputs[index], forward.types[index]
        if forward.positions[index] < shared.FEW_SAMPLES:  # an expert that few tokens reach
            continue
        if type_name in BOUNDED:
            # An RNN may have been made with ReLU, which shows by outputs above 1.
            is_other = forward.owned[index] and forward.rows.max[index] > 1
            if is_other or forward.is_gate(index):
                continue
            place, flattest = layout.position[output.module_name], BOUNDED[type_name].flattest
            share = table(record).value(place, "saturation") or 0.0
            if flattest is not None:  # most outputs have to be where it is flattest
                share = min(share, flattest.share(record.outputs[output].sketch) / shared.MOST)
            shares.append((output, share))
        elif forward.owned[index]:
            if forward.types[index + 1] in AFFINE:
                after, is_small = forward.outputs[index + 1], rms[index] < shared.LARGE_INPUT
                lost = 0.0 if is_small else _share_lost(record, output, after)
                shares.append((output, lost))
        elif type_name not in STANDARD and index > 0 and _has_units(forward, index):
            before = forward.outputs[index - 1]
            shares.append((output, _share_at_ends(record, output, before)))
    return shares


def _share_at_ends(record: StepRecord, output: Output, before: Output) -> float:
    """Return the share of outputs at the ends of their range; 0 if gradients pass."""
    sketch, gradient = record.outputs[output].sketch, record.output_grads.get(before)
    is_passed = gradient is None or _share_faint(gradient.sketch) < shared.MOST
    if is_passed or sketch.min == sketch.max:
        return 0.0
    # A low end of zero is a kind of ReLU, and no fault.
    return Flat(low=sketch.min or -math.inf, high=sketch.max).share(sketch)


def _has_units(forward: ForwardOutputs, index: int) -> bool:
    """Whether an output has more than one number per call: a module may compute a loss."""
    return bool(forward.rows.count[index] > forward.rows.calls[index])


@dataclass(kw_only=True)
class _Layer:
    """State of one layer."""

    evaluations: int = 0  # consecutive full steps at which it was flat
    fine_at: int | None = None  # the last step at which it was not; None if it never was
    is_candidate: bool = False  # training does not explain why it became flat


_SMALLER: tuple[str, ...] = (
    "Make its initial weights smaller",
    "Normalize its outputs; before a softmax, normalize queries and keys",
)
_CENTERED = (
    "Scale and center the inputs",
    "Make the initial weights smaller",
    "Add normalization before the activation",
)
# Bounded functions return 1 at most. At 0.4 rnncell_saturated is missed; tried 1 and 10.
_SMALL = 2.0


def _share_faint(sketch: Sketch) -> float:
    """Return the share of values below a thousandth of the RMS."""
    if not sketch.finite_count or sketch.sum_squares == 0:
        return 1.0
    limit = bucket_of(shared.TINY * sketch.rms)
    return float(sketch.counts[np.abs(sketch.buckets) < limit].sum() / sketch.finite_count)


def _share_lost(record: StepRecord, output: Output, after: Output) -> float:
    """Return the share of a layer's positive outputs without a gradient before a bounded function.

    Negative outputs do not count, since a ReLU may follow. The RMS of the next layer's input is
    estimated from its output and its weights: ``rms_out * sqrt(out) / ||W||``.
    """
    sketch, gradient = record.outputs[output].sketch, record.output_grads.get(output)
    layout, rms = record.layout, record.outputs[after].sketch.rms
    owned = [layout.parameters[i] for i in layout.owned[layout.position[after.module_name]]]
    matrix = next((p for p in owned if len(p.shape) > 1 and p.name in record.weights), None)
    norm = 0.0 if matrix is None else record.weights[matrix.name].sketch.norm
    if gradient is None or matrix is None or not norm:
        return 0.0
    if rms * matrix.shape[0] ** 0.5 / norm > _SMALL:
        return 0.0
    negative = Flat(low=-math.ulp(0.0)).share(sketch)
    faint = _share_faint(gradient.sketch)
    return max(faint - negative, 0.0) / (1 - negative) if negative < 1 else 0.0
