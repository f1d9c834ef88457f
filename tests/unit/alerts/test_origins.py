"""Origins of NaN and infinity, derived from the measurements of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from telemetry import Alert
from telemetry.alerts.nonfinite import Nonfinite
from telemetry.testing import capture_run
from tests.helpers.figures import figures
from tests.helpers.small_runs import Batch, draw, net, train

Step = Callable[[int], bool]


class Root(nn.Module):
    """Square root: its gradient is infinite at 0, and its value is NaN below."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Gate(nn.Module):
    """Layer whose output is scaled by a value that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.low = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x.square().clamp_min(1.0) * self.low


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Gate(), Root(), nn.Linear(16, 3))


def first(at: int, **faults: object) -> Alert:
    """Return the first alert of a run with a fault at one step; steps 0, 10, 20, ... are full."""
    return train(Nonfinite(), at + 1, **faults)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("at", "module", "seen"),
    [
        (10, "0", ", first in the inputs: 8 of 256 values of the batch, which reach module 0"),
        (13, None, ". It began in the inputs, the targets, the loss or a function: the step was"),
    ],
)
def test_nan_in_a_batch_is_attributed_to_the_inputs_at_a_full_step_only(
    at: int, module: str | None, seen: str
) -> None:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        points, classes = draw()
        points[5] = math.nan if step == at else points[5]
        return points, classes

    alert = first(at, batch=batch)
    assert (alert.step, alert.module_name) == (at, module)
    assert f"The loss is NaN at step {at}{seen}" in alert.summary


def test_nan_that_reaches_a_layer_from_a_function_is_attributed_to_the_function() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
            self.empty = False

        def forward(self, x: Tensor) -> Tensor:
            scores = self.score(x)
            if self.empty:
                scores = scores.masked_fill(torch.arange(len(x))[:, None] == 5, -math.inf)
            logits: Tensor = self.head(scores.softmax(1))
            return logits

    pooled = Pooled()

    def empty(step: int) -> None:
        pooled.empty = step == 10

    alert = first(10, model=pooled, before=empty)
    assert alert.module_name == "head"
    assert alert.summary.endswith("in the input of head, by a function after score")


@pytest.mark.parametrize(
    ("at", "seen"),
    [
        (10, ", first in the targets or the loss: all outputs are finite"),
        (13, ". It began in the inputs, the targets, the loss or a function: the step was not"),
    ],
)
def test_nan_in_the_loss_alone_is_attributed_to_no_module(at: int, seen: str) -> None:
    alert = first(at, weight=lambda step: math.nan if step == at else 1.0)
    assert (alert.step, alert.module_name) == (at, None)
    assert seen in alert.summary


def test_an_infinite_loss_is_not_attributed_to_a_bad_batch() -> None:
    alert = first(13, weight=lambda step: math.inf if step == 13 else 1.0)
    assert (alert.step, alert.module_name) == (13, None)
    assert alert.summary.startswith("The loss is infinite at step 13")
    assert "It began in the targets, the loss or a function" in alert.summary


@pytest.mark.parametrize(
    ("at", "low", "module", "seen"),
    [
        (10, -1.0, "2", "the forward pass, in the output of module 2"),
        (
            13,
            -1.0,
            None,
            "the inputs, the targets, the loss or a function, perhaps in module 1 or module 2",
        ),
        (10, 0.0, "2", "the backward pass of module 2"),
        (
            13,
            0.0,
            "0",
            "the backward pass, between module 3 and module 0, perhaps in module 1 or module 2",
        ),
    ],
)
def test_nan_is_attributed_to_the_forward_or_the_backward_pass(
    at: int, low: float, module: str | None, seen: str
) -> None:
    broken = model()

    def turn(step: int) -> None:
        broken[1].low = low if step == at else 1.0

    alert = first(at, model=broken, before=turn)
    assert (alert.step, alert.module_name) == (at, module)
    assert seen in alert.summary


class Scale(nn.Module):
    """Layer that divides its input by its norm, without an eps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True) * self.weight


