"""Parameters that no gradient reaches or no optimizer steps, unless that should be so."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from telemetry import Alert
from telemetry.testing import capture_run
from tests.helpers.applied import Applied
from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.small_runs import at_step, classify, fit, train


def vanished(model: nn.Module, steps: int = 60, **more: Any) -> list[Alert]:
    return train(rule("vanishing_gradient"), steps, model=model, **more)


Join = Callable[[Tensor, Tensor], Tensor]


def towers(join: Join, *, swap: bool = False, wide: int = 16) -> Any:
    """Return a tower for each half of the input, whose outputs are joined."""

    def apply(self: Any, x: Tensor) -> Any:
        parts = [(self.tower, x[:, :4]), (self.other, x[:, 4:])]
        outputs = {part: part(half) for part, half in (parts[::-1] if swap else parts)}
        return self.head(join(outputs[self.tower], outputs[self.other]))

    torch.manual_seed(0)
    tower, other = (
        nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 16)) for width in (wide, 16)
    )
    return Applied(apply, tower=tower, other=other, head=nn.Linear(32, 3))


def usual(tower: Tensor, other: Tensor) -> Tensor:
    return torch.cat([tower, other], 1).relu()


def detached(tower: Tensor, other: Tensor) -> Tensor:
    return usual(tower.detach(), other)


def times(*factors: float) -> Join:
    return lambda tower, other: usual(functools.reduce(operator.mul, factors, tower), other)


@pytest.mark.parametrize(
    ("join", "swap", "every", "step"),
    [
        (detached, False, 10, 21),  # at the second evaluation
        (detached, True, 10, 21),
        (times(0.0), False, 10, 21),
        (times(*[1e-4] * 12), False, 10, 21),
        (times(0.0), False, 1000, 23),  # before the next due step
    ],
)
def test_a_gradient_that_is_cut_off_or_underflows_has_vanished(
    join: Join, swap: bool, every: int, step: int
) -> None:
    [alert] = vanished(towers(join, swap=swap), every=every)
    assert (alert.module_name, alert.step) == ("tower.0", step)
    assert step + 1 in figures(alert.summary)
    assert "tower.0 to tower.2" in alert.summary


def frozen(model: Any) -> Any:
    model.tower.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "model",
    [
        towers(usual),
        frozen(towers(detached)),
        towers(times(0.0), swap=True),  # a term of the loss whose weight is zero
        towers(detached, swap=True, wide=2),  # an unused head
    ],
)
def test_gradients_that_should_be_zero_have_not_vanished(model: nn.Module) -> None:
    assert vanished(model) == []


def test_gradients_of_parameters_without_an_optimizer_have_not_vanished() -> None:
    model = towers(usual)
    rest = [*model.other.parameters(), *model.head.parameters()]
    assert vanished(model, optimizer=SGD(rest, 0.1)) == []


def test_a_generator_whose_critic_is_trained_alone_at_first_has_not_vanished() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    model = nn.ModuleList([nn.Linear(4, 2), critic])
    of_generator, of_critic = (SGD(part.parameters(), 0.01) for part in model)
    with capture_run(model, every_n_steps=10, rules=[rule("vanishing_gradient")]) as run:
        for step in range(80):
            made = model[0](torch.randn(32, 4))
            of_critic.zero_grad()
            real = (-critic(torch.randn(32, 2) + 1)).exp().mean()
            (critic(made.detach()).exp().mean() + real).backward()
            of_critic.step()
            if step >= 50:
                of_generator.zero_grad()
                (-critic(made)).exp().mean().backward()
                of_generator.step()
    assert run.alerts == []


def test_a_bias_before_batch_norm_has_no_vanishing_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model[0].weight.requires_grad_(False)
    assert vanished(model, every=1) == []


def scheduled(factor_at: Callable[[int], float], steps: int) -> list[Alert]:
    """Return the alerts of a run whose tower is multiplied by a factor of the step."""
    factors = map(factor_at, itertools.count())
    model = towers(lambda tower, other: usual(next(factors) * tower, other))
    return vanished(model, steps)


def test_gradients_that_are_zero_in_phases_have_not_vanished() -> None:
    assert scheduled(lambda step: float(step % 12 < 2), 100) == []


@pytest.mark.slow
def test_the_alert_resolves_when_gradients_return_and_not_when_they_become_zero() -> None:
    begin, end = scheduled(lambda step: 1e-7 if step < 40 else 0.0 if step < 120 else 1.0, 200)
    assert (begin.stage, end.stage) == ("started", "resolved")
    assert begin.step < 40
    assert end.step > 120
    assert figures(end.summary)[-1] == begin.step


def deep(*between: nn.Module) -> nn.Module:
    """Return 16 layers as PyTorch makes them, each of which halves gradients at least."""
    torch.manual_seed(0)
    hidden = [part for _ in range(16) for part in (nn.Linear(32, 32), *between, nn.ReLU())]
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), *hidden, nn.Linear(32, 3))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_vanishing_gradients_are_reported_though_adam_moves_every_layer(every: int) -> None:
    model, trains = deep(), deep(nn.LayerNorm(32))
    alert, *_ = vanished(model, 80, every=every, optimizer=Adam(model.parameters(), 1e-4))
    assert alert.module_name == "0"
    assert "loss has not fallen" in (alert.cause or "")
    assert vanished(trains, 80, every=every, optimizer=Adam(trains.parameters(), 1e-4)) == []


@pytest.mark.parametrize("rate", [0.0, 1e-7])
def test_a_learning_rate_of_zero_is_the_cause_of_a_missing_gradient(rate: float) -> None:
    """The second of two layers starts at 0, as in LoRA, and passes no gradient to the first."""
    model = towers(usual)
    up = model.tower[2].weight
    nn.init.zeros_(up)
    up.register_hook(lambda grad: grad * (rate == 0))  # at the other rate its gradient is zero
    moving = [*model.other.parameters(), *model.head.parameters()]
    groups = [{"params": moving}, {"params": model.tower.parameters(), "lr": rate}]
    [alert] = vanished(model, optimizer=SGD(groups, 0.1))
    assert alert.module_name == "tower.0"
    assert figures(alert.cause) == ([0] if rate == 0 else [])


def network(detached: bool = False, spare_every: int | None = None) -> Any:
    """Return a trunk, a used head, and perhaps a part that is used at some calls or never (0)."""
    calls = itertools.count(1)

    def apply(self: Any, x: Tensor) -> Any:
        h = self.trunk(x)
        logits: Tensor = self.head(h.detach() if detached else h)
        is_used = spare_every and next(calls) % spare_every == 0
        return logits + self.spare(x) if is_used else logits

    trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    more = {} if spare_every is None else {"spare": nn.Linear(8, 3)}
    return Applied(apply, trunk=trunk, head=nn.Linear(16, 3), **more)


def experts() -> nn.Module:
    """Return a trunk whose output one of three experts transforms; the last is never chosen."""
    chosen = itertools.cycle([0, 1])
    return Applied(
        lambda self, x: self.head(self.experts[next(chosen)](self.trunk(x))),
        trunk=nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)),
        head=nn.Linear(16, 3),
        experts=nn.ModuleList(nn.Linear(16, 16) for _ in range(3)),
    )


def untrained(
    model: nn.Module, *optimizer: Optimizer, steps: int = 150, **more: Any
) -> list[Alert]:
    settings = {"model": model, **({"optimizer": optimizer[0]} if optimizer else {}), **more}
    return train(rule("untrained_parameters"), steps, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_head_that_was_replaced_after_the_optimizer_was_made_is_reported(every: int) -> None:
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    model.head = nn.Linear(16, 3)
    [alert] = untrained(model, optimizer, every=every)
    assert (alert.severity, alert.module_name) == ("warning", "head")
    assert alert.step <= 100
    assert "no optimizer steps it" in alert.summary


def stack() -> nn.Module:
    """Return equal layers, of which the first two run detached."""

    def apply(self: Any, x: Tensor) -> Any:
        for i, layer in enumerate(self.layers):
            x = layer(x.detach() if i == 2 else x)
        return self.head(x)

    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    return Applied(apply, layers=layers, head=nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("make", "every", "severity", "module", "seen"),
    [
        *(
            (lambda: network(detached=True), every, "warning", "trunk", "got none in")
            for every in (1, 10, 100)
        ),
        (stack, 10, "warning", "layers.0", "layers.0, layers.1 ("),
        (lambda: network(spare_every=0), 10, "note", "spare", "spare"),  # small, and unused
    ],
)
def test_a_part_that_gets_no_gradient_is_named(
    make: Callable[[], nn.Module], every: int, severity: str, module: str, seen: str
) -> None:
    [alert] = untrained(make(), every=every)
    assert (alert.severity, alert.module_name) == (severity, module)
    assert seen in alert.summary


@pytest.mark.parametrize("model", [network(spare_every=40), experts()], ids=["rare", "expert"])
def test_a_part_that_is_rarely_trained_and_one_of_several_experts_are_not_reported(
    model: nn.Module,
) -> None:
    assert untrained(model) == []


def test_parameters_that_are_frozen_or_trained_by_another_optimizer_are_not_reported() -> None:
    model = network(spare_every=0)
    model.spare.requires_grad_(False)
    other, optimizer = SGD(model.trunk.parameters(), 0.01), SGD(model.head.parameters(), 0.1)
    assert untrained(model, optimizer, before=lambda n: n % 5 == 4 and other.step()) == []


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
def test_parameters_that_are_unfrozen_later_and_not_in_the_optimizer_are_reported(
    every: int,
) -> None:
    model = network()
    optimizer = SGD(model.head.parameters(), 0.1)
    model.trunk.requires_grad_(False)
    unfreeze = at_step(130, model.trunk.requires_grad_)
    [alert] = untrained(model, optimizer, steps=420, before=unfreeze, every=every)
    assert (alert.severity, alert.module_name) == ("warning", "trunk")
    assert 200 <= alert.step <= 310


@pytest.mark.slow
def test_parameters_that_an_optimizer_no_longer_steps_are_a_note() -> None:
    model = network()
    with capture_run(model, every_n_steps=10, rules=[rule("untrained_parameters")]) as run:
        fit(run, 120, lambda step: classify(model), SGD(model.parameters(), 0.1))
        assert run.alerts == []
        fit(run, 210, lambda step: classify(model), SGD(model.head.parameters(), 0.1))
    [alert] = run.alerts
    assert (alert.severity, alert.module_name) == ("note", "trunk")
    assert "no optimizer has stepped it for" in alert.summary


@pytest.mark.parametrize("every", [10, 100])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_layer_that_gets_zeros_from_a_function_has_dead_inputs(scale: float, every: int) -> None:
    model = Applied(
        lambda self, x: self.head((self.basis(scale * x) + 0.1).relu()),
        basis=nn.Linear(8, 16), head=nn.Linear(16, 3),
    )  # fmt: skip
    alerts = train(rule("dead_units"), 105, model=model, every=every)
    assert [(alert.module_name, alert.severity) for alert in alerts] == (
        [] if scale else [("basis", "warning")]
    )


@pytest.mark.parametrize(("clears_from", "expected"), [(0, []), (50, ["2"])])
def test_only_weights_that_had_a_gradient_before_lack_it(
    clears_from: int, expected: list[str]
) -> None:
    """Some layers get zeros on purpose, from the first step on."""
    step, hidden = iter(range(105)), nn.Linear(16, 16, bias=False)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), hidden, nn.Tanh(), nn.Linear(16, 3))
    hidden.weight.register_hook(lambda grad: grad * (next(step) < clears_from))
    alerts = train(rule("dead_units"), 105, model=model)
    assert [alert.module_name for alert in alerts] == expected
    assert all("exactly 0" in alert.summary for alert in alerts)
