"""Outputs that collapse or spread: attention, its logits, experts, inactive units, classifiers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from telemetry import Alert, Detector, StepRecord
from telemetry.testing import alerts_of
from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.small_records import full_record, heads
from tests.helpers.small_runs import EndsWith, at_step, captured, classify, draw, net, toward, train

# --- attention of modules ------------------------------------------------------------------------


class Scores(nn.Module):
    """Attention logits with the future masked."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT
        return scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1) > 0, -float("inf"))


class Attends(nn.Module):
    """One layer of attention over eight tokens."""

    def __init__(self, scale: float, name: str = "attn") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.query, self.key = nn.Linear(1, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale, self.name = scale, name
        self.add_module(name, nn.ModuleDict({"scores": Scores(), "weights": nn.Softmax(-1)}))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[..., None])
        attention = getattr(self, self.name)
        scores = attention["scores"](self.scale * self.query(h), self.key(h))
        logits: Tensor = self.head((attention["weights"](scores) @ h).mean(1))
        return logits


@pytest.mark.parametrize("scale", [1.0, 20.0, 1000.0])
def test_attention_is_judged_by_the_entropy_of_its_rows(scale: float) -> None:
    model, rows = Attends(scale), list[Tensor]()
    model.attn["weights"].register_forward_hook(lambda *call: rows.append(call[2].detach()))
    [alert] = train(rule("attention_collapse", fraction=1.0), 30, model=model)
    exact = torch.special.entr(rows[0].double()).sum(-1).mean().item() / math.log(8)
    assert (alert.severity, alert.module_name) == ("note", "attn.weights")
    assert alert.value == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize(
    ("scale", "name", "kinds"),
    [
        (0.25, "attn", []),
        (20.0, "attn", ["attention_collapse"]),
        (1e6, "attn", ["attention_collapse"]),
        (1e6, "gate", []),
    ],
)
def test_attention_to_single_tokens_is_noted_once(
    scale: float, name: str, kinds: list[str]
) -> None:
    alerts = train(rule("attention_collapse"), 20, model=Attends(scale, name))
    assert [(alert.kind, alert.severity, alert.stage) for alert in alerts] == [
        (kind, "note", "started") for kind in kinds
    ]


# --- heads of scaled_dot_product_attention -------------------------------------------------------


def with_heads(logits: list[float], entropies: list[float]) -> list[StepRecord]:
    """Return steps of which two modules have attention, the first with usual heads."""
    attention = {"layer1": heads([5.0] * 2, [0.7] * 2), "layer2": heads(logits, entropies)}
    return [full_record(step, attention=attention) for step in range(3)]


@pytest.mark.parametrize(
    ("logits", "entropies", "kind", "head", "value"),
    [
        ([80.0, 5.0], [0.04, 0.6], "attention_collapse", 0, 0.04),
        ([300.0, 300.0], [0.05, 0.02], "attention_collapse", 1, 0.02),
        ([math.nan, 60.0], [math.nan, 0.09], "attention_collapse", 1, 0.09),
        ([40.0, 5.0], [0.01, 0.6], None, 0, 0.0),  # learned: its logits are usual
        ([400.0, 5.0], [0.3, 0.6], None, 0, 0.0),
        ([math.nan, math.nan], [math.nan, math.nan], None, 0, 0.0),
    ],
)
def test_heads_with_large_logits_that_attend_to_single_tokens_are_named(
    logits: list[float], entropies: list[float], kind: str | None, head: int, value: float
) -> None:
    alerts = alerts_of(with_heads(logits, entropies), [rule("attention_collapse")])
    assert [(a.kind, a.severity, a.module_name, a.value) for a in alerts] == [
        (kind, "note", "layer2", value)
    ] * (kind is not None)
    assert all(f"head {head} of layer2" in alert.summary for alert in alerts)


# --- experts -------------------------------------------------------------------------------------

EVEN, ONE = [40, 40, 40, 40], [160, 0, 0, 0]


def judged(loads: Sequence[Sequence[int]], detector: Detector | None = None) -> list[Alert]:
    known = [{"router": np.array(load)} for load in loads]
    records = [full_record(step, expert_loads=load) for step, load in enumerate(known)]
    return alerts_of(records, [detector or rule("expert_collapse")])


