"""Gathers what was measured of one layer at one step from the step's record.

A layer is a module. This file decides which module an output belongs to, and which one owns a
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from telemetry.layers.module_types import saturated_share
from telemetry.records import Module, Output, Spread, StepRecord, TensorRecord
from telemetry.records.sketch import Sketch


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRecord:
    """What was measured of one layer at one step.

    Attributes:
        module: The module.
        outputs: Each tensor that it returned.
        output_grads: The gradients with respect to these.
        weights: Each of its parameters before the step.
        grads: Their gradients.
        second_moments: Adam's running means of the squared gradients, after the step.
        update_ratios: ``||after - before|| / ||before||`` of each of ``weights``; NaN if unknown.
        grad_norm: L2 norm of the gradients of its parameters; None if none had a gradient.
        grad_size: Number of elements of these gradients.
        ranks_rms: Of the root mean square of its first output on each of several ranks.
    """

    module: Module
    outputs: Sequence[TensorRecord] = ()
    output_grads: Sequence[TensorRecord] = ()
    weights: Sequence[TensorRecord] = ()
    grads: Sequence[TensorRecord] = ()
    second_moments: Sequence[TensorRecord] = ()
    update_ratios: Sequence[float] = ()
    grad_norm: float | None = None
    grad_size: int = 0
    ranks_rms: Spread | None = None

    @cached_property
    def output(self) -> TensorRecord | None:
        """Everything that the module returned, merged into one; None if nothing was measured."""
        return TensorRecord.merge_all(self.outputs) if self.outputs else None

    @cached_property
    def output_grad(self) -> TensorRecord | None:
        """The gradients with respect to :attr:`output`, likewise."""
        return TensorRecord.merge_all(self.output_grads) if self.output_grads else None

    @property
    def grad_rms(self) -> float | None:
        """Root mean square of the gradients of the parameters."""
        norm = self.grad_norm
        return None if norm is None else norm / math.sqrt(self.grad_size or 1)

    @property
    def saturation(self) -> float | None:
        """See :func:`~telemetry.layers.module_types.saturated_share`."""
        output = self.output
        return None if output is None else saturated_share(self.module.type_name, output.sketch)

    @cached_property
    def weight_norms(self) -> Sequence[float | None]:
        """L2 norm of each parameter; None if nothing was measured."""
        return [figure(weight, attrgetter("norm")) for weight in self.weights]

    @cached_property
    def weight_norm(self) -> float | None:
        """L2 norm of the parameters as one vector."""
        known = [norm for norm in self.weight_norms if norm is not None]
        return _hypot(known) if known else None

    @property
    def weight_rms(self) -> float | None:
        """Root mean square of the parameters."""
        norm, count = self.weight_norm, sum(weight.sketch.count for weight in self.weights)
        return None if norm is None else norm / math.sqrt(count)

    @property
    def update_ratio(self) -> float | None:
        """``||after - before|| / ||before||`` of the parameters as one vector.

        Parameters that were all zeros are left out, because they have no ratio.
        """
        pairs = [
            (ratio * norm, norm)
            for ratio, norm in zip(self.update_ratios, self.weight_norms, strict=True)
            if norm and not (math.isnan(ratio) and math.isfinite(norm))
        ]
        if not pairs:
            return None
        moved, size = (_hypot(column) for column in zip(*pairs, strict=True))
        return math.nan if math.isinf(size) else moved / size

    @property
    def second_moment_rms(self) -> float | None:
        """Root of the mean of Adam's ``exp_avg_sq`` over all elements."""
        if not self.second_moments:
            return None
        total = TensorRecord.merge_all(self.second_moments)
        return figure(total, lambda sketch: math.sqrt(max(sketch.mean, 0.0)))

    @property
    def rank_spread(self) -> float | None:
        """How much smaller the least RMS of an output on any rank is than the largest, 0 to 1.

        None on one rank, and where one alone measured it or all have the same.
        """
        spread = self.ranks_rms
        if spread is None or spread.low_rank == spread.high_rank:
            return None
        return 1.0 if math.isinf(spread.high) else 1 - spread.low / spread.high

    @property
    def nonfinite_count(self) -> int | None:
        """Number of NaN and infinite elements in outputs, parameters and the gradients of both."""
        groups = (self.outputs, self.output_grads, self.weights, self.grads)
        counts = [tensor.sketch.nonfinite_count for group in groups for tensor in group]
        return sum(counts) if counts else None


def layers_of(record: StepRecord) -> Iterator[LayerRecord]:
    """What was measured of each layer, in the order of ``record.layout.modules``."""
    layout, ranks = record.layout, record.ranks
    outputs = _by_module(record.outputs)
    output_grads = _by_module(record.output_grads)
    present, norms = record.grad_present.tolist(), record.module_grad_norms.tolist()
    for module, own, norm in zip(layout.modules, layout.owned, norms, strict=True):
        names = [layout.parameters[index].name for index in own]
        weighed = [name for name in names if name in record.weights]
        with_grad = [index for index in own if present[index] and not record.skipped]
        yield LayerRecord(
            module=module,
            outputs=outputs.get(module.name, ()),
            output_grads=output_grads.get(module.name, ()),
            weights=[record.weights[name] for name in weighed],
            grads=[record.grads[name] for name in names if name in record.grads],
            second_moments=[
                record.second_moments[name] for name in names if name in record.second_moments
            ],
            update_ratios=[record.update_ratios.get(name, math.nan) for name in weighed],
            grad_norm=norm if with_grad else None,
            grad_size=sum(layout.parameters[index].size for index in with_grad),
            ranks_rms=None if ranks is None else ranks.activation_rms.get(Output(module.name)),
        )


def _by_module(outputs: Mapping[Output, TensorRecord]) -> dict[str, list[TensorRecord]]:
    """The tensors of each module, by the module's name."""
    found: dict[str, list[TensorRecord]] = {}
    for output, tensor in outputs.items():
        found.setdefault(output.module_name, []).append(tensor)
    return found


def figure(tensor: TensorRecord | None, of_finite: Callable[[Sketch], float]) -> float | None:
    """A mean or norm over all elements, whereas a sketch's own is over the finite ones.

    Args:
        tensor: What was measured.
        of_finite: Computes the figure from a sketch whose values are all finite.

    Returns:
        NaN if an element is NaN, infinity if one is infinite; None if nothing was measured.
    """
    if tensor is None or not tensor.sketch.count:
        return None
    sketch = tensor.sketch
    if sketch.finite_count == sketch.count:
        return of_finite(sketch)
    return math.nan if sketch.nan_count else math.inf


def _hypot(norms: Sequence[float]) -> float:
    """Like ``math.hypot``, but NaN if any of them is NaN."""
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)
