"""Steps that are not measured in full: one call reads the norms of all gradients."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

_STEP_BYTES = 512
"""What any such step takes, besides its numbers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LightStep:
    """What one call has read of a step.

    Attributes:
        step: Its number.
        wall_time: When it ended, seconds since the epoch.
        layout: Of the model at that time.
        rates: Learning rate of each parameter group, float64.
        norms: Of each parameter's gradient, float64 ``[parameters]``; negative where there is none.
    """

    step: int
    wall_time: float
    layout: Layout
    rates: NDArray[np.float64]
    norms: NDArray[np.float64]

    @property
    def nbytes(self) -> int:
        """Memory held until :meth:`record`, about."""
        return _STEP_BYTES + self.rates.nbytes + self.norms.nbytes

    def record(self, scalars: Mapping[str, float], loss_tag: str | None) -> StepRecord:
        """As :meth:`CapturedStep.record`; what is not finite was not read by one call."""
        present = self.norms >= 0
        return StepRecord(
            step=self.step,
            wall_time=self.wall_time,
            layout=self.layout,
            grad_norms=np.where(present, self.norms, 0.0),
            grad_present=present,
            grad_finite=np.ones(len(present), dtype=bool),
            learning_rates=tuple(self.rates.tolist()),
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
        self._row = np.zeros(0)
        self._groups = 0
        self._layout: Layout | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._parameters: tuple[Any, ...] = ()
        self._identities = b""
        self._refused = False

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
        # A scaler leaves the gradients as they should be, unless the optimizer is to divide by its
        # factor.
        if calling_scaler() is not None or getattr(optimizer, "grad_scale", None) is not None:
            return False
        if in_function_mode():
            return False
        groups = optimizer.param_groups
        self._layout, self._groups = layout, len(groups)
        self._row = np.full(len(groups) + len(layout.parameters), _ABSENT)
        address = self._row.ctypes.data
        square = _native.take_norms(groups, self._identities, torch.Tensor, TENSORS, address)
        if square == -1.0:
            self.stop()
            self._refused = True
        return 0 <= square < math.inf

    def completed(self, step: int) -> LightStep:
        """The step that was read is over."""
        assert self._layout is not None
        return LightStep(
            step=step,
            wall_time=time.time(),
            layout=self._layout,
            rates=self._row[: self._groups],
            norms=self._row[self._groups :],
        )
