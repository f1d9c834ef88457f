"""Steps that are not measured in full: one call reads the norms of all gradients."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from telemetry.capture.parameters import ParameterTable
from telemetry.kernel import available
from telemetry.measure.native import TENSORS
from telemetry.records import Layout, StepRecord
from telemetry.torch_private import calling_scaler, in_function_mode

if available:
    from telemetry import _native

_ABSENT = -1.0
"""Stands for the norm of a gradient that there is not."""

_LOOK_STEPS = 8
"""Whether a ``GradScaler`` calls is seen once in so many steps."""

_STEP_BYTES = 512
"""What any such step takes, besides its numbers."""


class LightStep(NamedTuple):
    """What one call has read of a step. A tuple, for between two steps of training each call costs.

    Attributes:
        step: Its number.
        wall_time: When it ended, seconds since the epoch.
        layout: Of the model at that time.
        groups: How many parameter groups there are.
        row: Their learning rates, and behind them the norm of each parameter's gradient, negative
            where there is none; float64 ``[groups + parameters]``.
    """

    step: int
    wall_time: float
    layout: Layout
    groups: int
    row: NDArray[np.float64]

    @property
    def nbytes(self) -> int:
        """Memory held until :meth:`record`, about."""
        return _STEP_BYTES + self.row.nbytes

    def record(self, scalars: Mapping[str, float], loss_tag: str | None = None) -> StepRecord:
        """As :meth:`CapturedStep.record`; what is not finite was not read by one call."""
        norms = self.row[self.groups :]
        return StepRecord(
            step=self.step,
            wall_time=self.wall_time,
            layout=self.layout,
            grad_norms=np.maximum(norms, 0.0),
            grad_present=norms >= 0,
            grad_finite=np.isfinite(norms),
            learning_rates=tuple(self.row[: self.groups].tolist()),
            scalars=scalars,
            loss_tag=loss_tag,
        )


class LightReader:
    """Reads what one optimizer is about to use, where that takes one call of the C extension.

    It refuses whatever is out of the ordinary: gradients on an accelerator, sparse or of a class of
    their own, or not finite; learning rates that are tensors; a ``GradScaler``. Those go the long
    way.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        self._row = np.zeros(0)  # for each step anew
        self._address = self._groups = 0
        self._layout: Layout | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._parameters: tuple[Any, ...] = ()
        self._identities = b""
        self._refused = False
        self._unlooked = 0

    def prepare(self, optimizer: Optimizer, *, again: bool) -> None:
        """Read this optimizer's steps from now on.

        Args:
            optimizer: The only one that steps the model.
            again: Even where reading has failed before, or with its parameters read again.
        """
        self._refused &= not again
        if self.reads(optimizer) and not again:
            return
        if TENSORS is not None and not self._refused:
            self._optimizer = weakref.ref(optimizer)
            self._parameters = self._table.parameters
            self._identities = self._table.identities_of(optimizer)

    def stop(self) -> None:
        """Read nothing until the next :meth:`prepare`."""
        self._optimizer = None

    def reads(self, optimizer: Optimizer) -> bool:
        """Whether it is this optimizer's steps that are read."""
        return self._optimizer is not None and self._optimizer() is optimizer

    def read(self, optimizer: Optimizer, layout: Layout) -> bool:
        """Read the gradients and learning rates of a step; whether that was possible."""
        if self._parameters is not self._table.parameters:
            return False
        # Looking for a scaler takes as long as reading some gradients, so at some steps only: it
        # leaves the gradients as they should be, unless the optimizer is to divide by its factor.
        if self._unlooked == 0 and calling_scaler() is not None:
            return False
        if getattr(optimizer, "grad_scale", None) is not None or in_function_mode():
            return False
        groups = optimizer.param_groups
        if layout is not self._layout or len(groups) != self._groups:
            self._layout, self._groups = layout, len(groups)
            self._row = np.zeros(len(groups) + len(layout.parameters))
            self._address = self._row.ctypes.data
        self._row.fill(_ABSENT)
        square = _native.take_norms(groups, self._identities, torch.Tensor, TENSORS, self._address)
        if square == -1.0:
            self.stop()
            self._refused = True
        self._unlooked = (self._unlooked + 1) % _LOOK_STEPS
        return 0 <= square < math.inf

    def completed(self, step: int) -> LightStep:
        """The step that was read is over."""
        assert self._layout is not None
        return LightStep(step, time.time(), self._layout, self._groups, self._row.copy())
