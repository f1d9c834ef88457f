"""Exchange of steps between ranks: partial records are sent, merged on rank 0 and recorded once."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import numpy as np

from telemetry.alert import Alert, alert_fields, parse_alert
from telemetry.capture import CapturedStep, LightStep
from telemetry.events.background import each_within
from telemetry.failures import Failures
from telemetry.plain_text import ranks_in_words
from telemetry.ranks.channel import CLOSE_S, Announcement, Channel
from telemetry.ranks.merged_records import MergedRecords
from telemetry.ranks.merging import MergedStep
from telemetry.ranks.partial_record import (
    Addend,
    Floats,
    Integers,
    ParameterPart,
    PartialRecord,
    Row,
    Shared,
    TensorTable,
)
from telemetry.ranks.topology import UNSPLIT, LocalShard, RankNotes, RankObserver, RankTopology
from telemetry.records import Layout, Output, StepRecord
from telemetry.records.batches import Batch
from telemetry.records.moments import nonfinite_of, norm_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import Tensors, bad_among, figures_of

# High-water mark of merged steps that are queued for the rules: above it, steps are dropped.
MAX_BYTES = 128 * 2**20

# Full records of rank 0 that are kept until they return merged.
_OWN_KEPT = 8

# Rank 0 announces a requested full step so long before, so that all ranks receive it in time.
_LEAD_STEPS = 16
_LEAD_S = 2.0

_numbers = itertools.count()


class Exchange:
    """Exchange of a process that trains alone: each step is recorded here and at once.

    Attributes:
        observer: Selects the tensors that this rank measures; None: all tensors.
        records: Whether this process records steps, so that its rules judge them.
    """

    observer: RankObserver | None = None
    records = True
    _alert: Alert | None = None  # to raise

    def send(self, record: StepRecord, step: CapturedStep | LightStep) -> StepRecord | None:
        """Return the record to judge and write now; None: it returns merged, see :meth:`merged`."""
        return record

    def logged(self, values: dict[str, float]) -> dict[str, float]:
        """Return logged scalars to judge and write now; others return merged with their step."""
        return values

    def noted(self, batch: Batch) -> Batch:
        """Return the batch with its rank; other ranks than 0 send it with the next step."""
        return batch

    def send_rest(self, logged: Mapping[int, Mapping[str, float]]) -> None:
        """Send the scalars that were logged for steps that did not end."""

    def merged(self, merged: MergedStep) -> StepRecord | None:
        """Return the record of a merged step; None: the step did not end, or has no layout."""
        raise NotImplementedError

    def note_recorded(self, merged: MergedStep) -> None:
        """Note that a merged step is written or dropped."""

    def request_full(self, step: int) -> bool:
        """Have all ranks measure a step after this one in full; False: this process decides."""
        return False

    def raise_on_all(self, alert: Alert) -> None:
        """Have all ranks raise this alert at the end of the same step; the first alert counts."""
        self._alert = self._alert or alert

    def to_raise(self, step: int | None) -> Alert | None:
        """Return the alert to raise at the end of this step; None as a step: training has ended."""
        alert, self._alert = self._alert, None
        return alert

    def wait(self, timeout_s: float) -> None:
        """Wait until all sent steps are recorded; on other ranks than 0, return at once."""

    def close(self, timeout_s: float) -> None:
        """End the exchange; rank 0 first records what the others send in time."""


class RankExchange(Exchange):
    """Sends the steps of this rank to rank 0, and makes records of merged steps there.

    Several loggers are paired by the order in which each process makes them.

    Args:
        put: Queues a merged step, on rank 0.
        ask: Has this rank measure a step in full.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        put: Callable[[MergedStep], None],
        ask: Callable[[int], None],
        current_step: Callable[[], int],
        failures: Failures,
    ) -> None:
        self.observer = RankObserver(rank=rank, size=size)
        self.records = rank == 0
        self._rank = rank
        self._batches: list[Batch] = []  # not sent yet
        self._maker = PartMaker(self.observer.topology)
        self._put = put
        self._ask = ask
        self._current_step = current_step
        self._first_step = current_step()
        self._announced: set[int] = set()  # full steps, of which a late rank has only the norms
        self._last: tuple[int, float] = (-1, 0.0)  # step and time of the latest record
        self._step_s = 0.0
        self._failures = failures
        self._merged_records = MergedRecords()
        self._own: dict[tuple[int, str], StepRecord] = {}
        self._changed = threading.Condition()
        self._queued_bytes = 0  # of merged steps
        self._awaited: tuple[int, bool] | None = None  # the latest sent, until it is recorded
        self._channel = Channel(
            name=str(next(_numbers)),
            rank=rank,
            world_size=size,
            deliver=self.take,
            on_announcement=self._on_announcement,
            failures=failures,
            first_step=self._first_step,
        )

    # --- on the background thread ----------------------------------------------------------------

    def send(self, record: StepRecord, step: CapturedStep | LightStep) -> StepRecord | None:
        if self.records and (record.full or record.phase):
            self._own[record.step, record.phase] = record
            while len(self._own) > _OWN_KEPT:
                del self._own[next(iter(self._own))]
        part = self._maker.part(record, step if isinstance(step, CapturedStep) else None)
        self._send(replace(part, batches=tuple(self._batches)))
        self._batches = []
        return None

    def logged(self, values: dict[str, float]) -> dict[str, float]:
        return {}

    def noted(self, batch: Batch) -> Batch:
        batch = replace(batch, rank=self._rank)
        self._batches += [] if self.records else [batch]
        return batch

    def send_rest(self, logged: Mapping[int, Mapping[str, float]]) -> None:
        for step, values in sorted(logged.items()):
            self._send(self._maker.logged(step, values))

    def _send(self, part: PartialRecord) -> None:
        self._awaited = part.step, not part.phase  # phases of a step come before it
        self._channel.send(part)

    def merged(self, merged: MergedStep) -> StepRecord | None:
        own = self._own.pop((merged.step, merged.phase), None)
        record = self._merged_records.record(merged, own)
        if record is not None and not record.phase:
            step, wall_time = self._last
            self._last = record.step, record.wall_time
            self._step_s = max(0.0, record.wall_time - wall_time) / max(1, record.step - step)
        others = merged.ranks - merged.measured
        if merged.measured and others and merged.step not in self._announced:
            self._failures.log_once(
                f"step {merged.step} was measured in full by {ranks_in_words(merged.measured)} and "
                f"not by {ranks_in_words(others)}; use the same every_n_steps on all ranks, "
                "without max_overhead",
                kind="intervals",
            )
        return record

    def take(self, merged: MergedStep) -> None:
        """Queue a merged step, on the thread of the channel; drop it above the high-water mark."""
        with self._changed:
            fits = self._queued_bytes <= MAX_BYTES
            self._queued_bytes += merged.nbytes
        if fits:
            self._put(merged)
            return
        self._failures.log_once(
            f"step {merged.step} is not recorded, earlier ones are still being judged; use a "
            "larger every_n_steps to keep up",
            kind="merged steps",
        )
        self.note_recorded(merged)

    def note_recorded(self, merged: MergedStep) -> None:
        with self._changed:
            self._queued_bytes -= merged.nbytes
            if self._awaited is not None and (merged.step, not merged.phase) >= self._awaited:
                self._awaited = None
                self._changed.notify_all()

    # --- announcements ---------------------------------------------------------------------------

    def request_full(self, step: int) -> bool:
        """Announce a full step; not if a later one is announced, or a step's time is unknown."""
        if step > max(self._announced, default=-1) and self._step_s > 0:
            now, step_s, (last, wall_time) = self._current_step(), self._step_s, self._last
            if now > last + 1:  # the first steps are slow
                step_s = min(step_s, max(1e-6, time.time() - wall_time) / (now - last - 1))
            at = now + max(_LEAD_STEPS, math.ceil(_LEAD_S / step_s))
            self._announced.add(at)
            self._channel.announce(at)
        return True

    def _on_announcement(self, announcement: Announcement) -> None:
        """Follow rank 0's announcement; log a first step that differs from this rank's."""
        if announcement.first_step not in (None, self._first_step):
            self._failures.log_once(
                f"this rank counts its steps from {self._first_step} and rank 0 from "
                f"{announcement.first_step}, so their records do not meet; give all ranks the same "
                'first_step (with "auto", each needs to read the directory of the run)',
                kind="first step",
            )
        if announcement.full_step > self._current_step():  # else this rank is too late
            self._ask(announcement.full_step)
        if announcement.message and self._alert is None:
            self._alert = parse_alert(json.loads(announcement.message))

    # --- on the training thread ------------------------------------------------------------------

    def raise_on_all(self, alert: Alert) -> None:
        self._channel.raise_on_all(json.dumps(alert_fields(alert)))

    def to_raise(self, step: int | None) -> Alert | None:
        return self._alert if self._channel.barrier.step_ended(step) else None

    def wait(self, timeout_s: float) -> None:
        if self.records and self._channel.is_in_own_process:
            with self._changed:
                self._changed.wait_for(lambda: self._awaited is None, timeout_s)

    def close(self, timeout_s: float) -> None:
        each_within(min(CLOSE_S, timeout_s), self.wait, self._channel.close)


