"""Attention that collapses, and logits that grow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from telemetry.alerts.outputs import AttentionCollapse, LogitGrowth, _entropy
from telemetry.records import AttentionHeads, StepRecord
from telemetry.testing import alerts_of, capture_run
from tests.helpers.small_records import full_record
from tests.helpers.small_runs import train


class Net(nn.Module):
    """One layer of attention over eight tokens."""

    def __init__(self, scale: float, name: str = "attention") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.query, self.key = nn.Linear(1, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale, self.name = scale, name
        self.add_module(name, nn.Softmax(-1))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[..., None])
        weights = getattr(self, self.name)(self.scale * self.query(h) @ self.key(h).mT)
        logits: Tensor = self.head((weights @ h).mean(1))
        return logits


def test_attention_to_a_single_token_is_noted_once() -> None:
    [alert] = train(AttentionCollapse(), 30, model=Net(1000.0))
    assert (alert.severity, alert.module_name) == ("note", "attention")
    assert alert.value < 0.1


@pytest.mark.parametrize("model", [Net(0.25), Net(1000.0, name="gate")])
def test_even_attention_and_other_softmaxes_are_not_noted(model: nn.Module) -> None:
    assert train(AttentionCollapse(), 30, model=model) == []


@pytest.mark.parametrize("scale", [0.0, 1.0, 20.0])
def test_the_entropy_of_a_histogram_is_that_of_the_rows(scale: float) -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Softmax(-1))
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with capture_run(model, rules=[]) as run:
        model(scale * torch.randn(64, 12)).square().sum().backward()
        optimizer.step()
    [rows] = seen
    exact = torch.special.entr(rows.double()).sum(-1).mean().item() / math.log(12)
    assert _entropy(run.records[0].outputs["1", 0]) == pytest.approx(exact, abs=0.02)  # type: ignore[index]


class Scores(nn.Module):
    """Attention logits with the future masked."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT
        return scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1) > 0, -float("inf"))


class ScoringNet(nn.Module):
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
def test_only_very_large_attention_scores_are_noted(scale: float, count: int) -> None:
    alerts = train(LogitGrowth(), 20, model=ScoringNet(scale))
    assert [(alert.severity, alert.stage) for alert in alerts] == [("note", "started")] * count


# --- heads of scaled_dot_product_attention --------------------------------------------------------


def with_heads(logits: list[float], entropies: list[float]) -> list[StepRecord]:
    """Return steps of which two modules have attention, the first with usual heads."""
    usual = AttentionHeads(np.full(2, 5.0), np.full(2, 0.7))
    heads = AttentionHeads(np.array(logits), np.array(entropies))
    attention = {"layer1": usual, "layer2": heads}
    return [full_record(step, attention=attention) for step in range(3)]


@pytest.mark.parametrize(
    ("logits", "entropies", "head", "value"),
    [
        ([80.0, 5.0], [0.04, 0.6], 0, 0.04),
        ([300.0, 300.0], [0.05, 0.02], 1, 0.02),
        ([math.nan, 60.0], [math.nan, 0.09], 1, 0.09),
    ],
)
def test_a_head_that_attends_to_single_tokens_is_named(
    logits: list[float], entropies: list[float], head: int, value: float
) -> None:
    [alert] = alerts_of(with_heads(logits, entropies), [AttentionCollapse()])
    assert (alert.severity, alert.module_name, alert.value) == ("note", "layer2", value)
    assert f"head {head} of layer2" in alert.summary


@pytest.mark.parametrize(
    ("logits", "entropies"),
    [
        ([40.0, 5.0], [0.01, 0.6]),  # learned: its logits are usual
        ([400.0, 5.0], [0.3, 0.6]),
        ([math.nan, math.nan], [math.nan, math.nan]),
    ],
)
def test_heads_with_usual_logits_or_spread_weights_are_not_noted(
    logits: list[float], entropies: list[float]
) -> None:
    assert alerts_of(with_heads(logits, entropies), [AttentionCollapse(), LogitGrowth()]) == []


def test_a_head_with_very_large_logits_is_named() -> None:
    [alert] = alerts_of(with_heads([900.0, 1100.0], [0.5, 0.5]), [LogitGrowth()])
    assert (alert.module_name, alert.value, alert.threshold) == ("layer2", 1100.0, 1000.0)
    assert "head 1 of layer2" in alert.summary


def test_growth_of_logits_explains_the_collapse() -> None:
    records = with_heads([2000.0, 1100.0], [0.01, 0.0])
    started = [a.kind for a in alerts_of(records) if a.stage == "started"]
    assert "logit_growth" in started
    assert "attention_collapse" not in started
