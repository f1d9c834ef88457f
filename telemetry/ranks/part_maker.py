"""Makes the partial records that one rank sends, from its own records."""

from __future__ import annotations

import hashlib
import math
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from telemetry.capture import CapturedStep
from telemetry.ranks.partial_record import (
    COPIED,
    Addend,
    Array,
    Floats,
    ParameterPart,
    PartialRecord,
    Row,
    TensorTable,
)
from telemetry.ranks.topology import UNSPLIT, LocalShard, RankNotes, RankObserver
from telemetry.records import Layout, Output, StepRecord
from telemetry.records.moments import nonfinite_of, norm_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import Tensors, bad_among, figures_of

# A step's sequence number is the last of its block; the others are of phases before it. The next
# epoch begins when a run goes back to an earlier step.
PER_STEP = 2**10
EPOCH = PER_STEP * 2**34


class PartMaker:
    """Makes the partial records of one rank, in the order of its steps; on the worker thread."""

    def __init__(self, ranks: RankObserver) -> None:
        self._ranks = ranks
        self._host = socket.gethostname()
        self._sent_layout: Layout | None = None
        self._layout_id = ""
        self._last: tuple[int, float] | None = None
        self._epoch, self._sequence = 0, -1

    def part(self, record: StepRecord, captured: CapturedStep | None = None) -> PartialRecord:
        """Return the partial record of a step; ``captured`` is None at a light step."""
        notes = RankNotes() if captured is None else captured.ranks
        copied: dict[str, Any] = {name: getattr(record, name) for name in COPIED}
        return PartialRecord(
            rank=self._ranks.rank,
            size=self._ranks.size,
            parameters=self._parameters(record, captured, notes),
            tensors=_tensors(record, notes, self._ranks),
            step_s=self._step_s(record),
            host=self._host if record.full or record.phase else "",
            batch=self._batch(record),
            nonfinite=self._nonfinite(record),
            **copied,
        )

    def logged(self, step: int, scalars: Mapping[str, float]) -> PartialRecord:
        """Return the partial record of a step that did not end: its logged scalars."""
        rank, size, now = self._ranks.rank, self._ranks.size, time.time()
        return PartialRecord(rank=rank, size=size, step=step, wall_time=now, scalars=scalars)

    def numbered(self, part: PartialRecord) -> PartialRecord:
        """Return a partial record with its sequence number."""
        last_of_step = self._epoch + (part.step + 1) * PER_STEP - 1
        if last_of_step <= self._sequence:  # the run goes back to an earlier step
            self._epoch += EPOCH
            last_of_step += EPOCH
        first_of_step = last_of_step - PER_STEP + 1
        self._sequence = max(first_of_step, self._sequence + 1) if part.phase else last_of_step
        return replace(part, sequence=self._sequence)

    def _parameters(
        self, record: StepRecord, captured: CapturedStep | None, notes: RankNotes
    ) -> ParameterPart:
        layout, ranks = record.layout, self._ranks
        if is_new := layout is not self._sent_layout:
            names = "\n".join(parameter.name for parameter in layout.parameters)
            self._layout_id = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
            self._sent_layout = layout
        columns: dict[str, Array] = {
            "copies": ranks.copies(len(layout.parameters), notes.grads),
            "norms": record.grad_norms,
            "present": record.grad_present,
            "finite": record.grad_finite,
        }
        # The schedule of a pipeline divides gradients by the number of micro-batches later.
        if captured is not None and not ranks.is_in_pipeline:
            before = captured.norms_before_clipping(record.grad_norms, record.grad_present)
            columns |= {} if before is None else {"before": before}
        if captured is not None and record.full:
            columns["parameter_copies"] = ranks.copies(len(layout.parameters), notes.parameters)
            columns["moved"], columns["sizes"] = _updates(captured, record)
        checks = [
            (index, notes.parameters[index].shard, total)
            for indices, totals in notes.bit_sums
            for index, total in zip(indices, totals.wait().tolist(), strict=True)
        ]
        return ParameterPart(
            stage=ranks.stage,
            layout_id=self._layout_id,
            layout=layout if record.full or record.phase or is_new else None,
            columns=columns,
            addends=tuple(_addends(record, notes)),
            checks=np.array(checks, np.int64).T if checks else None,
        )

    def _step_s(self, record: StepRecord) -> float | None:
        """Return the seconds since the step before, if that is known."""
        if record.phase:
            return None
        last, self._last = self._last, (record.step, record.wall_time)
        return record.wall_time - last[1] if last and last[0] == record.step - 1 else None

    def _batch(self, record: StepRecord) -> str:
        """Return a digest of the batch, equal on ranks of one group with the same batch."""
        group = self._ranks.data_group
        if group is None or not record.fingerprints:
            return ""
        values = hashlib.blake2b(repr(record.fingerprints).encode(), digest_size=8).hexdigest()
        return f"{group}/{values}"

    def _nonfinite(self, record: StepRecord) -> str:
        """Return the first NaN or infinity of this rank alone.

        Ranks with the same data, and stages of a pipeline, receive their values from each other.
        """
        if self._ranks.same_data.copies > 1 or self._ranks.is_in_pipeline:
            return ""
        found = [f"the parameter {name}" for name in record.nonfinite_parameters]
        found += [f"the output of {output}" for output in bad_among(record.outputs)]
        if record.loss is not None and not math.isfinite(record.loss):
            found.append("the loss")
        return found[0] if found else ""


def _tensors(record: StepRecord, notes: RankNotes, ranks: RankObserver) -> TensorTable | None:
    found: dict[Row, LocalShard] = {}
    shards_of: dict[str, Mapping[Any, LocalShard]] = {
        "inputs": notes.outputs,
        "outputs": notes.outputs,
        "output_grads": notes.output_grads,
        "grads": notes.grads,
        "weights": notes.parameters,
        "second_moments": notes.parameters,
    }
    for kind, shards in shards_of.items():
        for name in getattr(record, kind):
            if kind == "inputs":
                found[Row(0, kind, name)] = shards.get(name, UNSPLIT)
            elif isinstance(name, Output):
                found[Row(ranks.stage, kind, *name)] = shards.get(name, UNSPLIT)
            else:
                index = record.layout.parameter_position[name]
                found[Row(ranks.stage, kind, name)] = shards.get(index) or ranks.of_plain(index)
    if not found:
        return None
    rows = [Tensors.of(getattr(record, kind)).rows for kind in shards_of]
    return TensorTable.of(found, Rows.concatenate(rows))


def _updates(captured: CapturedStep, record: StepRecord) -> tuple[Floats, Floats]:
    """Return the norms of parameters' updates, and of the parameters before; NaN: not measured.

    Of a large parameter only a sample's ratio of the two is known; the update is the whole norm
    times that, or the sample's update if that norm is zero.
    """
    count = len(record.layout.parameters)
    moved, sizes = np.full(count, np.nan), np.full(count, np.nan)
    norms = figures_of(
        record.weights, lambda rows: np.where(nonfinite_of(rows) == 0, norm_of(rows), math.nan)
    )
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
    return moved, sizes


def _addends(record: StepRecord, notes: RankNotes) -> Iterator[Addend]:
    """Yield this rank's addends of gradients, as the optimizer used them."""
    for index, copy in notes.addends.items():
        values = copy.wait().double().numpy().reshape(-1)
        norm, used = float(np.linalg.norm(values)), float(record.grad_norms[index])
        # Without a scaler's factor.
        factor = used / norm if norm > 0 and math.isfinite(norm) and math.isfinite(used) else 1.0
        yield Addend(index, notes.grads[index].copy, values * factor)
