"""Where NaN or infinity began, as far as the record of one step shows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from telemetry.layers.module_types import STANDARD
from telemetry.measure.sampling import FULL_ELEMENTS
from telemetry.plain_text import called, printable
from telemetry.records import Module, StepRecord, TensorRecord


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
        for (name, _), tensor in record.outputs.items():
            if is_bad(tensor):
                yield Origin(name, f"the forward pass, in the output of {called(name)}", _FORWARD)
        yield _loss_or_backward(record)


def is_bad(tensor: TensorRecord) -> bool:
    """Whether it holds more than the ``-inf`` of a mask."""
    return bool(tensor.sketch.nan_count or tensor.sketch.positive_inf_count)


def _is_lost(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)


def _reaches_the_end(record: StepRecord) -> bool:
    """Whether the last module that ran returned NaN or infinity."""
    last = next(reversed(record.outputs.values()), None)  # type: ignore[call-overload]
    return last is not None and is_bad(last)


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
        # Of larger ones there is only a sample; that may be all zeros, which have no ratio.
        known = weight is not None and weight.sketch.norm > 0 and parameter.size <= FULL_ELEMENTS
        if known and not math.isfinite(ratio):
            yield parameter.name


def _inputs(record: StepRecord, usual: Collection[str]) -> Iterator[Origin]:
    """Bad values that came from outside, and the module that they entered by."""
    entered = next((o.module_name for o, tensor in record.outputs.items() if is_bad(tensor)), None)
    reach = f", which reach {called(entered)}" if entered else ""
    for name, given in record.inputs.items():
        if name not in usual and is_bad(given):
            count = f"{given.sketch.nonfinite_count:,} of {given.sketch.count:,} values"
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
