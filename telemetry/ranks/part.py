"""What one rank measured at a step, ready to be merged with what the others did."""

from __future__ import annotations

import hashlib
import math
import socket
import time
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.capture.captured import CapturedStep
from telemetry.ranks.columns import NO_ROWS, Table
from telemetry.ranks.held import WHOLE, Share, Standing
from telemetry.ranks.measured import (
    ALIKE,
    Addend,
    Check,
    Measured,
    MeasuredParameters,
    Row,
    tensors_of,
)
from telemetry.ranks.observer import RankNotes
from telemetry.records import Layout, Output, StepRecord
from telemetry.records.moments import nonfinite_of, norm_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import Tensors, bad_among, figures_of


class MeasuredMaker:
    """Makes the parts of one rank, in the order of its steps; not on the training thread."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._host = socket.gethostname()
        self._sent_layout: Layout | None = None
        self._layout_id = ""
        self._last: tuple[int, float] | None = None

    def part(self, record: StepRecord, captured: CapturedStep | None = None) -> Measured:
        """What this rank measured; ``captured`` is None if one call has read the step."""
        rank, notes = self._standing.rank, RankNotes() if captured is None else captured.ranks
        full = record.full or bool(record.phase)
        stage = self._stage(record, captured, notes)
        return Measured(
            step=record.step,
            wall_time=record.wall_time,
            phase=record.phase,
            measured=frozenset((rank,) if record.full else ()),
            size=self._standing.size,
            ranks=frozenset((rank,)),
            stages={stage.key: stage},
            tensors=_tensors(rank, record, notes, self._standing),
            alike=(rank, *(getattr(record, name) for name in ALIKE)),
            scalars=Table.of_figures(rank, record.scalars),
            own=self._own(record),
            hosts={self._host: frozenset((rank,))} if full else {},
            given=self._given(record),
            nonfinite=self._nonfinite(record),
            not_known=frozenset(notes.not_known).union(
                f"the gradient of {record.layout.parameters[index].name}"
                for index, share in notes.grads.items()
                if share.reduction == "unknown"
            ),
        )

    def logged(self, step: int, scalars: Mapping[str, float]) -> Measured:
        """What this rank logged for a step that did not end."""
        rank = self._standing.rank
        return Measured(
            step=step,
            wall_time=time.time(),
            size=self._standing.size,
            ranks=frozenset((rank,)),
            alike=(rank,),
            scalars=Table.of_figures(rank, scalars),
        )

    def _stage(
        self, record: StepRecord, captured: CapturedStep | None, notes: RankNotes
    ) -> MeasuredParameters:
        layout, standing = record.layout, self._standing
        is_new = layout is not self._sent_layout
        if is_new:
            names = "\n".join(parameter.name for parameter in layout.parameters)
            self._layout_id = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
            self._sent_layout = layout
        rows, before, updates = range(len(layout.parameters)), NO_ROWS, NO_ROWS
        copies = _copies(layout, notes.grads, standing)
        if captured is not None and record.full:
            held = _copies(layout, notes.parameters, standing)
            updates = Table.of(rows, held, **_updates(captured, record))
        # The schedule of a pipeline divides gradients by the number of micro-batches later.
        if captured is not None and not standing.is_in_pipeline:
            norms = captured.norms_before_clipping(record.grad_norms, record.grad_present)
            before = NO_ROWS if norms is None else Table.of(rows, copies, before=norms)
        checks = [
            Check(index, notes.parameters[index].shard, total)
            for indices, totals in notes.bit_sums
            for index, total in zip(indices, totals.wait().tolist(), strict=True)
        ]
        ones = np.ones(len(checks), np.int64)
        return MeasuredParameters(
            stage=standing.stage,
            layout_id=self._layout_id,
            layout=layout if record.full or record.phase or is_new else None,
            grads=Table.of(
                rows,
                copies,
                norm=record.grad_norms,
                present=record.grad_present,
                finite=record.grad_finite,
            ),
            before=before,
            updates=updates,
            addends=_addends(record, notes),
            checks=Table.of(checks, lowest=ones * standing.rank, holders=ones),
            nan_buffers=frozenset(record.nan_buffers),
            nonfinite_parameters=frozenset(record.nonfinite_parameters),
        )

    def _own(self, record: StepRecord) -> Table:
        """The seconds since the step before, if that is known."""
        if record.phase:
            return NO_ROWS
        last, self._last = self._last, (record.step, record.wall_time)
        if last is None or last[0] != record.step - 1:
            return NO_ROWS
        return Table.of_figures(self._standing.rank, {"step_s": record.wall_time - last[1]})

    def _given(self, record: StepRecord) -> dict[str, frozenset[int]]:
        """The same key for ranks of one group that were given the same."""
        group = self._standing.data_group
        if group is None or not record.fingerprints:
            return {}
        values = hashlib.blake2b(repr(record.fingerprints).encode(), digest_size=8).hexdigest()
        return {f"{group}/{values}": frozenset((self._standing.rank,))}

    def _nonfinite(self, record: StepRecord) -> dict[int, str]:
        """Where this rank has NaN or infinity of its own, in words.

        Ranks that are given the same data, and stages of a pipeline, have their values from each
        other.
        """
        if self._standing.same_data.copies > 1 or self._standing.is_in_pipeline:
            return {}
        found = [f"the parameter {name}" for name in record.nonfinite_parameters]
        found += [f"the output of {output}" for output in bad_among(record.outputs)]
        if record.loss is not None and not math.isfinite(record.loss):
            found.append("the loss")
        return {self._standing.rank: found[0]} if found else {}


def _tensors(rank: int, record: StepRecord, notes: RankNotes, standing: Standing) -> Table:
    found: dict[Row, Share] = {}
    shares_of: dict[str, Mapping[Any, Share]] = {
        "inputs": notes.outputs,
        "outputs": notes.outputs,
        "output_grads": notes.output_grads,
        "grads": notes.grads,
        "weights": notes.parameters,
        "second_moments": notes.parameters,
    }
    for kind, shares in shares_of.items():
        for name in getattr(record, kind):
            if kind == "inputs":
                found[Row(0, kind, name)] = shares.get(name, WHOLE)
            elif isinstance(name, Output):
                row = Row(standing.stage, kind, name.module_name, name.place)
                found[row] = shares.get(name, WHOLE)
            else:
                index = record.layout.parameter_position[name]
                share = shares.get(index) or standing.of_plain(index)
                found[Row(standing.stage, kind, name)] = share
    rows = [Tensors.of(getattr(record, kind)).rows for kind in shares_of]
    return tensors_of(rank, found, Rows.concatenate(rows))


def _copies(layout: Layout, shares: Mapping[int, Share], standing: Standing) -> NDArray[np.int64]:
    """Of each parameter."""
    copies = standing.plain_copies(len(layout.parameters))
    if shares:
        copies = copies.copy()
        copies[list(shares)] = [share.copy for share in shares.values()]
    return copies


def _updates(captured: CapturedStep, record: StepRecord) -> dict[str, NDArray[np.float64]]:
    """Norms of how far parameters ``moved`` and of their ``size`` before, NaN where not measured.

    Of large parameters the ratio of the two is that of a sample, so it is applied to the whole
    size. Where that is zero, what the sample moved stands for all.
    """
    count = len(record.layout.parameters)
    moved, sizes = np.full(count, np.nan), np.full(count, np.nan)
    norms = figures_of(record.weights, _norm_if_finite)
    for update in captured.detail.updates:
        for index, moved_norm, _, _ in update.read():
            name = record.layout.parameters[index].name
            if name in norms:
                size = sizes[index] = norms[name]
                ratio = record.update_ratios.get(name, math.nan)
                moved[index] = ratio * size if size else moved_norm
    for name, elements in figures_of(record.weights, attrgetter("count")).items():
        if elements == 0:  # an empty shard
            index = record.layout.parameter_position[name]
            moved[index] = sizes[index] = 0.0
    return {"moved": moved, "size": sizes}


def _norm_if_finite(rows: Rows) -> NDArray[np.float64]:
    return np.where(nonfinite_of(rows) == 0, norm_of(rows), math.nan)


def _addends(record: StepRecord, notes: RankNotes) -> dict[Addend, NDArray[np.float64]]:
    """Gradients of which this rank holds an addend, as the optimizer used them."""
    addends = {}
    for index, copy in notes.addends.items():
        values = copy.wait().double().numpy().reshape(-1)
        norm, used = float(np.linalg.norm(values)), float(record.grad_norms[index])
        # Without a scaler's factor.
        factor = used / norm if norm > 0 and math.isfinite(norm) and math.isfinite(used) else 1.0
        share = notes.grads[index]
        count = share.reduced if share.reduction == "mean" else 1
        addends[Addend(index, share.copy, values.size)] = values * factor / count
    return addends
