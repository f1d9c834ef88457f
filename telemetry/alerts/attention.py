"""Attention that has gone wrong: it sees one token only, or its logits are beyond all use."""

from __future__ import annotations

import math
import re

import numpy as np

from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding
from telemetry.plain_text import called
from telemetry.records import Output, StepRecord, TensorRecord
from telemetry.records.buckets import edges


class AttentionCollapse(Detector):
    """A note when attention weights have hardly any entropy left.

    Each row of attention weights is a distribution over S tokens, with an entropy of 0 (one token)
    to ln S (all alike). Hardly any gradient gets through a softmax that is 0 or 1, and training
    becomes unstable (Zhai et al. 2023, "Stabilizing Transformer Training by Preventing Attention
    Entropy Collapse"). It is a note because sharp attention may also be what was to be learned.

    Entropy and S follow from the histogram of the weights alone, because each row adds up to 1: the
    sum of all weights is the number of rows. Attention weights are outputs between 0 and 1 of
    modules with "attention" or "attn" in their names: a softmax module, or what attention returns
    behind its first output.

    Args:
        fraction: Of ln S, the mean over all rows and heads.
    """

    kind = "attention_collapse"
    on = "full"
    severity = "note"
    clear_after = 2
    explained_by = frozenset({"logit_growth"})
    # attention_one_hot and logits_grow (benchmarks/runs) have 0.01 to 0.04, their healthy twin
    # 0.97; at 0.1 a token sees 1.3 of 24 others.
    fraction = 0.1

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        entropies = _entropies(record)
        low = {output: share for output, share in entropies.items() if share < self.fraction}
        if not low:
            return None
        worst = min(low, key=lambda output: low[output])
        return Finding(
            summary=f"The attention weights of {called(str(worst))} have {low[worst]:.1%} of the "
            "entropy of even ones, so each token sees hardly more than one; the same holds for "
            f"{len(low)} of {len(entropies)} layers",
            advice=(
                "If the loss is not as low as it should be, normalize queries and keys, scale "
                "the logits by 1 / sqrt(d), and lower the learning rate or warm it up.",
            ),
            value=low[worst],
            threshold=self.fraction,
            module_name=worst.module_name,
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return not _entropies(record)


def _entropies(record: StepRecord) -> dict[Output, float]:
    """Of the attention weights that a step has."""
    layout, entropies = record.layout, {}
    for output in record.outputs:
        if _ATTENTION.search(output.module_name):
            module = layout.modules[layout.position[output.module_name]]
            if module.type_name.startswith("Softmax") or output.place > 0:
                entropies[output] = _entropy(record.outputs[output])
    return {output: entropy for output, entropy in entropies.items() if entropy is not None}


def _entropy(weights: TensorRecord) -> float | None:
    """Mean entropy of a row over ln S; None if these are no attention weights."""
    sketch = weights.sketch
    total = sketch.mean * sketch.finite_count
    if not (sketch.min >= 0 and sketch.max <= 1 + 1e-3 and total > 0) or sketch.mean > 0.5:
        return None  # a row of two tokens or fewer says nothing
    limits, buckets = edges(), np.abs(sketch.buckets)
    p = np.clip((limits[buckets] + limits[buckets + 1]) / 2, 0.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = np.where(p > 0, -p * np.log(p), 0.0)
    entropy = float(surprise @ sketch.counts) / total
    return entropy / -math.log(sketch.mean)


_ATTENTION = re.compile("attention|attn", re.IGNORECASE)


class LogitGrowth(Detector):
    """A note when attention logits that a module returns are very large.

    Softmax then returns 0 and 1 alone, and no gradient. All models in Wortsman et al. 2023,
    "Small-scale proxies for large-scale Transformer training instabilities" (section 3.3), whose
    largest attention logit exceeded 10,000 early in training diverged; where it was forced to some
    value, the loss was worse from 1,000 on.

    Only modules with "attention" or "attn" in their names whose last part has "logit" or "score"
    are looked at: what is computed inside of a function is not seen.

    Args:
        largest: Magnitude of the largest logit.
    """

    kind = "logit_growth"
    on = "full"
    severity = "note"
    clear_after = 2
    largest = 1e4

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        ran = ((name, output.sketch) for name, output in record.activations.items())
        found = [(max(-s.min, s.max), name) for name, s in ran if _LOGITS.search(name)]
        largest, name = max(found, default=(0.0, ""))
        if not largest > self.largest:
            return None
        return Finding(
            summary=f"The largest attention logit of {called(name)} is {largest:.3g}",
            advice=(
                "People usually normalize queries and keys, and lower the learning rate or warm "
                "it up.",
            ),
            value=largest,
            threshold=self.largest,
            module_name=name,
        )


# A masked logit of minus infinity is not finite, and counts in neither extreme.
_LOGITS = re.compile(r"(attention|attn).*(logit|score)[^.]*$", re.IGNORECASE)
