"""NaN or infinity that training cannot recover from, and where it came from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from telemetry.alert import Alert
from telemetry.alerts.episode import Episode
from telemetry.alerts.history import leading
from telemetry.layers.module_types import STANDARD
from telemetry.plain_text import called, printable
from telemetry.records import LightSteps, StepRecord, TensorRecord
from telemetry.rule import Rule


class Nonfinite(Rule):
    """Alerts when the loss, a parameter, its gradient or a buffer is NaN or infinite.

    Such values inside of the network show where the fault began, but are not one by themselves:
    masks hold ``-inf``, missing values are NaN until the model fills them in. They count when they
    reach the output of the last module. Steps that a gradient scaler skips are no fault, but after
    ten losses in a row that are not finite, the rule reports that the scaler skips every step.

    The culprit is the first in execution order: a parameter that is bad already; the batch, or what
    the first watched module is given, unless a good step had such values before; the first module
    whose output is bad; if all outputs are good, the module in whose backward pass it began.

    At a step that was not measured in full, batch and outputs are unknown and only the gradients of
    the parameters are left. If those of the last layers are good, the culprit is the last layer
    whose gradient is bad. If all are bad, the fault began before the backward pass; then the rule
    names a suspect: the first module that is not one of PyTorch's, because those do not turn usual
    numbers into NaN. If all modules are PyTorch's, it names none, because the batch is as likely.

    Args:
        losses: Number of losses in a row that are not finite, after which no further optimizer step
            is expected.
    """

    name = "nonfinite"
    _bad_losses: int
    _has_stepped: bool
    _usual: set[str]
    _episode: Episode

    # Ten: a scaler halves its factor at each skipped step, and needs several in the beginning.
    def __init__(self, *, losses: int = 10) -> None:
        self._losses = losses
        self._bad_losses = 0
        self._episode = Episode(_CALM_STEPS)
        self._usual = set()
        self._has_stepped = False

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        """Count losses that are not finite; perhaps no step follows them."""
        self._bad_losses = 0 if math.isfinite(loss) else self._bad_losses + 1
        if self._bad_losses != self._losses or not self._has_stepped or self._episode.is_on:
            return ()
        return self._episode.update(step, _skipped_forever(step, self._losses))

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self._has_stepped = True
        found = None if record.skipped else next(_origins(record, self._usual), None)
        if found is None and not record.skipped:
            self._usual.update(name for name, given in record.inputs.items() if _is_bad(given))
        return self._episode.update(record.step, found)

    def quiet_steps(self, steps: LightSteps) -> int:
        if self._episode.is_on or steps.skipped:
            return 0
        # A total that overflows will do for a step that is not quiet.
        return leading(np.isfinite(steps.total_grad_norms))

    def pass_over(self, steps: LightSteps) -> None:
        self._has_stepped = True
        if not np.isnan(steps.losses).all():
            self._bad_losses = 0


_CALM_STEPS = 20  # by eye


def _origins(record: StepRecord, usual: Collection[str]) -> Iterator[Alert]:
    """Alerts for values that training cannot recover from, the best explanation first.

    Args:
        record: The step.
        usual: Inputs that were bad at steps that went well.
    """
    owner = {p.name: p.module_name for p in record.layout.parameters}
    for name in record.nonfinite_parameters:
        yield _alert(record, owner.get(name), f"the parameter {printable(name)}")
    loss_lost = record.loss is not None and not math.isfinite(record.loss)
    step_lost = loss_lost or not record.all_grads_finite
    if not step_lost:  # what remains is in the buffers
        for name in record.nan_buffers:
            what = f"the buffer {printable(name)}: training hides it, evaluation will not"
            yield _alert(record, name.rpartition(".")[0], what)
    if step_lost or _reaches_the_end(record):
        yield from _inputs(record, usual)
        yield from _beginnings(record)


def _inputs(record: StepRecord, usual: Collection[str]) -> Iterator[Alert]:
    """Bad values that came from outside; the alert names the module that they entered by."""
    entered = next((o.module_name for o, tensor in record.outputs.items() if _is_bad(tensor)), None)
    for name, given in record.inputs.items():
        if name not in usual and _is_bad(given):
            where = f"what {called(name)} was given, and no watched module ran before it"
            yield _alert(
                record,
                entered,
                f"{where if name else 'the batch itself'}: {given.sketch.nonfinite_count:,} of "
                f"{given.sketch.count:,} values"
                + (f" that reach {called(entered)}" if entered else ""),
                advice="look at how these samples were made and normalized, and leave them out",
            )


def _beginnings(record: StepRecord) -> Iterator[Alert]:
    for (name, _), tensor in record.outputs.items():
        if _is_bad(tensor):
            yield _alert(record, name, f"the output of {called(name)}")
    if record.full and record.loss is not None and not math.isfinite(record.loss):
        yield _alert(record, None, "the loss; all outputs of modules are good")
    order = [i for i in record.layout.depth_order if record.grad_present[i]]
    bad = [i for i in order if not record.grad_finite[i]]
    if bad and (record.full or record.grad_finite[order[-1]]):
        name = record.layout.parameters[bad[-1]].module_name
        yield _alert(record, name, f"the backward pass, at the gradient of {called(name)}")
    elif bad:
        suspect = _suspect(record)
        what = "the batch, the forward pass or the loss of a step that was not measured in full"
        yield _alert(record, suspect, f"{what}; look at {called(suspect)}" if suspect else what)
    yield _alert(record, None, "the loss")


def _suspect(record: StepRecord) -> str | None:
    """The first module that is not one of PyTorch's."""
    layout = record.layout
    owners = {parameter.module_name for parameter in layout.parameters}
    for module in layout.modules:
        if module.type_name not in STANDARD and module.name not in owners:
            return module.name
    return None


def _reaches_the_end(record: StepRecord) -> bool:
    """Whether the last module that ran returned NaN or infinity."""
    last = next(reversed(record.outputs.values()), None)  # type: ignore[call-overload]
    return last is not None and _is_bad(last)


def _is_bad(output: TensorRecord) -> bool:
    """Whether it holds more than the ``-inf`` of a mask."""
    return bool(output.sketch.nan_count or output.sketch.positive_inf_count)


_ADVICE = (
    "look for bad values in the batch and for log, sqrt or division without an eps, lower the "
    "learning rate, and clip gradients"
)


def _alert(record: StepRecord, module_name: str | None, where: str, advice: str = _ADVICE) -> Alert:
    return Alert(
        kind=Nonfinite.name,
        severity="error",
        step=record.step,
        module_name=module_name,
        value=float((~record.grad_finite).sum()),
        threshold=0.0,
        message=(f"NaN or infinity, first seen in {where}.\nPeople usually {advice}."),
    )


def _skipped_forever(step: int, losses: int) -> Alert:
    return Alert(
        kind=Nonfinite.name,
        severity="error",
        step=step,
        module_name=None,
        value=float(losses),
        threshold=float(losses),
        message=(
            f"{losses} losses in a row are NaN or infinite and the optimizer does not step: the "
            "gradient scaler skips every step, waiting will not help.\n"
            "People usually look for a NaN in the weights, go back to a checkpoint, and use "
            "bfloat16 or a lower learning rate."
        ),
    )
