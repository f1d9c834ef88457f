"""Outputs that collapse: attention, experts, one vector."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline, Figures
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.layers.module_types import AFFINE
from telemetry.layers.units import ranges
from telemetry.plain_text import called, figure
from telemetry.records import Output, StepRecord, TensorRecord
from telemetry.records.buckets import edges
from telemetry.records.moments import rms_of
from telemetry.records.tensor import Tensors


class AttentionCollapse(Detector):
    """Attention weights have less than a tenth of the entropy of uniform ones. Training becomes
    unstable, unless the task needs sharp attention.

    Evidence: the module, the head in a fused kernel, its entropy, how many heads or layers have it.
    Causes: logits that are too large, or a task with sharp attention.
    Remedies: normalize queries and keys, lower the learning rate.
    Silent: compiled attention such as ``flex_attention``; softmax modules not named like ``attn``.

    Source: Zhai et al. 2023 (https://arxiv.org/abs/2303.06296). Inside of
    ``scaled_dot_product_attention``, each head is judged. Elsewhere weights are outputs between 0
    and 1 of softmax modules, or second and later outputs of attention modules, over all heads:
    entropy and S follow from their histogram, because each row adds up to 1.
    """

    kind = "attention_collapse"
    statistic = "attention_entropy"
    on = "full"
    severity = "note"
    clear_after = shared.AGAIN
    # attention_one_hot and logits_grow (benchmarks/runs) have 0.01 to 0.04, their healthy twin
    # 0.97; at 0.1 a token sees 1.3 of 24 others.
    fraction: float = limit(
        shared.FEW, "Mean entropy of all rows, as a share of ln S for S tokens."
    )
    # Heads of fused_queries_too_large and its siblings have logits of 80 to 400 and an entropy of
    # 0 to 0.07; those of their healthy twins 14 at most, and 0.29.
    logit: float = limit(
        50.0,
        "Largest logit of a head inside of ``scaled_dot_product_attention``. A head with "
        "lower ones may have learned to attend to one token, such as the first.",
    )

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        shares = [*_entropies(record)]
        for name, heads in record.attention.items():
            for head, (logit, share) in enumerate(zip(heads.logit_max, heads.entropy, strict=True)):
                what = f"head {head} of {called(name)}"
                shares.append((share if logit > self.logit else 1.0, what, name))
        low = [found for found in shares if found[0] < self.fraction]
        if not low:
            return None
        share, what, name = min(low)
        kind = "heads" if record.attention else "layers"
        return Finding(
            summary=f"The attention weights of {what} have {share:.1%} of the entropy of uniform "
            f"attention, as in {len(low)} of {len(shares)} {kind}",
            cause="Each token attends to hardly more than one other token",
            advice=(
                "Ignore it if the loss is as low as expected",
                "Normalize queries and keys, or scale the logits by 1 / sqrt(d)",
                shared.WARM_UP,
            ),
            value=float(share),
            threshold=self.fraction,
            module_name=name,
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return not (any(_entropies(record)) or record.attention)


def _entropies(record: StepRecord) -> Iterator[tuple[float, str, str]]:
    """Yield entropy, name and module of each output that holds attention weights."""
    for output in record.outputs:
        name = output.module_name
        module = record.layout.modules[record.layout.position[name]]
        is_softmax = module.type_name.startswith("Softmax") or output.place > 0
        may_be = is_softmax and _ATTENTION.search(name)
        if may_be and (entropy := _entropy(record.outputs[output])) is not None:
            yield entropy, called(str(output)), name


def _entropy(weights: TensorRecord) -> float | None:
    """Return the mean entropy of a row over ln S; None if these are no attention weights."""
    sketch = weights.sketch
    total = sketch.mean * sketch.finite_count
    if not (sketch.min >= 0 and sketch.max <= 1 + shared.TINY and total > 0) or sketch.mean > 0.5:
        return None  # rows of two tokens or fewer are not judged
    limits, buckets = edges(), np.abs(sketch.buckets)
    p = np.clip((limits[buckets] + limits[buckets + 1]) / 2, 0.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = np.where(p > 0, -p * np.log(p), 0.0)
    return float(surprise @ sketch.counts) / total / -math.log(sketch.mean)


_ATTENTION = re.compile("attention|attn", re.IGNORECASE)


class OutputCollapse(Detector):
    """Outputs of eight units or more, which once differed between inputs, are nearly one vector for
    all of them. Or all units of a layer return the same.

    Evidence: the module, and the rest of its variation.
    Causes: no term that keeps examples apart, strong weight decay, initialization with a constant.
    Remedies: negative pairs, a stopped gradient, batch statistics; random initialization.
    Silent: outputs that never differed or lie far from zero, single numbers, directions alone.
    Example: [nn.init.constant_(parameter, 0.01) for parameter in model.parameters()]

    Units that start with equal weights get equal gradients and stay equal.
    """

    kind = "output_collapse"
    statistic = "activation_std"
    on = "full"
    confirm_after = shared.AGAIN
    clear_after = shared.SEVERAL
    explained_by = shared.LOST | {"exponential_trend", "untrained_parameters", "loss_stuck"}
    # gpt_lr100, whose outputs have collapsed, has 0.005; healthy outputs have 0.1
    share: float = limit(
        0.02, "Variation within units over the RMS, at two consecutive full steps; 0.3 before."
    )
    _highest: dict[Output, float] = state(dict)
    _began: dict[Output, float] = state(dict)  # variation at the first full step

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        given = record.inputs.get("")
        if given is not None and not given.variation > 0:
            return None  # same_batch, or zeros
        outputs, rows = [*record.outputs], Tensors.of(record.outputs).rows
        sizes, counts, collapsed = rms_of(rows), rows.unit_count, []
        # A dead output makes all later ones constant. Few tokens reach some experts.
        are_wide = counts >= shared.FEW_SAMPLES
        are_wide &= ~np.logical_or.accumulate(are_wide & (sizes == 0))
        judged = are_wide & (sizes > 0) & (rows.count >= shared.FEW_SAMPLES * counts)
        for place in judged.nonzero()[0].tolist():
            output, variation = outputs[place], float(rows.variation[place])
            share = variation / float(sizes[place])
            highest = self._highest[output] = max(share, self._highest.get(output, 0.0))
            # Targets far from zero, such as temperatures in kelvin, leave it as it was.
            began = self._began.setdefault(output, variation)
            narrows = variation <= shared.FEW * began or share <= shared.EXACT
            if share <= self.share and highest >= _VARIES and narrows:
                collapsed.append((output, share))
        if (found := _alike(record)) is not None or not collapsed or baseline.age < shared.LATEST:
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
    layout, names, rows = record.layout, [*record.activations], record.activations.rows
    known = rows.unit_count.nonzero()[0]
    if not len(known):
        return None
    counts = rows.unit_count[known]
    starts = counts.cumsum() - counts
    low = np.minimum.reduceat(rows.units, starts)
    high = np.maximum.reduceat(rows.units, starts)
    extent = high[:, 1] - low[:, 0]
    are_alike = (counts >= shared.FEW_SAMPLES) & (extent > 0)
    are_alike &= np.maximum(*(high - low).T) <= shared.EXACT * extent
    for row in known[are_alike].tolist():
        name = names[row]
        if layout.modules[layout.position[name]].type_name in AFFINE:
            return Finding(
                summary=f"All {rows.unit_count[row]} units of {called(name)} return the same",
                cause="They have equal weights and get equal gradients",
                advice=("Initialize weights at random, not with a constant",),
                value=0.0,
                threshold=shared.EXACT,
                module_name=name,
            )
    return None


_VARIES = 0.3


class ExpertCollapse(Detector):
    """Experts that had an even load or more get no tokens any more. A warning if they are half of
    the router's experts; also a note if half of all experts get none, whatever they had.

    Evidence: the router, its experts without tokens, and how many tokens even loads would give.
    Causes: load balancing that is missing, weak or of the wrong sign; a high rate of the router.
    Remedies: a balancing loss or bias, a lower learning rate of the router, noise in its logits.
    Silent: experts that are rare from the start, routers that are not recognized.
    Example: model.router.bias.data[0] += 100.0

    An expert has none if it gets at most 1 % of an even load. If it had a tenth of one, it would
    have none among 100 expected tokens in 5 of 100,000 cases.
    """

    kind = "expert_collapse"
    statistic = "dead_experts"
    on = "full"
    severity = "note"
    confirm_after = shared.AGAIN
    clear_after = shared.SEVERAL
    explained_by = shared.DIVERGED | {"nonfinite", "weight_jump"}
    explained_by_rate_jump = True
    tokens: float = limit(
        100.0, "Tokens that even loads would have given each of these experts meanwhile."
    )
    share: float = limit(0.5, "Share of a router's experts.")
    # For each router: expected tokens since an expert's last ones, and its highest share of an
    # even load, [2, experts].
    _seen: dict[str, Figures] = state(dict)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self.needs_full_step, findings = False, list[Finding]()
        was_note = self.active_alert is not None and self.active_alert.severity == "note"
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
            might = not are_half and (had & (missed > 0)).mean() >= self.share
            self.needs_full_step |= bool(might and self.active_alert is None)
            chosen = idle if are_half else idle & had
            if not chosen.any():
                continue
            is_warning = bool((idle & had).mean() >= self.share)
            of_router = Finding(
                summary=f"{int(chosen.sum())} of {len(load)} experts of {called(name)} get no "
                f"tokens: {ranges(chosen)}. Even loads would have given each "
                f"{missed[chosen].min():,.0f}",
                advice=(
                    "Check the sign and the weight of the balancing loss or bias",
                    "Lower the learning rate of the router, or add noise to its logits",
                ),
                value=float(chosen.mean()),
                threshold=self.share,
                module_name=name,
                severity="warning" if is_warning else "note",
                escalates=is_warning and was_note,
            )
            findings.append(of_router)
        return max(findings, key=lambda found: found.severity == "warning", default=None)


_NONE = 0.01  # of an even load
_HAD = 1.0  # of an even load
