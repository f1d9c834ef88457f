"""Numbers of a layer that spread so far that 8-bit floats lose most of them."""

from __future__ import annotations

import math

import numpy as np

from telemetry.alerts.baseline import Baseline, Figures
from telemetry.alerts.detector import EXPLOSIONS, INACTIVE, RISEN_LOSSES, Detector, Finding
from telemetry.alerts.window import LATEST
from telemetry.layers import table
from telemetry.plain_text import called, figure
from telemetry.records import StepRecord

_UNDERFLOW = {"fp8_underflow": "activations", "weight_fp8_underflow": "weights"}


class LowPrecision(Detector):
    """Activations or weights of a layer spread so far that 8-bit floats (e4m3) round many to zero.
    Or one unit is far larger than the median unit. Neither was so in the first steps.

    Evidence: the layer, the share or the ratio, and its highest value in the first steps.
    Causes: a unit or a weight that grows without bound, such as a massive activation.
    Remedies: scale blocks instead of whole tensors, keep the layer in bfloat16, normalize.
    Silent: gradients, whose range widens as a model converges; layers without parameters.
    Example: layer.bias.data[0] += 1e7
    Args:
        share: Share of the activations or weights that round to zero; a tenth of it at first.
        outlier_ratio: Largest magnitude of a unit over the median unit's; a tenth of it at first.

    Sources: Dettmers et al. 2022 (https://arxiv.org/abs/2208.07339) and Sun et al. 2024
    (https://arxiv.org/abs/2402.17762) on single large units of language models.
    """

    kind = "low_precision"
    on = "full"
    severity = "note"
    confirm_after = 2
    clear_after = 3
    explained_by = (
        INACTIVE
        | EXPLOSIONS
        | RISEN_LOSSES
        | {"exponential_trend", "weight_jump", "output_collapse", "no_learning"}
    )
    # No layer with parameters in 202 healthy recordings reaches a quarter of these limits.
    share = 0.1
    outlier_ratio = 100.0
    _names: tuple[str, ...] = ()
    _highest: Figures  # in the first steps, [statistics, modules]
    _seen: int = 0

    def set_up(self) -> None:
        self._highest = np.full((len(_UNDERFLOW) + 1, 0), -math.inf)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        names = tuple(record.layout.position)
        if names != self._names:
            self._names, self._seen = names, 0
            self._highest = np.full((len(_UNDERFLOW) + 1, len(names)), -math.inf)
        measured, owning = table(record), record.layout.owning
        values = np.full(self._highest.shape, np.nan)
        for row, name in enumerate((*_UNDERFLOW, "outlier_ratio")):
            values[row, owning] = measured.column(name)[owning]
        values[-1, measured.outputs.rows.unit_count < _FEWEST_UNITS] = np.nan
        if self._seen < _FEWEST_STEPS or baseline.age < LATEST:
            self._seen += 1
            self._highest = np.fmax(self._highest, values)
            return None
        limits = np.array([*[self.share] * len(_UNDERFLOW), self.outlier_ratio])[:, None]
        was_low = (self._highest >= 0) & (values >= _TIMES * self._highest)
        exceeds = was_low & (values >= limits)
        found = np.flatnonzero(exceeds.any(axis=0))
        if not len(found):
            return None
        place = int(found[0])
        row = int(exceeds[:, place].argmax())
        value, highest = float(values[row, place]), float(self._highest[row, place])
        return Finding(
            summary=_summary(row, names[place], value, highest),
            cause="Single values are far larger than the others",
            advice=(
                "Ignore it unless you train or deploy in 8 bits",
                "Scale blocks of the tensor, or keep this layer in bfloat16",
            ),
            value=value,
            threshold=float(limits[row, 0]),
            module_name=names[place],
        )


def _summary(row: int, name: str, value: float, highest: float) -> str:
    if row < len(_UNDERFLOW):
        what = [*_UNDERFLOW.values()][row]
        before = f"at most {max(highest, 0.0):.1%} in the first steps"
        return f"8-bit floats round {value:.0%} of the {what} of {called(name)} to zero, {before}"
    return (
        f"One unit of {called(name)} is {figure(value, 2)}x the median unit, "
        f"at most {figure(max(highest, 0.0), 2)}x in the first steps"
    )


_TIMES = 10.0
_FEWEST_UNITS = 8
_FEWEST_STEPS = 3
