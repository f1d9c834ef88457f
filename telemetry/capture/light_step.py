"""Light steps: one call of the C extension reads their gradient norms and learning rates."""

from __future__ import annotations

import math
import time
import weakref

import numpy as np
import torch
from torch.optim import Optimizer

from telemetry.capture.parameters import ParameterTable
from telemetry.capture.pending import PendingNorms
from telemetry.capture.usage import Laps
from telemetry.measure.native import TENSORS, available
from telemetry.records import Layout, Parameter
from telemetry.torch_private import calling_scaler, in_function_mode

if available:
    from telemetry.measure import _native

_ABSENT = -1.0  # instead of the norm of a missing gradient
_SCALER_CHECK_STEPS = 8  # the call stack is searched for a ``GradScaler`` once in so many steps


class LightReader:
    """Reads the gradients that the only optimizer is about to use, by one call of the C extension.

    It refuses gradients that are not finite, on an accelerator, sparse or of a tensor subclass,
    learning rates that are tensors, and steps of a ``GradScaler``. Those take the slow path.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        self._row = np.zeros(0)
        self._address = self._groups = 0
        self._layout: Layout | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._parameters: tuple[Parameter, ...] = ()
        self._identities = b""
        self._refused = False
        self._since_check = 0  # steps since the call stack was searched for a scaler

    def prepare(self, optimizer: Optimizer, *, again: bool) -> None:
        """Read the steps of this optimizer from now on.

        ``again``: read its parameters again, and retry even if reading has failed before.
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
        """Whether the steps of this optimizer are read."""
        return self._optimizer is not None and self._optimizer() is optimizer

    def read(self, optimizer: Optimizer, layout: Layout) -> bool:
        """Read the gradients and learning rates of a step; whether that was possible."""
        if self._parameters is not self._table.parameters:
            return False
        # The search takes about the time of reading gradients. A scaler that is missed leaves the
        # gradients unscaled, unless the optimizer is to divide by its factor.
        if self._since_check == 0 and calling_scaler() is not None:
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
        self._since_check = (self._since_check + 1) % _SCALER_CHECK_STEPS
        return 0 <= square < math.inf

    def completed(self, step: int, laps: Laps | None) -> PendingNorms:
        """Return the values read at this step, which has ended."""
        assert self._layout is not None
        return PendingNorms(step, time.time(), self._layout, self._groups, self._row.copy(), laps)
