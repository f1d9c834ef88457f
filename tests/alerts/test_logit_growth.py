from __future__ import annotations

import pytest
from small_runs import train
from torch import Tensor, nn

from telemetry.alerts.logit_growth import LogitGrowth


class Scores(nn.Module):
    """Of each token with each other; the future is masked."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT
        return scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1) > 0, -float("inf"))


class Net(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.query, self.key, self.scale = nn.Linear(1, 16), nn.Linear(1, 16), scale
        self.attn = nn.ModuleDict({"scores": Scores()})
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., None]
        weights = self.attn["scores"](self.scale * self.query(tokens), self.key(tokens)).softmax(-1)
        logits: Tensor = self.head((weights @ tokens)[..., 0])
        return logits


@pytest.mark.parametrize(("scale", "count"), [(0.25, 0), (1e5, 1)])
def test_very_large_scores_of_attention_are_noted(scale: float, count: int) -> None:
    alerts = train(LogitGrowth(), 20, model=Net(scale))
    assert [(alert.severity, alert.stage) for alert in alerts] == [("note", "begin")] * count
