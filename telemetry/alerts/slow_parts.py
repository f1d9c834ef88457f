"""Parts of a model that hardly learn, and outputs that no longer depend on the input."""

from __future__ import annotations

import numpy as np

from telemetry.alerts.baseline import FEW_SAMPLES, LATEST, RECENT, Baseline, Figures
from telemetry.alerts.detector import EXPLOSIONS, RISEN_LOSSES, Detector, Finding
from telemetry.layers.module_types import AFFINE
from telemetry.plain_text import called, called_all, figure
from telemetry.records import Output, StepRecord
from telemetry.records.moments import rms_of
from telemetry.records.tensor import Tensors

_INACTIVE = frozenset({"dead_units", "saturated_units", "vanishing_gradient", "nonfinite"})


class LayersNotLearning(Detector):
    """Weights with gradients move a thousand times less than others, for 100 steps.

    Evidence: the layers, and their update ratio compared with the largest.
    Causes: a learning rate that falls too fast from layer to layer, a parameter group with rate 0.
    Remedies: check the learning rates of the parameter groups.
    Silent: frozen layers, missing gradients, layers that move by a hundredth, as in fine-tuning.
    Example:
        groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
    Args:
        share: Update ratio over that of the fastest quarter of the weight matrices.
        steps: Steps over which three full steps show this.
    """

    kind = "layers_not_learning"
    on = "full"
    clear_after = 3
    explained_by = (
        _INACTIVE | EXPLOSIONS | {"no_learning", "output_collapse", "untrained_parameters"}
    )
    # Embeddings of rare words have 0.02, fine-tuning with a decay of 0.65 over 12 layers 0.006.
    share = 1e-3
    steps = 100
    full_steps_in_a_row = 2
    _names: tuple[str, ...] = ()
    _since: Figures
    _evaluations: Figures
    _is_left: bool = False

    def set_up(self) -> None:
        self._since, self._evaluations = np.zeros((2, 0))

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        layout = record.layout
        names = tuple(layout.matrices)
        if names != self._names:
            self._names, self._evaluations = names, np.zeros(len(names))
            self._since = np.zeros(len(names))
        ratios = np.array([record.update_ratios.get(name, np.nan) for name in names])
        moved = ratios[np.isfinite(ratios) & (ratios > 0)]
        if not moved.size:
            return None
        moved.sort()
        usual = float(np.interp(0.75 * (len(moved) - 1), np.arange(len(moved)), moved))
        norms = record.grad_norms[[*layout.matrices.values()]]
        limit = self.share * usual
        slow, learns = (ratios < limit) & (norms > 0), ratios >= limit
        self._is_left = bool(((ratios < _HYSTERESIS * limit) & (norms > 0)).any())
        self._since = np.where(slow & (self._evaluations == 0), record.step, self._since)
        self._evaluations = np.where(learns, 0, self._evaluations + slow)
        lasts = slow & (record.step - self._since >= self.steps)
        found = lasts & (self._evaluations >= 3)
        self.needs_full_step = bool((lasts & ~found).any())
        if not found.any():
            return None
        owner = {p.name: p.module_name for p in layout.parameters}
        layers = [owner[name] for name, is_slow in zip(names, found, strict=True) if is_slow]
        ratio = float(ratios[found].max())
        return Finding(
            summary=f"A step moves {called_all(layers, RECENT)} by {figure(ratio, 2)} of their "
            f"norm at most, and other layers by {figure(usual, 2)}",
            cause="They get gradients, so their learning rate or their precision is too low",
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
    """Outputs of eight units or more, which once differed between inputs, are nearly one vector for
    all of them. Or all units of a layer return the same.

    Evidence: the module, and the rest of its variation.
    Causes: no term that keeps examples apart, strong weight decay, initialization with a constant.
    Remedies: negative pairs, a stopped gradient, batch statistics; random initialization.
    Silent: outputs that never differed, single numbers.
    Example: [nn.init.constant_(parameter, 0.01) for parameter in model.parameters()]
    Args:
        share: Variation within units over the RMS, at two consecutive full steps; 0.3 before.

    Units that start with equal weights get equal gradients and stay equal.
    """

    kind = "output_collapse"
    on = "full"
    confirm_after = 2
    clear_after = 3
    explained_by = (
        _INACTIVE | EXPLOSIONS | RISEN_LOSSES | {"exponential_trend", "untrained_parameters"}
    )
    share = 0.02  # gpt_lr100, whose outputs have collapsed, has 0.005; healthy outputs have 0.1
    _highest: dict[Output, float]

    def set_up(self) -> None:
        self._highest = {}

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        outputs, rows = [*record.outputs], Tensors.of(record.outputs).rows
        sizes, counts, collapsed = rms_of(rows), rows.unit_count, []
        # A dead output makes all later ones constant. Few tokens reach some experts.
        are_wide = (counts >= _UNITS) & ~np.logical_or.accumulate((counts >= _UNITS) & (sizes == 0))
        judged = are_wide & (sizes > 0) & (rows.count >= FEW_SAMPLES * counts)
        for place in judged.nonzero()[0].tolist():
            output, share = outputs[place], float(rows.variation[place] / sizes[place])
            highest = self._highest[output] = max(share, self._highest.get(output, 0.0))
            if share <= self.share and highest >= _VARIES:
                collapsed.append((output, share))
        if (found := _alike(record)) is not None or not collapsed or baseline.age < LATEST:
            return found
        output, share = collapsed[0]
        others = f", as {len(collapsed) - 1} later outputs" if len(collapsed) > 1 else ""
        return Finding(
            summary=f"The output of {called(output.module_name)} varies by {figure(share, 2)} of "
            f"its size between inputs, once by {figure(self._highest[output], 2)}{others}",
            advice=(
                "Check what keeps inputs apart: negative pairs, a stopped gradient, batch norm",
                "Check weight decay and penalties",
            ),
            value=share,
            threshold=self.share,
            module_name=output.module_name,
        )


@np.errstate(invalid="ignore")  # of masks
def _alike(record: StepRecord) -> Finding | None:
    """Return the finding of the first layer whose units all have the same two extremes."""
    layout, activations = record.layout, record.activations
    rows, names = activations.rows, [*activations]
    known = rows.unit_count.nonzero()[0]
    if not len(known):
        return None
    counts = rows.unit_count[known]
    starts = counts.cumsum() - counts
    low = np.minimum.reduceat(rows.units, starts)
    high = np.maximum.reduceat(rows.units, starts)
    extent = high[:, 1] - low[:, 0]
    are_alike = (counts >= _UNITS) & (extent > 0)
    are_alike &= np.maximum(*(high - low).T) <= _ROUNDING * extent
    for row in known[are_alike].tolist():
        name = names[row]
        if layout.modules[layout.position[name]].type_name in AFFINE:
            return Finding(
                summary=f"All {rows.unit_count[row]} units of {called(name)} return the same",
                cause="They have equal weights and get equal gradients",
                advice=("Initialize weights at random, not with a constant",),
                value=0.0,
                threshold=_ROUNDING,
                module_name=name,
            )
    return None


_ROUNDING = 1e-4  # of their range
_HYSTERESIS = 3  # ratios vary that much from step to step
_UNITS = 8
_VARIES = 0.3
