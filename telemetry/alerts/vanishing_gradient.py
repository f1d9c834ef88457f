"""Layers whose gradients are too small against the others' for them to learn."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts.modules import ModuleNorms
from telemetry.records import Alert, StepRecord

_ADVICE = (
    "People usually replace sigmoid or tanh by ReLU or GELU, add normalization or skip connections, "
    "and use He or Xavier initialization."
)


class VanishingGradient:
    """Compares the gradient norms of the modules with each other, step for step.

    A module fades when its norm is 2000 times below the largest for five steps and does not rise.
    Norms that all fade together are convergence. A norm of exactly zero is no faint gradient but
    none: the layer is frozen, unused, at a zero-initialized branch, or dead. An optimizer that
    scales its steps (Adam) still moves a layer with a faint gradient: where full measurements show
    update ratios within 1000 of the largest, the layer learns.
    """

    def __init__(self) -> None:
        self._norms: ModuleNorms | None = None
        self._faint_steps: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._share_at_first: NDArray[np.float64] = np.zeros(0)
        self._learns: frozenset[str] = frozenset()
        self._told = False

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if self._norms is None or self._norms.layout is not record.layout:
            self._norms = ModuleNorms(record.layout)
            self._faint_steps = np.zeros(len(self._norms.names), dtype=np.intp)
            self._share_at_first = np.zeros(len(self._norms.names))
        norms = self._norms.of(record)
        largest = float(norms.max(initial=0.0))
        if not 0 < largest < np.inf:
            return
        if record.update_ratios:
            self._learns = _moving(record)
        share = norms / largest
        faint = (share > 0) & (share < _SHARE)
        self._share_at_first = np.where(self._faint_steps == 0, share, self._share_at_first)
        self._faint_steps = np.where(faint, self._faint_steps + 1, 0)
        rising = share > 2 * self._share_at_first
        moving = np.array([name in self._learns for name in self._norms.names])
        fading = (self._faint_steps >= _STEPS) & ~rising & ~moving
        if self._told or not fading.any():
            return
        self._told = True
        worst = int(np.where(fading, share, np.inf).argmin())
        yield Alert(
            kind="vanishing_gradient",
            severity="warning",
            step=record.step,
            module_name=self._norms.names[worst],
            value=float(share[worst]),
            threshold=_SHARE,
            message=(
                f"The gradient of {self._norms.names[worst]} is {1 / share[worst]:.2g} times "
                f"smaller than the largest, for {_STEPS} steps; {int(fading.sum())} of "
                f"{len(norms)} layers hardly learn.\n{_ADVICE}"
            ),
        )


_SHARE = 1 / 2000
_STEPS = 5
_MOVING_SHARE = 1e-3


def _moving(record: StepRecord) -> frozenset[str]:
    """Modules with a parameter that an optimizer step moves about as far as any other."""
    owner = {p.name: p.module_name for p in record.layout.parameters}
    ratios = {n: r for n, r in record.update_ratios.items() if np.isfinite(r)}
    largest = max(ratios.values(), default=0.0)
    return frozenset(owner[name] for name, r in ratios.items() if r > _MOVING_SHARE * largest)
