"""A step as it left the training thread, and the record that the background thread makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry import images
from telemetry.capture.scaler import SkippedSteps
from telemetry.capture.window import Kind, Name, Observation, Window
from telemetry.failures import Failures
from telemetry.measure import Measurements
from telemetry.records import Layout, StepRecord, TensorRecord
from telemetry.torch_private.host_copy import HostCopy

_STEP_BYTES = 2560
"""What any step takes, its objects together."""

_OBSERVATION_BYTES = 3072
"""What leads to the record of a tensor in CPU memory: 10 bytes for each bucket and 8 for each unit,
and 0.5 kB for the rest. Traced allocations of normal numbers: 1.7 kB for 1,000 of them, 2.9 kB for
100,000, 3.3 kB for those of 64 channels."""

_NORM_BYTES = 16
"""A norm and the index of its parameter."""

_CLIPPED = 1 - 1e-3
"""Clipping scales by at most 1, so a ratio of norms below this is no rounding."""


class RunTotals:
    """What is counted over the whole run, in the order of the steps."""

    def __init__(self) -> None:
        self.count_skipped = SkippedSteps()
        self._full = 0
        self._clipped = 0

    def clipped_fraction(self, before: float | None, after: float) -> float | None:
        """Share of the full steps so far that were clipped; None if ``before`` is unknown."""
        if before is None:
            return None
        self._full += 1
        self._clipped += after < before * _CLIPPED
        return self._clipped / self._full


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedStep:
    """What one step left behind: cheap to make, reduced later by :meth:`record`.

    Attributes:
        window: What was observed, complete: nothing is added any more.
        wall_time: When the step ended, seconds since the epoch.
        layout: Of the model at that time.
        totals: Shared by all steps of the run.
        measurements: What the window's measurer took.
        overflow_ends: See :meth:`Window.overflow_ends`.
        failures: Where to report what failed.
    """

    window: Window
    wall_time: float
    layout: Layout
    totals: RunTotals
    measurements: Measurements | None
    overflow_ends: Sequence[HostCopy]
    failures: Failures

    @staticmethod
    def of(
        window: Window, *, wall_time: float, layout: Layout, totals: RunTotals, failures: Failures
    ) -> CapturedStep:
        """End the step."""
        measurer = window.measurer
        ends = window.overflow_ends()  # first: finish() sends what waits on a GPU to the host
        return CapturedStep(
            window=window,
            wall_time=wall_time,
            layout=layout,
            totals=totals,
            measurements=measurer.finish() if measurer is not None else None,
            overflow_ends=ends,
            failures=failures,
        )

    @property
    def step(self) -> int:
        """The step's number."""
        return self.window.step

    def without_detail(self) -> CapturedStep:
        """The same step with nothing but its norms: for where memory is short."""
        return replace(self, window=self.window.without_detail(), measurements=None)

    @property
    def is_urgent(self) -> bool:
        """Whether it holds more than norms, or one that is not finite."""
        window = self.window
        return window.full or bool(window.phase) or not math.isfinite(window.square)

    @cached_property
    def nbytes(self) -> int:
        """Host memory held until :meth:`record`, about."""
        pictures = [*self.window.feature_maps.values(), *self.window.filters.values()]
        observations = len(self.window.tally.observations)
        norms = len(self.window.indices()) * _NORM_BYTES
        detail = observations * _OBSERVATION_BYTES + sum(p.nbytes for p in pictures)
        copied = self.measurements.copied_bytes if self.measurements is not None else 0
        return _STEP_BYTES + norms + detail + copied

    def record(self, scalars: Mapping[str, float], loss_tag: str | None = None) -> StepRecord:
        """Reduce to numbers and pixels; waits for an accelerator, so not for the training thread.

        Called once for each step, in their order.

        Args:
            scalars: What the user logged for this step.
            loss_tag: Which of that is the loss.
        """
        window = self.window
        norms, present, finite = self._grad_norms()
        each_before = self.norms_before_clipping(norms, present)
        before = None if each_before is None else float(np.linalg.norm(each_before))
        overflown = self._overflown(bool(finite.all()))
        tensors = self._tensors(overflown)
        return StepRecord(
            step=window.step,
            wall_time=self.wall_time,
            layout=self.layout,
            grad_norms=norms,
            grad_present=present,
            grad_finite=finite,
            phase=window.phase,
            learning_rates=self._learning_rates(),
            scalars=scalars,
            loss_tag=loss_tag,
            eval_mode=window.eval_mode,
            full=window.full,
            trainable=self._marked(window.trainable),
            reached=self._marked(window.reached),
            held=self._marked(window.held),
            fingerprints=tuple(float(copy.wait()) for copy in window.fingerprints),
            examples=window.examples,
            total_grad_norm_before_clipping=before,
            clipped_fraction=self.totals.clipped_fraction(before, float(np.linalg.norm(norms))),
            nan_buffers=self._nan_buffers(),
            nonfinite_parameters=self._nonfinite_parameters(tensors["weights"]),
            update_ratios=self._update_ratios(),
            random_states=window.random_states,
            **tensors,
            **self._scaler(overflown),
            **self._images(),
        )

    def _scaler(self, overflown: int) -> dict[str, Any]:
        """What a ``GradScaler`` did, if there is one."""
        scaler = self.window.scaler
        if scaler is None:
            return {}
        passes = self.window.passes - 1 if overflown else 0
        return {
            "loss_scale": scaler.factor,
            "skipped_steps": self.totals.count_skipped(scaler, overflown_passes=passes),
            "skipped": scaler.skipped,
        }

    def _images(self) -> dict[str, Any]:
        return {
            "feature_maps": self._pictures(images.feature_map_grid, self.window.feature_maps),
            "filters": self._pictures(images.filter_grid, self.window.filters),
            "input": self._pictures(images.input_grid, {"": self.window.input}).get(""),
        }

    def _pictures(
        self, draw: Callable[[Tensor], NDArray[np.uint8]], samples: Mapping[str, HostCopy | None]
    ) -> dict[str, NDArray[np.uint8]]:
        """Pictures of what there are samples of; the step's numbers do not depend on them."""
        pictures: dict[str, NDArray[np.uint8]] = {}
        for name, sample in samples.items():
            if sample is not None:
                with self.failures.contained("to draw a picture"):
                    pictures[name] = draw(sample.wait())
        return pictures

    @property
    def _factor(self) -> float:
        """What scaled gradients have to be divided by."""
        factor = self.window.scaler.factor if self.window.scaler is not None else 1.0
        return factor if factor > 0 and math.isfinite(factor) else 1.0

    def _grad_norms(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Norms as the optimizers used them, which gradients there were, which were finite."""
        count = len(self.layout.parameters)
        norms = np.zeros(count)
        present, finite = np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
        for optimizer in self.window.optimizers.values():
            for reading in optimizer.norms:
                at = np.array(reading.indices, dtype=np.intp)
                values, finite[at] = reading.read()
                norms[at] = values / self._factor if optimizer.scaled else values
                present[at] = True
        return norms, present, finite

    def norms_before_clipping(
        self, norms: NDArray[np.float64], present: NDArray[np.bool_]
    ) -> NDArray[np.float64] | None:
        """Of the gradients that were used; those that no backward pass reached were there."""
        readings = self.window.before_clipping
        if not readings:
            return None
        before = norms.copy()
        values = {id(reading): reading.norms for reading, _ in readings.values()}
        for index, (reading, place) in readings.items():
            if present[index]:
                before[index] = values[id(reading)][place] / self._factor
        return before

    def _marked(self, indices: Collection[int]) -> NDArray[np.bool_]:
        """Which parameters these are; none where that was not looked at."""
        marked = np.zeros(len(self.layout.parameters), dtype=bool)
        marked[list(indices)] = True
        return marked if self.window.full else marked[:0]

    def _learning_rates(self) -> tuple[float, ...]:
        return tuple(
            float(rate.wait()) if isinstance(rate, HostCopy) else rate
            for rates in self.window.learning_rates.values()
            for rate in rates
        )

    def _nan_buffers(self) -> tuple[str, ...]:
        return tuple(
            self.window.buffer_names[index]
            for reading in self.window.buffer_norms
            for index, norm in zip(reading.indices, reading.read()[0], strict=True)
            if math.isnan(norm)
        )

    def _nonfinite_parameters(self, weights: Mapping[str, TensorRecord]) -> tuple[str, ...]:
        names = [parameter.name for parameter in self.layout.parameters]
        broken = {
            names[index]
            for reading in self.window.parameter_norms
            for index, finite in zip(reading.indices, reading.read()[1], strict=True)
            if not finite
        }
        broken |= {name for name, weight in weights.items() if weight.sketch.nonfinite_count}
        return tuple(name for name in names if name in broken)

    def _update_ratios(self) -> dict[str, float]:
        parameters = self.layout.parameters
        readings = [update.read() for update in self.window.updates]
        return {
            parameters[index].name: float(ratio)
            for indices, ratios in readings
            for index, ratio in zip(indices, ratios, strict=True)
        }

    def _overflown(self, finite: bool) -> int:
        """How many of the first observations belong to steps that a scaler skipped.

        Args:
            finite: Whether the step's gradients are: then a backward pass with one that is not
                ended a step that did not happen, and all before it belongs there.
        """
        if self.window.scaler is None or not finite:
            return 0
        return max((int(end.wait()) for end in self.overflow_ends), default=0)

    def _tensors(self, overflown: int) -> dict[str, Any]:
        """By kind and name the merged observations, without the first ``overflown`` of all."""
        merged: dict[str, dict[Any, TensorRecord]] = {kind: {} for kind in get_args(Kind)}
        if self.measurements is None:
            return merged
        reduced = self.measurements.reduce()
        self._tell_wrong(reduced)
        tally = self.window.tally
        parts: dict[tuple[Kind, Name], list[TensorRecord]] = {}
        for o in tally.observations[overflown:]:
            parts.setdefault((o.kind, o.name), []).append(self._unscaled(o, reduced))
        for (kind, name), records in parts.items():
            record, counted = TensorRecord.merge_all(records), tally.counted[kind, name]
            merged[kind][name] = (
                replace(record, calls=record.calls + counted) if counted else record
            )
        return merged

    def _tell_wrong(self, reduced: Sequence[TensorRecord]) -> None:
        """Say so if PyTorch's own figures of what compiled graphs have shown are others."""
        wrong = []
        for kind, name, measurement, copy in self.window.checks:
            own, sketch = copy.wait().numpy(), reduced[measurement].sketch
            recorded = np.array([sketch.min, sketch.max, math.sqrt(sketch.sum_squares)])
            finite = bool(np.isfinite(own).all())
            if finite is not (sketch.nonfinite_count == 0) or (
                finite and not np.allclose(recorded, own, rtol=1e-3, atol=1e-30)
            ):
                wrong.append(f"{kind} of {name}: {recorded.tolist()} instead of {own.tolist()}")
        if wrong:
            self.failures.log_once(
                f"{len(wrong)} of {len(self.window.checks)} tensors of compiled modules are "
                "recorded with another minimum, maximum or norm than PyTorch finds, the "
                f"first being {wrong[0]}. This is a fault of telemetry with PyTorch "
                f"{torch.__version__}, please report it; "
                'under torch.compiler.set_stance("force_eager") figures are right'
            )

    def _unscaled(self, o: Observation, reduced: Sequence[TensorRecord]) -> TensorRecord:
        record = reduced[o.measurement]
        return record.scaled(1 / self._factor) if o.scaled and self._factor != 1 else record
