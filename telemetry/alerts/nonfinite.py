"""NaN or infinity that training cannot recover from, and where it began."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from telemetry.alert import Alert
from telemetry.alerts.episode import CALM_STEPS, EpisodeRule
from telemetry.layers.module_types import STANDARD
from telemetry.measure.sampling import SAMPLE_ELEMENTS
from telemetry.records import Module, StepRecord
from telemetry.records.tensor import bad_among
from telemetry.shared.plain_text import called, printable


class Nonfinite(EpisodeRule):
    """Alerts when the loss, a parameter, its gradient or a buffer is NaN or infinite.

    Such values inside of the network show where the fault began, but are not one by themselves:
    masks hold ``-inf``, missing values are NaN until the model fills them in. They count when they
    reach the output of the last module. Steps that a gradient scaler skips are no fault, but after
    ten losses in a row that are not finite, and no other step, the rule reports that.

    Where it began is the first of these that holds:

    - the optimizer: it made a parameter so though gradients were finite, at this step or before it;
    - the inputs: the batch is bad, or what the first watched module is given, unless a good step
      had such values before;
    - the forward pass: the output of a module is bad;
    - the targets or the loss: the loss is bad, and no output is;
    - the backward pass: the loss is finite and gradients are not. A module began it if gradients
      come in finite and go out bad.

    At a step that was not measured in full, inputs and outputs are unknown. What is known are the
    loss, which gradients are bad, and, where gradients are on the CPU, the running statistics of
    batch norms, which have been given what is NaN in the forward pass.

    - It was the backward pass if the loss is finite, or not logged and the gradients of the last
      layers are; the culprit lies behind the last layer whose gradient is bad.
    - If the loss is bad and the gradients of some layers behind others are not, it is what follows
      the last bad one: another term of the loss has finite gradients.
    - If statistics are NaN, it was the forward pass, before the first batch norm that has them.
    - Otherwise it may have been the inputs (unless the loss is infinite and not NaN), the forward
      pass, the targets or the loss.

    Then a module is suspect if it is not one of PyTorch's, because those do not turn usual numbers
    into NaN. If several are, they are said to be, and none is named as the culprit.

    Where loss or gradients had grown a millionfold, the numbers overflowed, wherever that shows.

    Args:
        losses: Number of losses in a row that are not finite, after which no further optimizer step
            is expected.
    """

    name = "nonfinite"
    losses = 10  # a scaler halves its factor at each skipped step, and first needs several
    _bad_losses: int = 0
    _loss_step: int = -1
    _seen: int = -1
    _has_stepped: bool = False
    _skipped: bool = False
    _has_scaler: bool = False
    _was_good: bool = False
    _usual: set[str]
    _calm_steps: int = 0
    _loss: _Ends
    _norm: _Ends

    def _set_up(self) -> None:
        self._usual = set()
        self._loss, self._norm = _Ends(), _Ends()

    @property
    def wants_full(self) -> bool:
        """Whether it seems to be over, and what shows only in full could remain."""
        return self._episode.is_on and self._calm_steps >= CALM_STEPS

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        """Count losses that are not finite; perhaps no step follows them."""
        # A step may come without a record: not of each are the norms taken.
        has_stepped = step != self._loss_step and not self._skipped
        self._bad_losses = 0 if has_stepped else self._bad_losses
        self._bad_losses = 0 if math.isfinite(loss) else self._bad_losses + 1
        self._loss_step = step
        if self._bad_losses != self.losses or not self._has_stepped or self._episode.is_on:
            return ()
        self._calm_steps = 0
        return self._episode.update(step, self._no_step(step))

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self._has_stepped = True
        self._skipped = record.skipped
        self._has_scaler |= record.loss_scale is not None
        if record.skipped:
            return ()
        # What the steps did in between of which there is no record is not known.
        after_good = self._was_good and self._seen in (-1, record.step - 1)
        found = next(origins(record, self._usual, after_good=after_good), None)
        self._seen = record.step
        self._was_good = record.all_grads_finite
        if found is not None:
            self._calm_steps = 0
            return self._episode.update(record.step, self._found(record, found))
        if record.loss is not None:
            self._loss.add(record.loss)
        self._norm.add(record.total_grad_norm)
        if record.inputs:
            self._usual.update(bad_among(record.inputs))
        self._calm_steps += 1
        # A parameter or buffer that is not used for some steps shows only in full.
        is_over = self._calm_steps >= CALM_STEPS and record.full
        return self._episode.update(record.step, None) if is_over else ()

    def _no_step(self, step: int) -> Alert:
        why = ": the gradient scaler skips every step" if self._has_scaler else " after them"
        message = (
            f"{self.losses} losses in a row are NaN or infinite and the optimizer does not step"
            f"{why}, waiting will not help.\n"
            "People usually look for a NaN in the weights, go back to a checkpoint, and use "
            "bfloat16 or a lower learning rate."
        )
        return self._alert(step, None, self.losses, self.losses, message, "error")

    def _found(self, record: StepRecord, origin: Origin) -> Alert:
        where, advice = origin.where, origin.advice
        known = (("the loss", self._loss), ("the gradient norm", self._norm))
        what, growth = max(known, key=lambda pair: pair[1].times)
        if growth.times >= _OVERFLOWS:
            where += f", after {what} had grown {growth.times:.1g}-fold: the numbers overflowed"
            advice = _TOO_LARGE
        message, count = (
            f"NaN or infinity, first seen in {where}.\n{advice}",
            (~record.grad_finite).sum(),
        )
        return self._alert(record.step, origin.module_name, count, 0.0, message, "error")


@dataclass
class _Ends:
    """The first and the last of some magnitudes; those that are not finite are left out."""

    first: float = 0.0
    last: float = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self.last = abs(value)
            self.first = self.first or self.last

    @property
    def times(self) -> float:
        """How many times as large the last is as the first; 0 if that is not known."""
        return self.last / self.first if self.first else 0.0


_OVERFLOWS = 1e6  # by eye
_TOO_LARGE = (
    "People usually lower the learning rate or warm it up, clip gradients (clip_grad_norm_), and "
    "check the initial weights and custom backward functions; float16 ends at 65504."
)


class Origin(NamedTuple):
    """Where values that are not finite began.

    Attributes:
        module_name: The culprit, if it is a module and known.
        where: To follow "first seen in".
        advice: What people usually try.
    """

    module_name: str | None
    where: str
    advice: str


def origins(record: StepRecord, usual: Collection[str], *, after_good: bool) -> Iterator[Origin]:
    """Values that training cannot recover from, the best explanation first.

    Args:
        record: The step.
        usual: Inputs that were bad at steps that went well.
        after_good: Whether all gradients of the step before were finite.
    """
    yield from _parameters(record, after_good=after_good)
    step_lost = _is_lost(record.loss) or not record.all_grads_finite
    if not step_lost:  # what remains is in the buffers
        for name in record.nan_buffers:
            what = f"the buffer {printable(name)}: training hides it, evaluation will not"
            yield Origin(name.rpartition(".")[0], what, _BUFFER)
    if step_lost or _reaches_the_end(record):
        yield from _inputs(record, usual)
        for name, _ in bad_among(record.outputs):
            yield Origin(name, f"the forward pass, in the output of {called(name)}", _FORWARD)
        yield _loss_or_backward(record)


def _is_lost(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)


def _reaches_the_end(record: StepRecord) -> bool:
    """Whether the last module that ran returned NaN or infinity."""
    return bad_among(record.outputs)[-1:] == [*record.outputs][-1:] != []


# --- before the step, and in it ------------------------------------------------------------------


def _parameters(record: StepRecord, *, after_good: bool) -> Iterator[Origin]:
    if not (record.nonfinite_parameters or record.weights):
        return
    owner = {p.name: p.module_name for p in record.layout.parameters}
    for name in record.nonfinite_parameters:
        what = f"the parameter {printable(name)}"
        if after_good:
            what = f"the optimizer, or what else changes weights: {printable(name)} is so after a "
            what += "step with finite gradients"
        yield Origin(owner.get(name), what, _OPTIMIZER)
    for name in _broken_by_step(record):
        what = f"the optimizer: its step made {printable(name)} so, from finite gradients"
        yield Origin(owner[name], what, _OPTIMIZER)


def _broken_by_step(record: StepRecord) -> Iterator[str]:
    """Parameters that were finite before the step and are not after it, though gradients are."""
    for parameter in record.layout.parameters if record.all_grads_finite else ():
        weight = record.weights.get(parameter.name)
        ratio = record.update_ratios.get(parameter.name, 0.0)
        if weight is None or math.isfinite(ratio):
            continue
        # Of larger ones there is only a sample; that may be all zeros, which have no ratio.
        if weight.sketch.norm > 0 and parameter.size <= SAMPLE_ELEMENTS:
            yield parameter.name


def _inputs(record: StepRecord, usual: Collection[str]) -> Iterator[Origin]:
    """Bad values that came from outside, and the module that they entered by."""
    entered = next((output.module_name for output in bad_among(record.outputs)), None)
    reach = f", which reach {called(entered)}" if entered else ""
    for name in bad_among(record.inputs):
        if name not in usual:
            given = record.inputs[name].sketch
            count = f"{given.nonfinite_count:,} of {given.count:,} values"
            whose = f"what {called(name)} was given, and no watched module ran before it"
            what = f"the inputs: {count} of {whose if name else 'the batch itself'}{reach}"
            yield Origin(entered, what, _BATCH)


# --- the loss, and the backward pass -------------------------------------------------------------


def _loss_or_backward(record: StepRecord) -> Origin:
    """If no parameter, input or output is known to be bad."""
    order = [i for i in record.layout.depth_order if record.grad_present[i]]
    names = [record.layout.parameters[i].module_name for i in order]
    finite = [bool(record.grad_finite[i]) for i in order]
    lost = _is_lost(record.loss)
    if record.outputs and (lost or all(finite)):
        return Origin(None, "the targets or the loss: no output of a module is bad", _TARGETS)
    entered = None if record.outputs else _by_statistics(record)
    if entered is not None:
        return entered
    last = len(finite) - 1 - finite[::-1].index(False) if not all(finite) else None
    behind = names[last + 1] if last is not None and last + 1 < len(names) else None
    forward_was_good = record.outputs or (record.loss is not None and not lost)
    if last is not None and (forward_was_good or (behind is not None and not lost)):
        return _backward(record, names[last], behind)
    if last is not None and behind is not None:
        return _one_term(record, names[last], behind)
    return _forward_or_loss(record)


def _backward(record: StepRecord, last: str, behind: str | None) -> Origin:
    """The forward pass was good.

    Args:
        last: The last module whose parameters have a bad gradient.
        behind: The next one that has parameters; None if there is none.
    """
    modules, grads = record.layout.modules, record.activation_grads
    known = [module.name for module in modules if module.name in grads]
    bad = [name for name in known if grads[name].sketch.nonfinite_count]
    if bad:
        last = bad[-1]
        behind = next(iter(known[known.index(last) + 1 :]), None)
    between = _between(record, last, behind)
    if len(between) == 1:
        [name] = between
        return Origin(name, f"the backward pass, in that of {called(name)}", _BACKWARD)
    if behind is None and not record.outputs:  # zero times NaN is NaN
        what = "the backward pass of the loss, or in outputs that the loss leaves out,"
        return Origin(None, what + _NOT_MEASURED, _BACKWARD)
    beyond = called(behind) if behind is not None else "the loss"
    what = f"the backward pass, between {beyond} and {called(last)}{_perhaps(between)}"
    return Origin(last, what, _BACKWARD)


def _one_term(record: StepRecord, last: str, behind: str) -> Origin:
    """The loss is bad, and some layers, the last of all among them, have a finite gradient.

    What is bad in the forward pass makes the gradients of all layers before it bad, and of those
    behind it that share its term of the loss.
    """
    between = _between(record, last, behind)
    what = f"what follows {called(last)}, be it a function, targets or a term of the loss"
    what += f"{_perhaps(between)}; the term of {called(behind)} is fine, by its gradient"
    return Origin(between[0] if len(between) == 1 else last, what, _TARGETS)


def _forward_or_loss(record: StepRecord) -> Origin:
    """All gradients are bad, which leaves open what is to blame."""
    other = "the inputs, the targets or the loss"
    if record.loss is not None and math.isinf(record.loss):
        other = "the targets or the loss, which is infinite but not NaN,"
    other += _NOT_MEASURED
    suspects = _own(record, record.layout.modules)
    if len(suspects) == 1:
        what = f"the forward pass, most likely in {called(suspects[0])}; else in {other}"
        return Origin(suspects[0], what, _FORWARD)
    if suspects:
        return Origin(None, f"the forward pass{_perhaps(suspects)}, or in {other}", _FORWARD)
    # PyTorch's modules turn usual numbers into usual ones.
    return Origin(None, f"a function between the modules, {other}", _TARGETS)


def _by_statistics(record: StepRecord) -> Origin | None:
    """Batch norms note in the forward pass what they are given, also at steps not measured."""
    modules = record.layout.modules
    noted = {name.rpartition(".")[0] for name in record.nan_buffers}
    first = next((i for i, module in enumerate(modules) if module.name in noted), None)
    if first is None:
        return None
    kind, name = modules[first].type_name, modules[first].name
    before = [i for i, module in enumerate(modules[:first]) if module.type_name == kind]
    begin = before[-1] + 1 if before else 0
    suspects = _own(record, modules[begin:first])
    what = f"the forward pass, before {called(name)}, whose running statistics are NaN"
    what += f", and behind {called(modules[begin - 1].name)}, whose are not" if before else ""
    what += _perhaps(suspects) + ("" if before else f", or in the inputs{_NOT_MEASURED}")
    return Origin(suspects[0] if len(suspects) == 1 else name, what, _FORWARD)


def _between(record: StepRecord, last: str, behind: str | None) -> list[str]:
    """Suspects behind one module, up to another or the end."""
    modules, position = record.layout.modules, record.layout.position
    end = position[behind] + 1 if behind is not None else len(modules)
    return _own(record, modules[position[last] + 1 : end])


def _own(record: StepRecord, modules: Sequence[Module]) -> list[str]:
    """Those that are not PyTorch's and have no parameters; if none, those that have."""
    others = [m.name for m in modules if m.type_name not in STANDARD]
    owners = {parameter.module_name for parameter in record.layout.parameters}
    functions = [name for name in others if name not in owners]
    insides = {m.name.rpartition(".")[0] for m in record.layout.modules}
    return functions or [name for name in others if name and name not in insides]


def _perhaps(suspects: Sequence[str]) -> str:
    named = " or ".join(map(called, suspects[:_NAMED]))
    return f", perhaps in {named}" if named else ""


_NAMED = 3
_NOT_MEASURED = " of a step that was not measured in full"
_OPTIMIZER = (
    "Look for eps=0 in Adam, for a learning rate or weight decay that is far too large, and for "
    "code that changes weights."
)
_BUFFER = "Look at the batches that went in since it was last fine; the module may be reset."
_BATCH = "Look at how these samples were made and normalized, and leave them out."
_FORWARD = (
    "Look there for log, sqrt or division without an eps, and for exp of large numbers; people "
    "also lower the learning rate and clip gradients."
)
_TARGETS = (
    "Look for NaN in the batch and its targets, for targets that the loss does not allow, and for "
    "log, sqrt or division without an eps."
)
_BACKWARD = (
    "Look there for sqrt, norm, log or division at 0, which are finite and have a gradient that "
    "is not: add an eps inside, or leave these values out before."
)
