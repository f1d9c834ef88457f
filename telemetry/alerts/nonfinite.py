"""NaN or infinity that training cannot recover from, and its origin."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.layers.module_types import AFFINE, STANDARD
from telemetry.plain_text import called, figure, printable
from telemetry.records import Module, Output, StepRecord
from telemetry.records.moments import nonfinite_of
from telemetry.records.sketch import SAMPLE_ELEMENTS
from telemetry.records.step import RUNNING_STATISTICS, is_inside
from telemetry.records.tensor import Tensors, bad_among


class Nonfinite(Detector):
    """NaN or infinity is in the loss, a parameter, its gradient or a buffer.

    Evidence: the origin (inputs, targets, loss, optimizer, a module's pass), any overflow.
    Causes: a division by zero, ``log(0)``, overflow in float16, NaN in the data, an explosion.
    Remedies: check inputs and targets of that step; add an epsilon; use ``GradScaler`` or bfloat16.
    Silent: masks of -inf, NaN that the model fills in, single steps that a ``GradScaler`` skips.
    Example: loss = torch.log(torch.relu(model(x))).mean()

    Values inside of the network show the :func:`origin`, but count only in the output of the last
    module. Numbers overflowed if gradients grew millionfold, the loss a thousandfold, or the
    weights a hundredfold in one step. It resolves after twenty good steps, the last of them full:
    parameters that are not used for some steps show only there.
    """

    kind = "nonfinite"
    statistic = "nonfinite"
    severity = "error"
    explained_by = shared.DIVERGED | {"ranks_diverge"}
    after = explained_by | {"dead_units"}
    persistent = True
    explained_by_rate_jump = True
    # A scaler halves its factor at each skipped step, and first needs several
    losses: int = limit(shared.FEWEST, "Consecutive non-finite losses without an optimizer step.")
    _bad_losses: int = state(0)
    _loss_step: int = state(-1)
    _last_good: int | None = state(None)
    _skipped: bool | None = state(None)
    _has_scaler: bool = state(False)
    _calm_steps: int = state(0)
    _usual: set[str] = state(set)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self.needs_full_step = False
        self._skipped = record.skipped
        self._has_scaler |= record.loss_scale is not None
        if baseline.age == 0:  # made as NaN, and perhaps never used
            made = [n for n in record.nan_buffers if not n.endswith(RUNNING_STATISTICS)]
            self._usual.update(made)
        if record.skipped:
            return None
        # Steps without a record in between are unknown.
        after_good = self._last_good == record.step - 1
        found = origin(record, self._usual, after_good=after_good)
        self._last_good = record.step if record.all_grads_finite else None
        if found is None:
            self._usual.update(bad_among(record.inputs), map(_key, _infinite(record)))
            return None
        self._calm_steps = 0
        loss, advice, how = record.loss or 0.0, found.advice, _overflow(baseline)
        bad = "NaN or infinity" if record.all_grads_finite else "Gradients are NaN or infinite"
        if not math.isfinite(loss):
            bad = f"The loss is {'NaN' if math.isnan(loss) else 'infinite'}"
        place = f", first in {found.where}"
        if how:
            place = "" if advice in (_TARGETS, _UNKNOWN) else place
            advice = _TOO_LARGE
        elif advice is _UNKNOWN:
            place = f". It began in {found.where}: the step was not measured in full"
        return Finding(
            module_name=found.module_name,
            value=(~record.grad_finite).sum(),
            summary=f"{bad} at step {record.step}{how}{place}",
            advice=advice,
            batch_steps=_batch_steps(record, advice, after_good=after_good),
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        self._calm_steps += not record.skipped
        may_resolve = self._calm_steps >= shared.LATEST
        resolves = may_resolve and record.full and not record.skipped
        self.needs_full_step = may_resolve and not resolves
        return not resolves

    def find_in_loss(self, step: int, loss: float) -> Finding | None:
        # Some steps have no record. Before the first record the optimizer is unknown.
        has_stepped = step != self._loss_step and not self._skipped
        before, self._loss_step = 0 if has_stepped else self._bad_losses, step
        self._bad_losses = 0 if math.isfinite(loss) else before + 1
        if self._bad_losses < self.losses or self._skipped is None:
            return None
        self._calm_steps = 0
        return Finding(
            value=self._bad_losses,
            threshold=self.losses,
            summary=f"{self._bad_losses} consecutive losses are NaN or infinite, and the optimizer "
            "made no step",
            cause="The gradient scaler skips every step" if self._has_scaler else None,
            advice=(
                "Check the weights for NaN, and resume from a checkpoint",
                "Use bfloat16 or a lower learning rate",
            ),
        )


def _overflow(baseline: Baseline) -> str:
    """Return a clause about what grew until numbers overflowed; empty if nothing grew enough."""
    levels = baseline.layers.levels.max(axis=1, initial=-np.inf)
    levels = levels[levels > -np.inf]
    of_gradients = 10 ** (levels[-1] - levels[0]) if len(levels) else 0.0
    # With limits chosen manually. The loss of cnn_lr30 grows to 5e15, that of cnn_nan_batch,
    # without an overflow, to 4.
    grown = (
        ("the loss", baseline.loss.excess, 1e3),
        ("the gradient norm", of_gradients, 1e6),
        ("the weights", baseline.step_ratio, 1e2),
    )
    what, growth, limit = max(grown, key=lambda one: one[1] / one[2])
    if growth < limit:
        return ""
    return f": numbers overflowed after {what} grew {figure(growth, 1)}-fold"


_TOO_LARGE = (
    shared.WARM_UP,
    shared.CLIP,
    "Check the initial weights and custom backward functions",
    "Use bfloat16: float16 ends at 65504",
)


def _batch_steps(record: StepRecord, advice: Sequence[str], *, after_good: bool) -> list[int]:
    """Return the step whose batch may be the cause, if any."""
    if advice in (_TOO_LARGE, _BUFFER) or (advice is _OPTIMIZER and after_good):
        return []
    losses = [*record.losses_between, (record.step, record.loss or 0.0)]
    bad = [step for step, loss in losses if not math.isfinite(loss)]
    if bad and not after_good:  # the first steps with NaN may have no record
        return [min(bad[0] - record.loss_delay, record.step)]
    return [record.step] if advice is not _OPTIMIZER else []


class Origin(NamedTuple):
    """Origin of values that are not finite."""

    module_name: str | None  # the culprit, if it is a module and known
    where: str  # to follow "first in", or all possible places with the advice _UNKNOWN
    advice: tuple[str, ...]


def origin(record: StepRecord, usual: Collection[str], *, after_good: bool) -> Origin | None:
    """Return the origin of values that training cannot recover from; "bad" means not finite.

    The optimizer is the origin if it broke a parameter though gradients were finite. Else it is the
    first of these that is bad: the inputs, unless they are ``usual`` (bad at good steps, too); a
    buffer that is no running statistic; the output of a module; the loss; the gradients that leave
    a module whose incoming ones are finite.

    Inputs and outputs are known at full steps only. Otherwise the loss, the bad gradients and, if
    gradients are on the CPU, the running statistics of batch norms are known. If several modules
    may be the origin, none is named as the culprit.
    """
    if (found := _in_parameters(record, after_good=after_good)) is not None:
        return found
    is_lost, bad = not math.isfinite(record.loss or 0.0), bad_among(record.outputs)
    if not is_lost and record.all_grads_finite:
        for name in record.nan_buffers:
            if name in usual:
                continue
            what = f"the buffer {printable(name)}, which only evaluation mode uses"
            return Origin(name.rpartition(".")[0], what, _BUFFER)
        if not bad or bad[-1] != [*record.outputs][-1]:  # it does not reach the end
            return None
    if is_lost:  # NaN comes of infinity: -inf of a logarithm, and not of a mask
        first = {*bad, *[output for output in _infinite(record) if _key(output) not in usual]}
        bad = [output for output in record.outputs if output in first]
    entered = bad[0].module_name if bad else None
    for name in bad_among(record.inputs):
        if name not in usual:
            given = record.inputs[name].sketch
            whose = f"the input of {called(name)}" if name else "the batch"
            about = "about " if record.inputs[name].estimated else ""
            count = f"{about}{given.nonfinite_count:,} of {given.count:,} values"
            what = f"the inputs: {count} of {whose}"
            reached = f", which reach {called(entered)}" if entered is not None else ""
            return Origin(entered, what + reached, _BATCH)
    for _, name, owner in _constants(record) if record.outputs else ():
        if _may_begin_in(record, owner, entered):
            reached = f", which reaches {called(entered)}" if entered is not None else ""
            return Origin(owner, f"the buffer {printable(name)}{reached}", _BUFFER)
    if entered is not None:
        return Origin(entered, f"the forward pass, in {_place(record, bad[0])}", _FORWARD)
    if record.outputs and (is_lost or record.all_grads_finite):
        outputs = "no output is NaN" if _infinite(record) else "all outputs are finite"
        return Origin(None, f"the targets or the loss: {outputs}", _TARGETS)
    if not record.outputs and (found := _by_statistics(record)) is not None:
        return found
    return _by_gradients(record, is_lost=is_lost)


def _infinite(record: StepRecord) -> list[Output]:
    """Return outputs with infinities, in forward order."""
    if not record.outputs:
        return []
    return [*compress(record.outputs, nonfinite_of(Tensors.of(record.outputs).rows))]


def _key(output: Output) -> str:
    return f"output of {output}"  # no name of an input or a buffer


def _place(record: StepRecord, output: Output) -> str:
    """Return where the first bad output of a module began, in words.

    Finite weights make infinity of large finite inputs, and NaN of NaN alone.
    """
    name, layout, sketch = output.module_name, record.layout, record.outputs[output].sketch
    is_affine = layout.modules[layout.position[name]].type_name in AFFINE
    if not is_affine or not 0 < sketch.nan_count == sketch.nonfinite_count:
        return f"the output of {called(name)}"
    names = [other.module_name for other in record.outputs]
    place = names.index(name)
    before = f"after {called(names[place - 1])}" if place else "before all modules"
    return f"the input of {called(name)}, by a function {before}"


def _in_parameters(record: StepRecord, *, after_good: bool) -> Origin | None:
    broken = [*record.nonfinite_parameters]
    if record.all_grads_finite and not all(map(math.isfinite, record.update_ratios.values())):
        # The sample of a larger parameter may be all zeros, which have no ratio.
        broken += [
            p.name
            for p in record.layout.parameters
            if p.size <= SAMPLE_ELEMENTS
            and not math.isfinite(record.update_ratios.get(p.name, 0.0))
            and p.name in record.weights
            and record.weights[p.name].sketch.norm > 0
        ]
    if not broken:
        return None
    name = printable(broken[0])
    if not record.nonfinite_parameters:
        what = f"{name}: the optimizer step broke it, from finite gradients"
    elif after_good:
        what = f"{name}: the optimizer or other code broke it, after finite gradients"
    else:
        what = f"the parameter {name}"
    owner = next(p.module_name for p in record.layout.parameters if p.name == broken[0])
    return Origin(owner, what, _OPTIMIZER)


def _constants(record: StepRecord) -> list[tuple[int, str, str]]:
    """Return NaN buffers that are no statistics of a batch norm: the last user, name, and owner."""
    found, modules = [], record.layout.modules
    for name in record.nan_buffers:
        if not name.endswith(RUNNING_STATISTICS):
            owner = name.rpartition(".")[0]
            users = [i for i, module in enumerate(modules) if is_inside(module.name, owner)]
            found.append((max(users, default=len(modules)), name, owner))
    return sorted(found)


def _may_begin_in(record: StepRecord, owner: str, entered: str | None) -> bool:
    """Whether a module may be the origin, if ``entered`` has the first bad output."""
    order = [*record.activations]
    inside = [name for name in order if is_inside(name, owner)]
    if owner in inside:  # its own output is known
        return entered in inside
    return entered is None or not inside or order.index(entered) >= order.index(inside[0])


def _by_statistics(record: StepRecord) -> Origin | None:
    """Return the origin by buffers: running statistics include the inputs of every step.

    Another NaN buffer is named if none of the statistics before it is NaN.
    """
    modules = record.layout.modules
    noted = {
        name.rpartition(".")[0] for name in record.nan_buffers if name.endswith(RUNNING_STATISTICS)
    }
    first = next((i for i, module in enumerate(modules) if module.name in noted), None)
    for place, name, owner in _constants(record)[:1]:
        if first is None or place < first:
            what = f"the forward pass, in or before {called(owner)}: its buffer {printable(name)} "
            return Origin(owner, f"{what}is NaN{_NOT_FULL}", _BUFFER)
    if first is None:
        return None
    kind, name = modules[first].type_name, modules[first].name
    fine = [i for i, module in enumerate(modules[:first]) if module.type_name == kind][-1:]
    suspects = _own(record, modules[fine[0] + 1 if fine else 0 : first])
    what = f"the forward pass, before {called(name)}, whose running statistics are NaN"
    what += "".join(f", and after {called(modules[i].name)}, whose are not" for i in fine)
    what += _perhaps(suspects) + ("" if fine else f", or in the inputs{_NOT_FULL}")
    return Origin(suspects[0] if len(suspects) == 1 else name, what, _FORWARD)


def _by_gradients(record: StepRecord, *, is_lost: bool) -> Origin:
    """Return the origin after the last layer with a bad gradient.

    A bad value in the forward pass makes the gradients of all earlier layers bad, and of later ones
    that share its term of the loss. So if the loss is bad and gradients after that layer are good,
    these come from another term.
    """
    layout, grads = record.layout, record.activation_grads
    names = [module.name for module in layout.modules if module.name in grads]
    bad = [place for place, name in enumerate(names) if grads[name].sketch.nonfinite_count]
    if not bad:
        order = [i for i in layout.depth_order if record.grad_present[i]]
        names = [layout.parameters[i].module_name for i in order]
        bad = [place for place, i in enumerate(order) if not record.grad_finite[i]]
    behind = next(iter(names[bad[-1] + 1 :]), None) if bad else None
    # A loss that is logged after the step is that of the batch before.
    loss_is_good = record.loss is not None and not is_lost and not record.loss_delay
    if not bad or not (record.outputs or behind is not None or loss_is_good):
        return _by_elimination(record)
    last = names[bad[-1]]
    end = layout.position[behind] + 1 if behind is not None else None
    suspects = _own(record, layout.modules[layout.position[last] + 1 : end])
    culprit = suspects[0] if len(suspects) == 1 else last
    if is_lost and behind is not None:
        what = f"a function, targets or a term of the loss after {called(last)}"
        what += f"{_perhaps(suspects)}; the term of {called(behind)} is finite"
        return Origin(culprit, what, _TARGETS)
    if culprit != last:
        return Origin(culprit, f"the backward pass of {called(culprit)}", _BACKWARD)
    if behind is None and not record.outputs:
        # A NaN that the loss multiplies by 0 is still NaN, and clipping spreads one to all.
        what = f"the gradient of the loss for {called(last)}, in outputs that the loss does not use"
        return Origin(
            last, f"{what} or, if gradients are clipped, in any layer{_NOT_FULL}", _BACKWARD
        )
    what = f"the gradient of the loss for {called(last)}"
    if behind is not None:  # may also be on another branch
        what = f"the backward pass, in the gradient of {called(last)}; that of {called(behind)} is"
        what += " finite"
    return Origin(last, f"{what}{_perhaps(suspects)}", _BACKWARD)


def _by_elimination(record: StepRecord) -> Origin:
    """Return the origin if all gradients are bad, or none is."""
    others = "the targets, the loss or a function"
    if record.loss is None or not math.isinf(record.loss):
        others = f"the inputs, {others}"
    suspects = _own(record, record.layout.modules)
    if suspects:
        others = f"{others}{_perhaps(suspects)}"
    culprit = suspects[0] if len(suspects) == 1 else None
    return Origin(culprit, others, _UNKNOWN)


def _own(record: StepRecord, modules: Sequence[Module]) -> list[str]:
    """Return modules that are not PyTorch's and have no parameters; if none, those that have.

    PyTorch's modules map usual numbers to usual numbers.
    """
    others = [m.name for m in modules if m.type_name not in STANDARD]
    owners = {parameter.module_name for parameter in record.layout.parameters}
    return [name for name in others if name not in owners] or [*filter(None, others)]


def _perhaps(suspects: Sequence[str]) -> str:
    named = " or ".join(map(called, suspects[:3]))
    return f", perhaps in {named}" if named else ""


_NOT_FULL = " (it was not a full step)"
_OPTIMIZER: tuple[str, ...] = (
    "Check for eps=0 in Adam",
    "Lower the learning rate and the weight decay",
    "Check for code that changes weights",
)
_BUFFER: tuple[str, ...] = ("Check the batches since it was last finite", "Reset the module")
_BATCH: tuple[str, ...] = ("Check how these samples are made and normalized", "Remove them")
_FORWARD: tuple[str, ...] = (
    "Check for log, sqrt or division without an eps, and for exp of large numbers",
    "Lower the learning rate and clip gradients",
)
_TARGETS: tuple[str, ...] = (
    "Check the batch and its targets for NaN, and for targets that the loss does not allow",
    "Check for log, sqrt or division without an eps",
)
_UNKNOWN = *_TARGETS, "Run again with every_n_steps=1 to learn the place"
_BACKWARD: tuple[str, ...] = (
    "Check for sqrt, norm, log or division at 0: the value is finite, its gradient is not",
    "Add an eps inside, or exclude these values before",
)
