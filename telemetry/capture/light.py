"""Steps that are not measured in full: one call reads the norms of all gradients into a row."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from telemetry.capture.captured import CapturedStep
from telemetry.capture.parameters import ParameterTable
from telemetry.kernel import available
from telemetry.measure.native import TENSORS
from telemetry.records import ABSENT, Layout, LightSteps, StepRecord
from telemetry.schedule import ROWS_AT_ONCE, STEPS_AT_ONCE
from telemetry.torch_private import calling_scaler, in_function_mode

if available:
    from telemetry import _native

_BLOCK_BYTES = 2**20
"""A block takes no more, unless eight steps do."""


class LightBlock:
    """Learning rates and gradient norms of a few steps, one row each.

    The training thread adds rows while another thread reads those that are counted already.

    Attributes:
        layout: Of the model at all of the steps.
        groups: How many columns hold the learning rates of parameter groups; the others hold norms.
        rows: float64, shape ``[steps, groups + parameters]``, with room for further steps.
        steps: Numbers of the steps so far.
        wall_times: When each ended.
        count: Rows that are complete.
        handed_over: Rows that are to be processed now.
        is_closed: Whether no more rows are added.
    """

    __slots__ = (
        "address",
        "count",
        "groups",
        "handed_over",
        "is_closed",
        "layout",
        "row_bytes",
        "rows",
        "steps",
        "wall_times",
    )

    def __init__(self, layout: Layout, groups: int) -> None:
        self.layout = layout
        self.groups = groups
        width = groups + len(layout.parameters)
        count = min(ROWS_AT_ONCE, max(STEPS_AT_ONCE, _BLOCK_BYTES // (8 * max(width, 1))))
        self.rows = np.full((count, width), ABSENT)
        self.address, self.row_bytes = self.rows.ctypes.data, self.rows.strides[0]
        self.steps: list[int] = []
        self.wall_times: list[float] = []
        self.count = self.handed_over = 0
        self.is_closed = False

    @property
    def nbytes(self) -> int:
        """What it takes when it is full, about."""
        return 1024 + self.rows.nbytes

    def part(
        self,
        first: int,
        end: int,
        scalars_of: Callable[[int], Mapping[str, float]],
        loss_tag: str | None = None,
    ) -> LightSteps:
        """Some of the rows that are complete.

        Args:
            first: The first of them.
            end: The one behind the last.
            scalars_of: What the user logged for a step.
            loss_tag: Which of that is the loss.
        """
        steps, found = self.steps[first:end], self.rows[first:end, self.groups :]
        absent = found < 0
        norms: NDArray[np.float64] = np.where(absent, 0.0, found)
        return LightSteps(
            layout=self.layout,
            steps=steps,
            wall_times=np.array(self.wall_times[first:end]),
            grad_norms=norms,
            grad_present=~absent,
            learning_rates=self.rows[first:end, : self.groups].copy(),
            scalars=[scalars_of(step) for step in steps],
            loss_tag=loss_tag,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LightRows:
    """Some rows of a block."""

    block: LightBlock
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


LightItem: TypeAlias = LightRows | CapturedStep | StepRecord
"""One or several steps that were not measured in full."""


def light_steps(
    steps: Iterable[LightItem],
    scalars_of: Callable[[int], Mapping[str, float]],
    loss_tag: str | None = None,
) -> Iterator[tuple[LightSteps, Callable[[int], StepRecord]]]:
    """Steps that were not measured in full, as many at a time as possible.

    Args:
        steps: In their order.
        scalars_of: What the user logged for a step.
        loss_tag: Which of that is the loss.

    Yields:
        Some of them, and what makes a record of one, by its index among these.
    """
    for block, several in groupby(steps, lambda s: s.block if isinstance(s, LightRows) else None):
        if block is not None:
            rows = [rows for rows in several if isinstance(rows, LightRows)]
            part = block.part(rows[0].first, rows[-1].end, scalars_of, loss_tag)
            yield part, part.record
            continue
        records: list[StepRecord] = []
        for step in several:
            assert not isinstance(step, LightRows)
            if isinstance(step, CapturedStep):
                record = step.record(scalars_of(step.step), loss_tag)
            else:
                record = step
            if records and not LightSteps.fit(records[0], record):
                yield LightSteps.of(records), records.__getitem__
                records = []
            records.append(record)
        yield LightSteps.of(records), records.__getitem__


class LightReader:
    """Reads what one optimizer is about to use, where that takes one call of the C extension.

    It refuses whatever is out of the ordinary: gradients on an accelerator, sparse or of a class of
    their own, or not finite; learning rates that are tensors; a ``GradScaler``. Those go the long
    way.

    Attributes:
        square: Of the norm of all gradients of the step that was read last.
    """

    def __init__(self, table: ParameterTable) -> None:
        self.square = 0.0
        self._table = table
        self._block: LightBlock | None = None
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
        groups = optimizer.param_groups
        block = self._block
        if (
            block is None
            or block.is_closed
            or block.layout is not layout
            or block.count == len(block.rows)
            or block.groups != len(groups)
        ):
            block = self._block = LightBlock(layout, len(groups))
        # Looking for a scaler takes as long as reading some gradients, so once for each block: it
        # leaves the gradients as they should be, unless the optimizer is to divide by its factor.
        if block.count == 0 and calling_scaler() is not None:
            return False
        if getattr(optimizer, "grad_scale", None) is not None or in_function_mode():
            return False
        address = block.address + block.count * block.row_bytes
        self.square = _native.take_norms(groups, self._identities, torch.Tensor, TENSORS, address)
        if self.square == -1.0:
            self.stop()
            self._refused = True
        elif self.square < math.inf:
            return True
        block.rows[block.count] = ABSENT
        return False

    def completed(self, step: int) -> LightBlock:
        """The step that was read is over; the block that holds it."""
        assert self._block is not None
        self._block.steps.append(step)
        self._block.wall_times.append(time.time())
        self._block.count += 1
        return self._block
