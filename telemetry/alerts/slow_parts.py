"""Parts of a model that hardly learn, or whose outputs no longer tell inputs apart."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from telemetry.alerts.baseline import FEW_SAMPLES, LATEST, RECENT, Baseline, Figures
from telemetry.alerts.detector import EXPLOSIONS, RISEN_LOSSES, Detector, Finding
from telemetry.layers.module_types import AFFINE
from telemetry.plain_text import called, called_all
from telemetry.records import Output, StepRecord
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of

_LIMP = frozenset({"dead_units", "saturated_units", "vanishing_gradient", "nonfinite"})


class LayersNotLearning(Detector):
    """Alerts when weights have gradients, and steps move them next to nothing beside the others.

    Their update ratio is below ``share`` of that of the fastest quarter of the weight matrices, at
    all of at least three full measurements over ``steps`` steps: a rate that falls from layer to
    layer far too fast, a parameter group with a rate of zero, weights in bfloat16 whose steps are
    lost in rounding. What has no gradient meanwhile, as an expert that is not chosen, is waiting.
    """

    kind = "layers_not_learning"
    on = "full"
    clear_after = 3
    explained_by = _LIMP | EXPLOSIONS | {"no_learning", "output_collapse", "untrained_parameters"}
    # Embeddings of rare words have 0.02, fine-tuning with a decay of 0.65 over 12 layers 0.006.
    share = 1e-3
    steps = 100
    full_steps_in_a_row = 2
    _names: tuple[str, ...] = ()
    _since: Figures
    _looks: Figures
    _is_left: bool = False

    def set_up(self) -> None:
        self._since, self._looks = np.zeros((2, 0))

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        layout = record.layout
        names = tuple([p.name for p in layout.parameters if len(p.shape) > 1])
        if names != self._names:
            self._names, self._looks = names, np.zeros(len(names))
            self._since = np.zeros(len(names))
        ratios = np.array([record.update_ratios.get(name, np.nan) for name in names])
        moved = ratios[np.isfinite(ratios) & (ratios > 0)]
        if not moved.size:
            return None
        usual = float(np.quantile(moved, 0.75))
        norms = record.grad_norms[[layout.parameter_position[name] for name in names]]
        limit = self.share * usual
        slow, learns = (ratios < limit) & (norms > 0), ratios >= limit
        self._is_left = bool(((ratios < _HYSTERESIS * limit) & (norms > 0)).any())
        self._since = np.where(slow & (self._looks == 0), record.step, self._since)
        self._looks = np.where(learns, 0, self._looks + slow)
        found = slow & (self._looks >= 3) & (record.step - self._since >= self.steps)
        self.needs_full_step = bool(
            (slow & (record.step - self._since >= self.steps) & ~found).any()
        )
        if not found.any():
            return None
        owner = {p.name: p.module_name for p in layout.parameters}
        layers = [owner[name] for name, is_slow in zip(names, found, strict=True) if is_slow]
        ratio = float(ratios[found].max())
        return Finding(
            summary=f"{called_all(layers, RECENT)} get gradients and hardly move: a step changes "
            f"them by at most {ratio:.2g} of their norm, other layers by {usual:.2g}",
            advice=(
                "Check the learning rate of their parameter group, and layer-wise decay",
                "Keep weights in float32: bfloat16 rounds steps below 0.4 % of a value away",
                "Freeze layers that should not learn by requires_grad_(False)",
            ),
            value=ratio,
            threshold=limit,
            module_name=layers[0],
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return not record.update_ratios or self._is_left


class OutputCollapse(Detector):
    """Alerts when an output has become the same vector for every input, or all units are alike.

    Compared are how far its values lie apart within a unit (:attr:`TensorRecord.variation`) and
    their root mean square: ``share`` or less, in two full measurements in a row, where it once was
    at least 0.3. Usual causes: two views of one example and no term that keeps examples apart, a
    weight decay or a penalty that outweighs the loss. Of what has fewer than eight units, as a
    regression far from zero, one number says little.

    Units of a linear layer or convolution that return the same as each other, though not the same
    for every input, began with equal weights: they get equal gradients and never part.
    """

    kind = "output_collapse"
    on = "full"
    confirm_after = 2
    clear_after = 3
    explained_by = _LIMP | EXPLOSIONS | RISEN_LOSSES | {"exponential_trend", "untrained_parameters"}
    share = 0.02  # gpt_lr100, whose outputs have collapsed, has 0.005; healthy outputs have 0.1
    _highest: dict[Output, float]

    def set_up(self) -> None:
        self._highest = {}

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        sizes, units, counts = (
            figures_of(record.outputs, of)
            for of in (rms_of, lambda r: r.unit_count, attrgetter("count"))
        )
        collapsed = []
        for output, variation in figures_of(record.outputs, lambda r: r.variation).items():
            if units[output] >= _UNITS and sizes[output] == 0:
                break  # dead, and what follows constant because of it
            if units[output] < _UNITS or not sizes[output] > 0:
                continue
            if counts[output] < FEW_SAMPLES * units[output]:  # an expert that few tokens reach
                continue
            share = variation / sizes[output]
            highest = self._highest[output] = max(share, self._highest.get(output, 0.0))
            if share <= self.share and highest >= _VARIES:
                collapsed.append((output, share))
        if (found := _alike(record)) is not None or not collapsed or baseline.age < LATEST:
            return found
        output, share = collapsed[0]
        others = f", and {len(collapsed) - 1} more behind it" if len(collapsed) > 1 else ""
        return Finding(
            summary=f"The output of {called(output.module_name)} is nearly the same for every "
            f"input: it varies by {share:.2g} of its size, once "
            f"{self._highest[output]:.2g}{others}",
            advice=(
                "Check what keeps different inputs apart: negative pairs, a stopped gradient, "
                "normalization over the batch; and weight decay and penalties.",
            ),
            value=share,
            threshold=self.share,
            module_name=output.module_name,
        )


def _alike(record: StepRecord) -> Finding | None:
    """The first layer whose units all have the same extremes, which are apart."""
    types = {module.name: module.type_name for module in record.layout.modules}
    rows = record.activations.rows
    for row, name in enumerate(record.activations):
        units = rows.units_of(row) if types[name] in AFFINE else None
        if units is None or len(units) < _UNITS:
            continue
        low, high = units.min(axis=0), units.max(axis=0)
        extent = high[1] - low[0]
        if extent > 0 and (high - low).max() <= _ROUNDING * extent:
            return Finding(
                summary=f"All {len(units)} units of {called(name)} return the same as each other: "
                "they have equal weights, get equal gradients, and never part",
                advice=(
                    "Initialize weights at random, as PyTorch does by default, not with a "
                    "constant.",
                ),
                value=0.0,
                threshold=_ROUNDING,
                module_name=name,
            )
    return None


_ROUNDING = 1e-4  # of their range
_HYSTERESIS = 3  # ratios vary that much from step to step
_UNITS = 8
_VARIES = 0.3
