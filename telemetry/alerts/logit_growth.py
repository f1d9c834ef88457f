"""Attention logits that have grown beyond all use."""

from __future__ import annotations

import re
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.episode import Episode
from telemetry.plain_text import called
from telemetry.records import StepRecord
from telemetry.rule import Rule


class LogitGrowth(Rule):
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

    name = "logit_growth"
    _episode: Episode

    def __init__(self, *, largest: float = 1e4) -> None:
        self._largest = largest
        self._episode = Episode(2)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if not record.outputs:
            return ()
        found = {
            name: max(-tensor.sketch.min, tensor.sketch.max)
            for name, tensor in record.activations.items()
            if _LOGITS.search(name)
        }
        name = max(found, key=lambda name: found[name], default="")
        high = found.get(name, 0.0) > self._largest
        alert = self._alert(record, name, found[name]) if high else None
        return self._episode.update(record.step, alert)

    def _alert(self, record: StepRecord, name: str, value: float) -> Alert:
        return Alert(
            kind=self.name,
            severity="note",
            step=record.step,
            module_name=name,
            value=value,
            threshold=self._largest,
            message=(
                f"The largest attention logit of {called(name)} is {value:.3g}.\n"
                "People usually normalize queries and keys, and lower the learning rate or warm it "
                "up."
            ),
        )


# A masked logit of minus infinity is not finite, and counts in neither extreme.
_LOGITS = re.compile(r"(attention|attn).*(logit|score)[^.]*$", re.IGNORECASE)