@pytest.mark.parametrize(
    ("layers", "at", "module", "seen"),
    [
        ([Scale()], 13, "1",
         "the inputs, the targets, the loss or a function, perhaps in module 1: the"),
        ([nn.BatchNorm1d(16), Scale(), nn.Tanh(), nn.BatchNorm1d(16)], 13, "2",
         "the forward pass, before module 4, whose running statistics are NaN, and after module 1, "
         "whose are not, perhaps in module 2"),
        ([nn.Tanh(), nn.BatchNorm1d(16)], 13, "2",
         "the forward pass, before module 2, whose running statistics are NaN, or in the inputs "
         "(it"),
    ],
)  # fmt: skip
def test_nan_at_a_light_step_is_located_by_layers_and_running_statistics(
    layers: list[nn.Module], at: int, module: str, seen: str
) -> None:
    torch.manual_seed(0)
    broken = nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 3))
    suspect = next((layer for layer in layers if isinstance(layer, Scale)), broken[0])
    gate = torch.ones(())
    suspect.register_forward_pre_hook(lambda module, given: (given[0] * gate,))

    def close(step: int) -> None:
        value = 0.0 if isinstance(suspect, Scale) else math.nan
        gate.fill_(value if step == at else 1.0)

    alert = first(at, model=broken, before=close)
    assert (alert.step, alert.module_name) == (at, module)
    assert seen in alert.summary


def test_the_head_whose_term_of_the_loss_is_nan_is_named() -> None:
    torch.manual_seed(0)
    trunk, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 3)])
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    optimizer = Adam(model.parameters())
    with capture_run(model, every_n_steps=10, rules=[Nonfinite()]) as run:
        for step in range(14):
            points, classes = draw()
            hidden = trunk(points)
            root = (heads[0](hidden).square() - (1e9 if step == 13 else -1.0)).sqrt().mean()
            loss = root + F.cross_entropy(heads[1](hidden), classes)
            optimizer.zero_grad()
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
    [alert] = run.alerts
    assert (alert.step, alert.module_name) == (13, "heads.0")
    assert "a function, targets or a term of the loss after heads.0" in alert.summary
    assert "the term of heads.1 is finite" in alert.summary


@pytest.mark.parametrize("every", [1, 1000])  # the step is measured, or only its result
def test_an_optimizer_step_that_produces_nan_is_the_cause(every: int) -> None:
    broken = net()
    with torch.no_grad():
        broken[0].bias.fill_(-99.0)  # no unit gets a gradient: 0 / (0 + eps)
        broken[3].bias.fill_(1.0)
    optimizer = Adam(broken.parameters(), eps=0.0)
    alert = train(Nonfinite(), 3, model=broken, optimizer=optimizer, every=every)[0]
    assert (alert.step, alert.module_name) == (0, "0")
    assert "first in 0.weight: the optimizer step broke it" in alert.summary


@pytest.mark.parametrize("every", [1, 1000])
def test_an_overflow_after_too_large_steps_states_the_growth(every: int) -> None:
    def batch(step: int) -> Batch:
        points, classes = draw()
        return points * 1e3, classes

    model = net()
    optimizer = SGD(model.parameters(), 1e4, momentum=0.9)
    alert = train(Nonfinite(), 40, model=model, optimizer=optimizer, batch=batch, every=every)[0]
    assert re.search(r"numbers overflowed after .* grew .*-fold", alert.summary)
    assert "Lower the learning rate" in alert.advice[0]