@pytest.mark.parametrize(
    ("load", "severity", "share"),
    [([80, 80, 0, 0], "warning", 0.5), (ONE, "warning", 0.75), ([60, 50, 50, 0], "note", 0.25)],
)
def test_experts_that_lose_their_tokens_are_named_until_they_are_chosen_again(
    load: list[int], severity: str, share: float
) -> None:
    alert, end = judged([EVEN] * 3 + [load] * 6 + [EVEN] * 30)
    assert (alert.severity, alert.module_name, alert.value) == (severity, "router", share)
    assert alert.step == 6  # 120 expected tokens at step 5, confirmed by the next one
    idle = [expert for expert, tokens in enumerate(load) if not tokens]
    assert str(idle[-1]) in alert.summary
    assert end.stage == "resolved"


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([ONE] * 6, [("note", 0.75)]),  # from the start
        ([[100] * 4] + [[398, 1, 0, 1]] * 4, [("warning", 0.75)]),
        ([[100] * 4] + [[196, 100, 102, 2]] * 9, []),  # 2 % of an even load
    ],
)
def test_a_few_tokens_of_an_expert_count_as_none(
    loads: list[list[int]], expected: list[tuple[str, float]]
) -> None:
    assert [(alert.severity, alert.value) for alert in judged(loads)] == expected


def test_experts_that_few_tokens_miss_by_chance_are_not_reported() -> None:
    draw = np.random.default_rng(0)
    uneven = np.array([0.3, 0.2, 0.15, 0.15, 0.1, 0.05, 0.03, 0.02])
    assert judged(draw.multinomial(16, uneven, size=400).tolist()) == []
    assert judged(draw.multinomial(4, np.full(8, 1 / 8), size=400).tolist()) == []


def test_a_collapse_requests_full_steps_and_its_state_survives_a_checkpoint() -> None:
    before, after = rule("expert_collapse"), rule("expert_collapse")
    judged([EVEN] * 3, before)
    assert not before.requests_full_step
    judged([ONE] * 2, before)
    assert before.requests_full_step
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert len(judged([ONE] * 3, after)) == 1


# --- dead and saturated units ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("gradient_is_left", [False, True])
def test_dead_units_escalate_to_an_error(gradient_is_left: bool) -> None:
    model = net()
    _, bias, *head = model.parameters()

    def silence(step: int) -> None:
        if step == 150:
            bias.data[1:] = -999.0
        elif step == 160:
            bias.data[0] = -999.0
            for parameter in head:
                parameter.requires_grad_(gradient_is_left)

    sgd = partial(SGD, lr=0.1)
    found = train(rule("dead_units"), 200, model=model, optimizer=sgd, before=silence, every=1)
    assert [(a.severity, a.stage, a.module_name, a.observed_in) for a in found] == [
        ("warning", "started", "0", "1"),
        ("error", "escalated", "0", "1"),
    ]
    assert figures(found[0].summary)[:2] == [31, 32]
    last = found[-1]
    if gradient_is_left:
        assert (last.step, last.value, figures(last.summary)[:4]) == (161, 1, [32, 32, 0, 2])
    else:  # at once, though one unit is alive
        assert (last.step, last.value) == (160, 31 / 32)


