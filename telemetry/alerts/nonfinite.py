"""NaN or infinity that the training cannot recover from, and where it came from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from telemetry.records import Alert, StepRecord, TensorRecord

_ADVICE = (
    "People usually look for bad values in the batch, for log, sqrt or division without an eps, "
    "and lower the learning rate or clip gradients."
)


class Nonfinite:
    """Speaks when the loss, a parameter or the gradient of one is NaN or infinite.

    The optimizer was about to use, or has used, what it saw: the step is lost. Values inside of the
    network say where it began, but are no fault by themselves: masks hold ``-inf``, missing values
    are NaN, and a gradient scaler skips the steps whose gradients overflow, so the optimizer never
    sees them.

    The culprit is the first in execution order: a parameter that is bad already; the first module
    whose output is; if all outputs are good, the last module whose gradient is, since the backward
    pass comes from the end. It speaks once, and again after 20 good steps.
    """

    def __init__(self) -> None:
        self._good_steps = _GOOD_STEPS

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if not _is_bad(record):
            self._good_steps += 1
            return
        was_good = self._good_steps >= _GOOD_STEPS
        self._good_steps = 0
        if was_good:
            yield _alert(record)


_GOOD_STEPS = 20


def _is_bad(record: StepRecord) -> bool:
    return (
        not record.grad_finite.all()
        or (record.loss is not None and not math.isfinite(record.loss))
        or any(weight.sketch.nonfinite_count for weight in record.weights.values())
    )


def _alert(record: StepRecord) -> Alert:
    module_name, what, count = next(_origins(record))
    where = f" {what}" if module_name is None else f" {what} {module_name or 'the model'}"
    return Alert(
        kind="nonfinite",
        severity="error",
        step=record.step,
        module_name=module_name,
        value=float(count),
        threshold=0.0,
        message=f"NaN or infinity, first seen in{where}.\n{_ADVICE}",
    )


def _origins(record: StepRecord) -> Iterator[tuple[str | None, str, int]]:
    """Where the bad values may have begun, best explanation first: module, words, how many."""
    owner = {p.name: p.module_name for p in record.layout.parameters}
    for name, weight in record.weights.items():
        if weight.sketch.nonfinite_count:
            yield owner[name], f"the parameter {name} of", weight.sketch.nonfinite_count
    for name, output in record.activations.items():
        if _spoilt(output):
            count = output.sketch.nonfinite_count
            yield name.partition("[")[0], "the output of", count
    if record.loss is not None and not math.isfinite(record.loss):
        yield None, "the loss", 1
    bad = [i for i in record.layout.depth_order if not record.grad_finite[i]]
    for index in reversed(bad):
        yield record.layout.parameters[index].module_name, "the gradient of", len(bad)
    yield None, "the loss", 1


def _spoilt(output: TensorRecord) -> bool:
    """Whether there is more than the ``-inf`` of a mask."""
    return bool(output.sketch.nan_count or output.sketch.positive_inf_count)