class Recurrent(nn.Module):
    """A network that repeats a layer 50 times, whose gain is above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.repeat, self.leave = nn.Linear(8, 48), nn.Linear(48, 48), nn.Linear(48, 3)
        nn.init.normal_(self.repeat.weight, std=1.6 / 48**0.5)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 48)
        for _ in range(50):
            state = torch.relu(self.enter(x) + self.repeat(state))
        out: Tensor = self.leave(state)
        return out


@pytest.mark.parametrize("every", [1, 1000])
def test_an_overflow_in_the_second_step_is_that_of_the_first_update(every: int) -> None:
    torch.manual_seed(0)
    model = Recurrent()
    alert = train(Nonfinite(), 9, model=model, optimizer=SGD(model.parameters(), 1.0), every=every)[
        0
    ]
    assert alert.step <= 2
    assert re.search(r"numbers overflowed after the weights grew .*-fold", alert.summary)
    assert "Lower the learning rate" in alert.advice[0]
    assert alert.batches == ()


def test_weights_that_are_overwritten_after_a_good_step_are_named() -> None:
    broken = net()

    def overwrite(step: int) -> None:
        if step == 13:
            broken[3].weight.data[1, 2] = math.inf

    alert = first(13, model=broken, before=overwrite)
    assert (alert.step, alert.module_name) == (13, "3")
    assert "3.weight: the optimizer or other code broke it" in alert.summary


def test_nan_in_running_statistics_starts_and_resolves_one_alert() -> None:
    broken = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def poison(step: int) -> None:
        if step == 5:
            broken[1].running_mean.fill_(math.nan)
        if step == 160:
            broken[1].running_mean.fill_(0.0)

    alerts = train(Nonfinite(), 260, model=broken, before=poison, every=50)
    assert [alert.stage for alert in alerts] == ["started", "resolved"]
    assert alerts[0].module_name == "1"


# --- losses without a record ---------------------------------------------------------------------


def logged(*, at: Callable[[int], int], factor: float | None = None) -> list[Alert]:
    """Return the alerts of 12 NaN losses after finite records up to step 5."""
    rule = Nonfinite()
    healthy = nn.Linear(4, 1)
    with capture_run(healthy) as run:
        run_for(healthy, 5)
    for record in run.records:
        assert not list(rule(replace(record, loss_scale=factor)))
    return [alert for i in range(12) for alert in rule.on_loss(at(i), math.nan)]


def run_for(model: nn.Module, steps: int) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(8, 4)).square().mean().backward()
        optimizer.step()


def test_a_scaler_that_skips_every_step_is_named_only_if_one_is_used() -> None:
    [alert] = logged(at=lambda i: 5)
    assert (alert.value, alert.cause) == (10, None)
    [alert] = logged(at=lambda i: 5, factor=1024.0)
    assert "scaler" in (alert.cause or "")


def test_nan_losses_of_successive_steps_are_not_skipped_steps() -> None:
    assert logged(at=lambda i: 5 + i) == []


class Scaled(nn.Module):
    """Module that multiplies by its buffer."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Identity()
        self.register_buffer("gain", torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * self.gain
        with torch.no_grad():
            self.mean.lerp_(y.mean(), 0.1)
        return y


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.mark.parametrize("at", [10, 13])
@pytest.mark.parametrize(
    ("buffer", "module", "named"),
    [
        ("gain", "", "the model"),
        ("inner.1.gain", "inner.1", "inner.1"),
        ("inner.2.gain", "inner.2", "inner.2"),
    ],
)
def test_a_buffer_that_is_nan_is_named(at: int, buffer: str, module: str, named: str) -> None:
    parts = nn.Linear(8, 8), Gain(), Scaled(nn.Linear(8, 8)), nn.Linear(8, 3)
    broken = Scaled(nn.Sequential(*parts))

    def spoil(step: int) -> None:
        if step == at:
            broken.get_buffer(buffer).fill_(math.nan)

    alert = first(at, model=broken, before=spoil)
    assert (alert.step, alert.module_name) == (at, module)
    seen = f"in or before {named}: its buffer {buffer} is NaN" if at == 13 else f"buffer {buffer}"
    assert seen in alert.summary


def test_buffers_changed_by_a_bad_batch_are_not_the_cause() -> None:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        points, classes = draw()
        points[5] = math.nan if step == 10 else points[5]
        return points, classes

    model = Scaled(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    alert = first(10, model=model, batch=batch)
    assert {8, 256} <= {*figures(alert.summary)}