class PartMaker:
    """Makes the partial records of one rank, in the order of its steps; on the worker thread."""

    def __init__(self, topology: RankTopology) -> None:
        self._topology = topology
        self._host = socket.gethostname()
        self._sent_layout: Layout | None = None
        self._layout_id = ""
        self._last: tuple[int, float] | None = None

    def part(self, record: StepRecord, captured: CapturedStep | None = None) -> PartialRecord:
        """Return the partial record of a step; ``captured`` is None at a light step."""
        notes = RankNotes() if captured is None else captured.ranks
        unknown_sums = notes.unknown_sums.union(
            f"the gradient of {record.layout.parameters[index].name}"
            for index, shard in notes.grads.items()
            if shard.reduction == "unknown"
        )
        return PartialRecord(
            rank=self._topology.rank,
            size=self._topology.size,
            step=record.step,
            wall_time=record.wall_time,
            phase=record.phase,
            full=record.full,
            shared=Shared(**{f.name: getattr(record, f.name) for f in fields(Shared)}),
            parameters=self._parameters(record, captured, notes),
            tensors=_tensors(record, notes, self._topology),
            attention=record.attention,
            scalars=record.scalars,
            usage=record.usage,
            expert_loads=record.expert_loads,
            step_s=self._step_s(record),
            host=self._host if record.full or record.phase else "",
            batch=self._batch(record),
            nonfinite=self._nonfinite(record),
            unknown_sums=tuple(sorted(unknown_sums)),
        )

    def logged(self, step: int, scalars: Mapping[str, float]) -> PartialRecord:
        """Return the partial record of a step that did not end: its logged scalars."""
        rank, size = self._topology.rank, self._topology.size
        return PartialRecord(
            rank=rank, size=size, step=step, wall_time=time.time(), scalars=scalars
        )

    def _parameters(
        self, record: StepRecord, captured: CapturedStep | None, notes: RankNotes
    ) -> ParameterPart:
        layout, topology = record.layout, self._topology
        is_new = layout is not self._sent_layout
        if is_new:
            names = "\n".join(parameter.name for parameter in layout.parameters)
            self._layout_id = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
            self._sent_layout = layout
        before = parameter_copies = moved = sizes = None
        if captured is not None and record.full:
            parameter_copies = _copies(layout, notes.parameters, topology)
            moved, sizes = _updates(captured, record)
        # The schedule of a pipeline divides gradients by the number of micro-batches later.
        if captured is not None and not topology.is_in_pipeline:
            before = captured.norms_before_clipping(record.grad_norms, record.grad_present)
        checks = [
            (index, notes.parameters[index].shard, total)
            for indices, totals in notes.bit_sums
            for index, total in zip(indices, totals.wait().tolist(), strict=True)
        ]
        return ParameterPart(
            stage=topology.stage,
            layout_id=self._layout_id,
            layout=layout if record.full or record.phase or is_new else None,
            copies=_copies(layout, notes.grads, topology),
            norms=record.grad_norms,
            present=record.grad_present,
            finite=record.grad_finite,
            before=before,
            parameter_copies=parameter_copies,
            moved=moved,
            sizes=sizes,
            addends=_addends(record, notes),
            checks=np.array(checks, np.int64).T if checks else None,
            nan_buffers=tuple(record.nan_buffers),
            nonfinite_parameters=tuple(record.nonfinite_parameters),
        )

    def _step_s(self, record: StepRecord) -> float | None:
        """Return the seconds since the step before, if that is known."""
        if record.phase:
            return None
        last, self._last = self._last, (record.step, record.wall_time)
        return record.wall_time - last[1] if last and last[0] == record.step - 1 else None

    def _batch(self, record: StepRecord) -> str:
        """Return a digest of the batch, equal on ranks of one group with the same batch."""
        group = self._topology.data_group
        if group is None or not record.fingerprints:
            return ""
        values = hashlib.blake2b(repr(record.fingerprints).encode(), digest_size=8).hexdigest()
        return f"{group}/{values}"

    def _nonfinite(self, record: StepRecord) -> str:
        """Return the first NaN or infinity of this rank alone.

        Ranks with the same data, and stages of a pipeline, receive their values from each other.
        """
        if self._topology.same_data.copies > 1 or self._topology.is_in_pipeline:
            return ""
        found = [f"the parameter {name}" for name in record.nonfinite_parameters]
        found += [f"the output of {output}" for output in bad_among(record.outputs)]
        if record.loss is not None and not math.isfinite(record.loss):
            found.append("the loss")
        return found[0] if found else ""


