"""Experts that a router no longer chooses."""

from __future__ import annotations

import numpy as np

from telemetry.alerts.baseline import Baseline, Figures
from telemetry.alerts.detector import EXPLOSIONS, RISEN_LOSSES, Detector, Finding
from telemetry.layers.units import ranges
from telemetry.plain_text import called
from telemetry.records import StepRecord


class ExpertCollapse(Detector):
    """Experts that had an even load or more get no tokens any more. A warning if they are half of
    the router's experts; also a note if half of all experts get none, whatever they had.

    Evidence: the router, its experts without tokens, and how many tokens even loads would give.
    Causes: load balancing that is missing, weak or of the wrong sign; a high rate of the router.
    Remedies: a balancing loss or bias, a lower learning rate of the router, noise in its logits.
    Silent: experts that are rare from the start, routers that are not recognized.
    Example: model.router.bias.data[0] += 100.0
    Args:
        tokens: Tokens that even loads would have given each of these experts meanwhile.
        share: Share of a router's experts.

    An expert has none if it gets at most 1 % of an even load. If it had a tenth of one, it would
    have none among 100 expected tokens in 5 of 100,000 cases.
    """

    kind = "expert_collapse"
    on = "full"
    severity = "note"
    confirm_after = 2
    clear_after = 3
    explained_by = EXPLOSIONS | RISEN_LOSSES | {"nonfinite", "weight_jump"}
    explained_by_rate_jump = True
    tokens = 100.0
    share = 0.5
    # For each router: expected tokens since an expert's last ones, and its highest share of an
    # even load, [2, experts].
    _seen: dict[str, Figures]

    def set_up(self) -> None:
        self._seen = {}

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self.needs_full_step = False
        findings: list[Finding] = []
        for name, load in record.expert_loads.items():
            even = load.sum() / len(load)
            seen = self._seen.get(name)
            if seen is None or seen.shape[1] != len(load):
                seen = np.zeros((2, len(load)))
            missed = np.where(load <= _NONE * even, seen[0] + even, 0.0)
            highest = np.maximum(seen[1], load / max(even, 1.0))
            self._seen[name] = np.stack([missed, highest])
            idle, had = missed >= self.tokens, highest >= _HAD
            are_half = idle.mean() >= self.share
            self.needs_full_step |= bool(
                not are_half and (had & (missed > 0)).mean() >= self.share and not self.active_alert
            )
            if are_half or (idle & had).any():
                chosen = idle if are_half else idle & had
                is_warning = bool((idle & had).mean() >= self.share)
                findings.append(
                    self._finding(name, chosen, float(missed[chosen].min()), is_warning)
                )
        return max(findings, key=lambda found: found.severity == "warning", default=None)

    def _finding(
        self, name: str, idle: np.ndarray[tuple[int], np.dtype[np.bool_]], missed: float, warn: bool
    ) -> Finding:
        active = self.active_alert
        return Finding(
            summary=f"{int(idle.sum())} of {len(idle)} experts of {called(name)} get no tokens: "
            f"{ranges(idle)}. Even loads would have given each {missed:,.0f}",
            advice=(
                "Check the sign and the weight of the balancing loss or bias",
                "Lower the learning rate of the router, or add noise to its logits",
            ),
            value=float(idle.mean()),
            threshold=self.share,
            module_name=name,
            severity="warning" if warn else "note",
            escalates=warn and active is not None and active.severity == "note",
        )


_NONE = 0.01  # of an even load
_HAD = 1.0  # of an even load
