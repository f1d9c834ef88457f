"""Units that are zero for every input and get no gradient that could revive them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert, Severity
from telemetry.alerts.episode import EpisodeRule
from telemetry.alerts.modules import Forward
from telemetry.layers.module_types import DROPOUTS, TWO_SIDED
from telemetry.plain_text import called
from telemetry.records import Output, StepRecord, TensorRecord


class DeadUnits(EpisodeRule):
    """Alerts when units of a layer are silent in each of several batches.

    A unit is silent in a batch

    - after an activation module: if it is zero for all samples, or negligible (a thousandth of the
      input) for inputs that are all negative, as after SiLU;
    - before a functional activation: if it is negative for all samples, and at least as large a
      share of the gradients that come back is exactly zero.

    Zero outputs of modules with parameters of their own count only if these get no gradient;
    otherwise it is a branch that begins at zero. Activations with two flat ends saturate instead.

    The rule alerts when nearly all units of a layer are silent in ``batches`` full measurements in
    a row, with enough samples to distinguish rarely active units from dead ones. If only a share
    ``fraction`` is, it takes 50 steps: the layers before go on to change, and units near the limit
    come back. It is an error when all are, and over when a third is active again.

    Args:
        fraction: Share of the units of one module's output.
        batches: Number of full measurements in a row.
        samples: Number of values of each unit, times the square root of the number of silent units,
            because several silent units confirm each other.
    """

    name = "dead_units"
    # Healthy layers have 47 % at most, dead ones 96 %. At 0.75 the vanishing mlp_overwrite_tiny is
    # missed; at 0.99 mlp_dies_slowly is found 50 steps later.
    fraction = 0.9
    batches = 2  # the fewest that confirm each other; tried 1 and 4
    # By eye; tried 50, and 5000, with which alerts come up to 60 steps later.
    samples = 500.0
    _calm = 3  # by eye: one more than begin it
    _silence: dict[Output, _Silence]
    wants_full: bool = False  # a layer is silent, but not for long enough

    def _set_up(self) -> None:
        self._silence = {}

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if not record.full:
            return ()
        self.wants_full = False
        dead = [
            output
            for output, silent in _silent_units(record)
            if self._is_dead(output, silent, record.outputs[output], record.step)
        ]
        if not dead and self._lasts(record):
            return ()
        if self._episode.is_on:  # it grows worse with the first layer that has no unit left
            dead.sort(key=lambda output: self._silence[output].whole < self.batches)
        # If nothing gets a gradient, the loss does not depend on the model.
        gradients = [record.output_grads[output].sketch.sum_squares for output in dead]
        wanted = record.total_grad_norm > 0 or any(gradients)
        # Layers behind a dead one see only constants: the first is the cause.
        found = self._found(record, dead) if dead and wanted else None
        return self._episode.update(record.step, found)

    def _lasts(self, record: StepRecord) -> bool:
        """Whether most units of the layer that was reported are still silent."""
        name = self._episode.module_name
        return name is not None and any(
            output.module_name == name and _share(silent) > _REVIVED
            for output, silent in _silent_units(record)
        )

    def _is_dead(
        self, output: Output, silent: NDArray[np.bool_], tensor: TensorRecord, step: int
    ) -> bool:
        """Add this batch to those before; whether the units are dead now."""
        before = self._silence.pop(output, None)
        if _share(silent) < self.fraction:
            return False
        samples = tensor.sketch.finite_count / silent.size
        whole = int(silent.all())
        now = _Silence(silent=silent, batches=1, samples=samples, since=step, whole=whole)
        if before is not None and before.silent.shape == silent.shape:
            both = before.joined(now)
            now = both if both.share >= self.fraction else now
        self._silence[output] = now
        witnessed = now.samples * now.silent.sum() ** 0.5 >= self.samples
        enough = bool(now.batches >= self.batches and witnessed)
        self.wants_full |= not enough
        return enough and (now.is_nearly_complete or step - now.since >= _PARTLY)

    def _found(self, record: StepRecord, dead: list[Output]) -> Alert:
        silence = self._silence[dead[0]]
        size, is_whole = silence.silent.size, silence.whole >= self.batches
        count = size if is_whole else int(silence.silent.sum())
        batches = silence.whole if is_whole else silence.batches
        first, *others = (called(str(output)) for output in dead[:4])
        also = f" The same holds for units of {', '.join(others)}." if others else ""
        module = record.layout.modules[record.layout.position[dead[0].module_name]]
        severity: Severity = "error" if is_whole or record.total_grad_norm == 0 else "warning"
        message = (
            f"{count} of {size} units of {first} are zero for every input of {batches} "
            f"batches and cannot learn.{also}\n"
            f"{_DROPPED if module.type_name in DROPOUTS else _ADVICE}"
        )
        return self._alert(record.step, module.name, count / size, self.fraction, message, severity)


_ADVICE = (
    "People usually lower the learning rate, check biases, initialization and penalties, and use "
    "LeakyReLU or GELU."
)
_DROPPED = "Check the probability of this dropout: it is the share that is dropped."
# The largest healthy share is 0.47; that of sparsity_too_strong goes up and down from 0.86 to 0.98.
_REVIVED = 2 / 3
# In labels_shuffled, whose loss has nothing to learn, 0.906 are silent for 30 steps.
_PARTLY = 50  # steps
_NEARLY_ALL = 0.93  # or all but one; in sparsity_too_strong they are 0.945
_FEWEST_UNITS = 2  # a single unit is no layer
_NEGLIGIBLE = 1e-3  # SiLU(x) / x is less below x = -6.9; tried 0.0002 and 0.005


@dataclass(frozen=True, kw_only=True)
class _Silence:
    """Units of one output that were silent in all of some batches, bool ``[units]``.

    Attributes:
        whole: For how many batches, up to the latest, every unit has been: those that were active
            in the first ones may have died since.
    """

    silent: NDArray[np.bool_]
    batches: int
    samples: float
    since: int
    whole: int = 0

    @property
    def is_nearly_complete(self) -> bool:
        """Whether it is all units but one, or nearly all."""
        active = np.count_nonzero(~self.silent)
        return bool(active <= max(1, (1 - _NEARLY_ALL) * self.silent.size))

    @property
    def share(self) -> float:
        return _share(self.silent)

    def joined(self, other: _Silence) -> _Silence:
        """Units that were silent in the batches of both."""
        return _Silence(
            silent=self.silent & other.silent,
            batches=self.batches + other.batches,
            samples=self.samples + other.samples,
            since=min(self.since, other.since),
            whole=self.whole + other.whole if other.whole else 0,
        )


def _share(units: NDArray[np.bool_]) -> float:
    return np.count_nonzero(units) / units.size  # faster than their mean


def _silent_units(record: StepRecord) -> Iterable[tuple[Output, NDArray[np.bool_]]]:
    """Outputs that get a gradient, and which of their units are silent, in forward order."""
    forward, idle = Forward.of(record), _idle_modules(record)
    for index, output in enumerate(forward.outputs):
        tensor, gradient = record.outputs[output], record.output_grads.get(output)
        if gradient is None or tensor.zero_units is None or tensor.zero_units.size < _FEWEST_UNITS:
            continue
        if forward.types[index] in TWO_SIDED:
            continue
        if not forward.owned[index]:
            before = record.outputs[forward.outputs[index - 1]] if index > 0 else tensor
            yield output, tensor.zero_units | _is_negligible(tensor, before)
            continue
        silent = np.zeros_like(tensor.unit_min, dtype=np.bool_)
        if output.module_name in idle:
            silent |= tensor.zero_units
        after = forward.types[index + 1] if index + 1 < len(forward.outputs) else ""
        if after not in TWO_SIDED:
            silent |= _is_cut_off(tensor, gradient)
        yield output, silent


def _is_negligible(output: TensorRecord, before: TensorRecord) -> NDArray[np.bool_]:
    """Units whose inputs were all negative, and whose outputs are negligible."""
    assert output.unit_min is not None
    assert output.unit_max is not None
    if before.unit_max is None or before.unit_max.shape != output.unit_max.shape:
        return np.zeros(output.unit_max.shape, dtype=np.bool_)
    negative: NDArray[np.bool_] = before.unit_max < 0
    if not negative.any():
        return negative
    largest = np.maximum(np.abs(output.unit_min), np.abs(output.unit_max))
    return negative & (largest <= -_NEGLIGIBLE * before.unit_max)


def _is_cut_off(output: TensorRecord, gradient: TensorRecord) -> NDArray[np.bool_]:
    """Negative units, if at least as large a share of the gradients is exactly zero."""
    assert output.unit_max is not None
    negative: NDArray[np.bool_] = output.unit_max < 0
    cut_off = gradient.sketch.zero_fraction >= _share(negative)
    return negative if cut_off else np.zeros_like(negative)


def _idle_modules(record: StepRecord) -> set[str]:
    """Modules with parameters all of whose gradients exist and are exactly zero."""
    zero, layout = record.grad_present & (record.grad_norms == 0), record.layout
    if not zero.any():
        return set()
    idle = set(layout.owners[zero].tolist()) - set(layout.owners[~zero].tolist())
    return {layout.modules[index].name for index in idle}
