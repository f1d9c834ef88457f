"""Units that give nothing for any input and get no gradient that could wake them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts.depth import module_of
from telemetry.alerts.episode import Episode
from telemetry.records import Alert, StepRecord, TensorRecord


@dataclass(kw_only=True)
class _Silence:
    """Units of one output that were silent in every batch since the first of them."""

    silent: NDArray[np.bool_]
    batches: int
    samples: float


class DeadUnits:
    """Counts units that are silent in every one of several batches; sparsity is no death.

    A unit is silent in a batch if it is zero for all samples although a gradient arrives (behind
    a ReLU or GELU, also one's own), or if it is negative for all samples and at least as many
    gradients that come back through what follows are exactly zero (before a functional ReLU). Zero outputs of
    modules with parameters of their own (a branch that begins at zero) are no silence unless
    those parameters get no gradient.

    It speaks when a share ``fraction`` of a layer's units is silent in ``batches`` full
    measurements in a row with enough samples to tell rare units from dead ones.

    Args:
        fraction: Of the units of one module's output.
        batches: Full measurements in a row.
        samples: Values of each unit, times the root of the number of units: many silent units are
            each other's witnesses.
    """

    kind = "dead_units"

    def __init__(self, *, fraction: float = 0.9, batches: int = 2, samples: float = 500.0) -> None:
        self._fraction = fraction
        self._batches = batches
        self._samples = samples
        self._silence: dict[str, _Silence] = {}
        self._episode = Episode(_CALM_LOOKS)
        self._undecided = False

    @property
    def wants_full(self) -> bool:
        """Whether a layer is silent, but not for long enough."""
        return self._undecided

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if not record.full:
            return
        idle = _idle_modules(record)
        self._undecided = False
        dead: list[str] = []
        reached = False
        for name, output in record.activations.items():
            gradient = record.activation_grads.get(name)
            if gradient is None or output.unit_min is None or output.unit_min.size < _FEWEST:
                continue
            silent = _silent(output, gradient, idle.get(module_of(name)))
            if self._is_dead(name, silent, output):
                dead.append(name)
                reached |= gradient.sketch.sum_squares > 0 or record.total_grad_norm > 0
        # Layers behind a dead one see only constants: the first is the cause.
        found = self._alert(record, dead) if reached else None
        yield from self._episode.update(record, found)

    def _is_dead(self, name: str, silent: NDArray[np.bool_], output: TensorRecord) -> bool:
        now = _Silence(silent=silent, batches=1, samples=output.sketch.finite_count / silent.size)
        before = self._silence.get(name)
        if before is not None and before.silent.shape == silent.shape:
            both = before.silent & silent
            if both.mean() >= self._fraction:
                now = _Silence(
                    silent=both,
                    batches=before.batches + 1,
                    samples=before.samples + now.samples,
                )
        if now.silent.mean() < self._fraction:
            self._silence.pop(name, None)
            return False
        self._silence[name] = now
        enough = now.batches >= self._batches and (
            now.samples * now.silent.sum() ** 0.5 >= self._samples
        )
        self._undecided |= not enough
        return enough

    def _alert(self, record: StepRecord, dead: list[str]) -> Alert:
        name = dead[0]
        silence = self._silence[name]
        share = float(silence.silent.mean())
        others = f" So are units of {', '.join(dead[1:4])}." if len(dead) > 1 else ""
        return Alert(
            kind=self.kind,
            severity="error" if share == 1 else "warning",
            step=record.step,
            module_name=module_of(name),
            value=share,
            threshold=self._fraction,
            message=(
                f"{int(silence.silent.sum())} of {silence.silent.size} units of {name} are zero "
                f"for every input of {silence.batches} batches; they cannot learn.{others}\n"
                "People usually lower the learning rate, check biases and initialization, and use "
                "LeakyReLU or GELU."
            ),
        )


_FEWEST = 2
_CALM_LOOKS = 3


def _idle_modules(record: StepRecord) -> dict[str, bool]:
    """Modules that own parameters; whether all of those gradients are exactly zero."""
    idle: dict[str, bool] = {}
    for parameter, norm, present in zip(
        record.layout.parameters, record.grad_norms, record.grad_present, strict=True
    ):
        name = parameter.module_name
        idle[name] = idle.get(name, True) and bool(present) and norm == 0
    return idle


def _silent(output: TensorRecord, gradient: TensorRecord, idle: bool | None) -> NDArray[np.bool_]:
    """Which units are; ``idle`` is None for modules without parameters."""
    assert output.unit_min is not None
    assert output.unit_max is not None
    if idle is False:
        behind = np.zeros(output.unit_min.shape, dtype=np.bool_)
    else:
        behind = (output.unit_min == 0) & (output.unit_max == 0)
    if idle is None:
        return behind
    negative: NDArray[np.bool_] = output.unit_max < 0
    all_unmoved = gradient.sketch.zero_fraction >= negative.mean() > 0
    return behind | negative if all_unmoved else behind