def _tensors(record: StepRecord, notes: RankNotes, topology: RankTopology) -> TensorTable | None:
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
                row = Row(topology.stage, kind, name.module_name, name.place)
                found[row] = shards.get(name, UNSPLIT)
            else:
                index = record.layout.parameter_position[name]
                shard = shards.get(index) or topology.of_plain(index)
                found[Row(topology.stage, kind, name)] = shard
    if not found:
        return None
    return TensorTable.of(
        found, Rows.concatenate([Tensors.of(getattr(record, kind)).rows for kind in shards_of])
    )


def _copies(layout: Layout, shards: Mapping[int, LocalShard], topology: RankTopology) -> Integers:
    copies = topology.plain_copies(len(layout.parameters))
    for index, shard in shards.items():
        copies[index] = shard.copy
    return copies


def _updates(captured: CapturedStep, record: StepRecord) -> tuple[Floats, Floats]:
    """Return the norms of parameters' updates, and of the parameters before; NaN: not measured.

    Of a large parameter only a sample's ratio of the two is known; the update is the whole norm
    times that, or the sample's update if that norm is zero.
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
    return moved, sizes


def _norm_if_finite(rows: Rows) -> Floats:
    return np.where(nonfinite_of(rows) == 0, norm_of(rows), math.nan)


def _addends(record: StepRecord, notes: RankNotes) -> dict[Addend, Floats]:
    """Return this rank's addends of gradients, as the optimizer used them."""
    addends = {}
    for index, copy in notes.addends.items():
        values = copy.wait().double().numpy().reshape(-1)
        norm, used = float(np.linalg.norm(values)), float(record.grad_norms[index])
        # Without a scaler's factor.
        factor = used / norm if norm > 0 and math.isfinite(norm) and math.isfinite(used) else 1.0
        addends[Addend(index, notes.grads[index].copy, values.size)] = values * factor
    return addends