def stages(
    kind: str, activation: nn.Module, bias: float, count: Callable[[int], int]
) -> list[tuple[str, int]]:
    """Return the stages of alerts on ``count(step)`` of 32 units with this bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), activation, nn.Linear(32, 3))

    def set_biases(step: int) -> None:
        model[0].bias.data[:] = torch.where(torch.arange(32) < count(step), bias, 0.1)

    alerts = train(rule(kind), 200, model=model, before=set_biases)
    return [(alert.stage, alert.step) for alert in alerts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (lambda step: 29 if 30 <= step < 70 else 26, []),
        (lambda step: 29 if step >= 30 else 26, [("started", 80)]),
        (lambda step: 31 if step >= 31 else 26, [("started", 44)]),  # a full step is requested
        (lambda step: 31 if step % 40 < 20 else 26, [("started", 4)]),
        (lambda step: 31 if step < 100 else 26 if step < 150 else 20,
         [("started", 4), ("resolved", 170)]),
    ],
)  # fmt: skip
def test_dead_units_near_the_limit_start_and_resolve_one_alert(
    count: Callable[[int], int], expected: list[tuple[str, int]]
) -> None:
    assert stages("dead_units", nn.ReLU(), -50.0, count) == expected


def test_saturated_units_near_the_limit_start_and_resolve_one_alert() -> None:
    def count(step: int) -> int:
        return (30 if step % 40 < 20 else 22) if step < 130 else 4

    (stage, _), end = stages("saturated_units", nn.Tanh(), 9.0, count)
    assert (stage, end) == ("started", ("resolved", 150))


def test_the_advice_fits_a_saturated_function_and_a_dropout() -> None:
    torch.manual_seed(0)
    first = nn.Linear(8, 32)
    first.weight.data *= 1000.0
    model = nn.Sequential(EndsWith(torch.tanh, first), nn.Linear(32, 3))
    [alert] = train(rule("saturated_units"), 60, model=model)
    assert alert.module_name == "0.0"
    assert "initial weights of 0.0" in (alert.cause or "")
    assert any("queries and keys" in phrase for phrase in alert.advice)
    dropped = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.9999), nn.Linear(32, 3))
    [alert, *_] = train(rule("dead_units"), 60, model=dropped)
    assert alert.module_name == "2"
    assert "dropout" in alert.advice[0]
    nn.init.constant_(dropped[0].bias[:28], -100.0)  # type: ignore[union-attr, index, arg-type]
    [alert, *_] = train(rule("dead_units"), 60, model=dropped)
    assert (alert.module_name, "dropout" in alert.advice[0]) == ("2", False)


# --- equal outputs, and losses that fall while outputs grow --------------------------------------


def mlp(outputs: int, *end: nn.Module, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), activation(), nn.Linear(32, outputs), *end)


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
@pytest.mark.parametrize("left", [0.0, 0.3])
def test_an_output_that_becomes_one_vector_is_named(left: float, every: int) -> None:
    model = mlp(16, nn.Linear(16, 3))
    layer = model[2]
    collapse = at_step(150, lambda: (layer.weight.data.mul_(left), layer.bias.data.fill_(1.0)))
    settings = {"model": model, "optimizer": SGD(model.parameters(), 1e-5), "before": collapse}
    alerts = train(rule("output_collapse"), 320, every=every, **settings)
    named = [alert.module_name for alert in alerts if alert.stage == "started"]
    assert named == ([] if left else ["2"])
    assert all(alert.value < alert.threshold for alert in alerts)


@pytest.mark.parametrize(
    ("outputs", "offset", "rate", "steps"), [(1, 100, 3e-2, 200), (8, 290, 0.05, 800)]
)
def test_outputs_far_from_zero_have_not_collapsed(
    outputs: int, offset: float, rate: float, steps: int
) -> None:
    model = mlp(outputs)
    loss_of = toward(model, lambda x: offset + x[:, :outputs])
    optimizer = Adam(model.parameters(), rate)
    settings = {"loss_of": loss_of, "optimizer": optimizer, "every": 5}
    assert captured(model, steps, rules=["output_collapse"], **settings).alerts == []


def test_equal_inputs_are_no_collapse_of_the_outputs() -> None:
    model = mlp(8)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, 8) if step < 60 else torch.zeros(64, 8)
        return F.mse_loss(model(x), x)

    settings = {"loss_of": loss_of, "optimizer": SGD(model.parameters(), 0.05), "every": 1}
    assert captured(model, 90, rules=["output_collapse"], **settings).alerts == []


def constant(weight: float) -> nn.Module:
    model = mlp(32, nn.Tanh(), nn.Linear(32, 3), activation=nn.Tanh)
    for parameter in model.parameters():
        nn.init.constant_(parameter, weight)
    return model


@pytest.mark.parametrize("every", [1, 10, 100])
def test_units_that_start_equal_and_stay_equal_are_reported(every: int) -> None:
    (alert,) = train(rule("output_collapse"), 40, model=constant(0.02), every=every)
    assert (alert.step < 20, alert.module_name) == (True, "0")
    assert 32 in figures(alert.summary)


def test_units_that_are_zero_or_differ_are_not_reported() -> None:
    zero_head = mlp(16, nn.Linear(16, 3), activation=nn.Tanh)
    nn.init.zeros_(zero_head[2].weight)
    nn.init.constant_(zero_head[2].bias, 0.5)
    assert train(rule("output_collapse"), 40, model=zero_head, every=1) == []
    assert train(rule("output_collapse"), 3, model=constant(0.0), every=1) == []


def unbounded(steps: int, loss_of: Callable[[nn.Module], Tensor], rate: float, **more: Any) -> Any:
    model = net()
    settings = {"loss_of": lambda step: loss_of(model), "optimizer": Adam(model.parameters(), rate)}
    return captured(model, steps, rules=["unbounded_loss"], **settings, **more)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_cross_entropy_of_the_wrong_sign_is_reported_when_it_has_fallen_by_a_tenth(
    every: int,
) -> None:
    (alert,) = unbounded(200, lambda model: -classify(model), 1e-3, every=every).alerts
    assert alert.threshold == pytest.approx(-1.0986, abs=1e-4)  # -ln 3
    assert 1.099 in figures(alert.summary)
    assert alert.value > -1.5


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
def test_logits_in_place_of_log_probabilities_are_reported(every: int) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        points, classes = draw()
        return F.nll_loss(model(points), classes)

    (alert,) = unbounded(250, loss_of, 1e-2, every=every).alerts
    assert 3 in figures(alert.summary)  # the output that grows


@pytest.mark.slow
def test_a_density_is_not_a_loss_of_the_wrong_sign() -> None:
    def loss_of(model: nn.Module) -> Tensor:
        points, _ = draw()
        mean, log_scale, _ = model(points).T
        off = (0.1 * points[:, 0] - mean) * torch.exp(-log_scale)
        return (off**2 / 2 + log_scale).mean()

    run = unbounded(400, loss_of, 1e-3)
    assert run.alerts == []
    assert run.records[-1].loss < -1.5
