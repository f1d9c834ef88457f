"""Origins of NaN and infinity, derived from the measurements of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from telemetry import Alert
from telemetry.testing import capture_run
from tests.helpers.applied import Applied
from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.small_runs import Batch, at_step, captured, classify, draw, drawn, net, train

ANYWHERE = "It began in the inputs, the targets, the loss or a function"


def functions(enter: Callable[[Tensor], Tensor]) -> Any:
    """Return two layers, before each of which a function runs that is no module."""

    def apply(self: Any, x: Tensor) -> Any:
        scores = self.score(enter(x))
        if self.is_masked:
            scores = scores.masked_fill(torch.arange(len(x))[:, None] == 5, -math.inf)
        return self.head(scores.softmax(1))

    model = Applied(apply, score=nn.Linear(8, 16), head=nn.Linear(16, 3))
    model.is_masked = False
    return model


def first(at: int, **faults: Any) -> Alert:
    """Return the first alert of a run with a fault at one step; steps 0, 10, 20, ... are full."""
    return train(rule("nonfinite"), at + 1, **faults)[0]


def row_5(value: float, *, at: int | None = None) -> Callable[[int], Batch]:
    """Return batches of which one sample is this value, at one step or at all steps."""
    of_row = (torch.arange(32) == 5)[:, None]
    return drawn(lambda step, x: x.masked_fill(of_row & (at in (None, step)), value))


@pytest.mark.parametrize("is_mask", [False, True])
def test_a_logarithm_of_zero_is_the_origin_unless_it_is_infinite_at_good_steps(
    is_mask: bool,
) -> None:
    def apply(self: Any, x: Tensor) -> Any:
        logs, factor = self.log(x), next(factors)
        return self.head(x) * (logs.clamp_min(-1) if factor else logs * 0).mean()

    factors = iter([1.0] * 10 + [0.0])
    log = Applied(lambda self, x: (x[:, :1].abs() if not is_mask else 0 * x[:, :1]).log())
    model = Applied(apply, log=log, head=nn.Linear(8, 3))
    alert = first(10, model=model, batch=row_5(0.0, at=10))
    assert (alert.step, alert.module_name) == (10, None if is_mask else "log")


def test_infinity_before_nan_is_the_origin() -> None:
    log = Applied(lambda self, x: x.abs().log())
    model = Applied(lambda self, x: self.head(self.log(x)), log=log, head=nn.Linear(8, 3))
    alert = first(10, model=model, batch=row_5(0.0, at=10))
    assert (alert.step, alert.module_name) == (10, "log")


def test_without_a_full_step_clipping_may_have_spread_nan_from_any_layer() -> None:
    def spoil_and_clip(model: nn.Module) -> None:
        if next(steps) == 13:
            model.get_parameter("0.weight").grad.fill_(math.nan)  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    steps = iter(range(14))
    alert = first(13, after_backward=spoil_and_clip)
    assert alert.step == 13
    assert "or, if gradients are clipped, in any layer" in alert.summary


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("at", "module"), [(10, "0"), (13, None)])
def test_a_bad_batch_is_attributed_to_the_inputs_at_a_full_step_only(
    at: int, module: str | None, value: float
) -> None:
    alert = first(at, batch=row_5(value, at=at))
    assert (alert.step, alert.severity, alert.module_name) == (at, "error", module)
    assert ({8, 256} <= {*figures(alert.summary)}) == (at == 10)  # values of the batch
    assert (ANYWHERE in alert.summary) == (at == 13)


def test_inputs_of_the_first_layer_are_distinguished_from_the_batch() -> None:
    model = functions(lambda x: x / x.norm(dim=1, keepdim=True))
    alert = first(10, model=model, batch=row_5(0.0, at=10))
    assert (alert.step, alert.module_name) == (10, "score")
    assert "8 of 256 values of the input of score" in alert.summary


def test_missing_values_that_the_model_fills_in_are_not_the_cause() -> None:
    model, factors = functions(torch.nan_to_num), iter([1.0] * 10 + [math.inf])
    model.score.register_forward_hook(lambda module, args, output: output * next(factors))
    alert = first(10, model=model, batch=row_5(math.nan))
    assert (alert.step, alert.module_name) == (10, "score")


def test_nan_that_reaches_a_layer_from_a_function_is_attributed_to_the_function() -> None:
    model = functions(torch.clone)
    alert = first(10, model=model, before=lambda step: setattr(model, "is_masked", step == 10))
    assert alert.module_name == "head"
    assert alert.summary.endswith("in the input of head, by a function after score")


@pytest.mark.parametrize(
    ("at", "value", "seen"),
    [
        (10, math.nan, "The loss is NaN at step 10, first in the targets or the loss"),
        (13, math.nan, f"The loss is NaN at step 13. {ANYWHERE}"),
        (13, math.inf, "The loss is infinite at step 13. It began in the targets, the loss or a"),
    ],
)
def test_a_bad_loss_alone_is_attributed_to_no_module(at: int, value: float, seen: str) -> None:
    alert = first(at, weight=lambda step: value if step == at else 1.0)
    assert (alert.step, alert.module_name) == (at, None)
    assert alert.summary.startswith(seen)


def test_the_head_whose_term_of_the_loss_is_nan_is_named() -> None:
    torch.manual_seed(0)
    trunk, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 3)])
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})

    def loss_of(step: int) -> Tensor:
        points, classes = draw()
        hidden = trunk(points)
        root = (heads[0](hidden).square() - (1e9 if step == 13 else -1.0)).sqrt().mean()
        return root + F.cross_entropy(heads[1](hidden), classes)

    [alert] = captured(model, 14, rules=["nonfinite"], loss_of=loss_of).alerts
    assert (alert.step, alert.module_name) == (13, "heads.0")
    assert "a function, targets or a term of the loss after heads.0" in alert.summary
    assert "the term of heads.1 is finite" in alert.summary


@pytest.mark.parametrize(
    ("at", "factor", "module", "seen"),
    [
        (10, -1.0, "2", "the forward pass, in the output of module 2"),
        (13, -1.0, None, "the loss or a function, perhaps in module 1 or module 2"),
        (10, 0.0, "2", "the backward pass of module 2"),
        (13, 0.0, "0", "module 0; that of module 3 is finite, perhaps in module 1 or module 2"),
    ],
)
def test_nan_is_attributed_to_the_forward_or_the_backward_pass(
    at: int, factor: float, module: str | None, seen: str
) -> None:
    factors = iter([1.0] * at + [factor])
    gate = Applied(lambda self, x: x.square().clamp_min(1.0) * next(factors))
    root = Applied(lambda self, x: x.sqrt())  # its gradient is infinite at 0, its value NaN below
    alert = first(at, model=nn.Sequential(nn.Linear(8, 16), gate, root, nn.Linear(16, 3)))
    assert (alert.step, alert.module_name) == (at, module)
    assert seen in alert.summary


def scale() -> nn.Module:
    """Return a layer that divides its input by its norm, without an eps."""
    layer = Applied(lambda self, x: x / x.norm(dim=1, keepdim=True) * self.weight)
    layer.weight = nn.Parameter(torch.ones(16))
    return layer


STATISTICS = ", whose running statistics are NaN"


@pytest.mark.parametrize(
    ("layers", "suspect", "module", "seen"),
    [
        ([scale()], 1, "1", "the loss or a function, perhaps in module 1: the"),
        (
            [nn.BatchNorm1d(16), scale(), nn.Tanh(), nn.BatchNorm1d(16)],
            *(2, "2", f"before module 4{STATISTICS}, and after module 1, whose are not, perhaps"),
        ),
        ([nn.Tanh(), nn.BatchNorm1d(16)], 0, "2", f"before module 2{STATISTICS}, or in the inputs"),
    ],
)
def test_nan_at_a_light_step_is_located_by_layers_and_running_statistics(
    layers: list[nn.Module], suspect: int, module: str, seen: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 3))
    factors = iter([1.0] * 13 + [0.0 if suspect else math.nan])
    model[suspect].register_forward_pre_hook(lambda module, given: (given[0] * next(factors),))
    alert = first(13, model=model)
    assert (alert.step, alert.module_name) == (13, module)
    assert seen in alert.summary


@pytest.mark.parametrize("every", [1, 1000])  # the step is measured, or only its result
def test_an_optimizer_step_that_produces_nan_is_the_cause(every: int) -> None:
    model = net()
    model[0].bias.data.fill_(-99.0)  # no unit gets a gradient: 0 / (0 + eps)
    model[3].bias.data.fill_(1.0)
    optimizer = Adam(model.parameters(), eps=0.0)
    alert, *_ = train(rule("nonfinite"), 3, model=model, optimizer=optimizer, every=every)
    assert (alert.step, alert.module_name) == (0, "0")
    assert "first in 0.weight: the optimizer step broke it" in alert.summary


@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize(("rate", "latest"), [(1e7, 39), (1e30, 2)])
def test_an_overflow_after_too_large_steps_states_the_growth(
    rate: float, latest: int, every: int
) -> None:
    model = net()
    optimizer = SGD(model.parameters(), rate, momentum=0.9)
    alert, *_ = train(rule("nonfinite"), 40, model=model, optimizer=optimizer, every=every)
    assert alert.step <= latest
    assert re.search(r"numbers overflowed after .* grew .*-fold", alert.summary)
    assert "Lower the learning rate" in alert.advice[0]
    assert alert.batches == ()


def test_weights_that_are_overwritten_after_a_good_step_are_named() -> None:
    model = net()
    alert = first(13, model=model, before=at_step(13, lambda: model[3].weight.data.fill_(math.inf)))
    assert (alert.step, alert.module_name) == (13, "3")
    assert "3.weight: the optimizer or other code broke it" in alert.summary


def scaled(inner: nn.Module | None = None) -> nn.Module:
    """Return a module that multiplies by a buffer, and averages its outputs in another one."""

    def apply(self: Any, x: Tensor) -> Any:
        y: Tensor = (self.inner(x) if inner else x) * self.gain
        self.mean.lerp_(y.detach().mean(), 0.1)
        return y

    model = Applied(apply, inner=inner)
    model.register_buffer("gain", torch.ones(()))
    model.register_buffer("mean", torch.zeros(()))
    return model


def spoiled(model: nn.Module, at: int, buffer: str, value: float = math.nan) -> Alert:
    """Return the first alert of a run in which a buffer is overwritten."""
    spoil = at_step(at, lambda: model.get_buffer(buffer).fill_(value))
    return first(at, model=model, before=spoil)


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
    parts = nn.Linear(8, 8), scaled(), scaled(nn.Linear(8, 8)), nn.Linear(8, 3)
    alert = spoiled(scaled(nn.Sequential(*parts)), at, buffer)
    assert (alert.step, alert.module_name) == (at, module)
    seen = f"in or before {named}: its buffer {buffer} is NaN" if at == 13 else f"buffer {buffer}"
    assert seen in alert.summary


def test_buffers_changed_by_a_bad_batch_are_not_the_cause() -> None:
    model = scaled(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    alert = first(10, model=model, batch=row_5(math.nan, at=10))
    assert {8, 256} <= {*figures(alert.summary)}


def test_a_buffer_made_as_nan_is_no_fault_and_one_that_becomes_nan_is() -> None:
    model = net()
    model.register_buffer("average", torch.full((3,), math.nan))
    model.register_buffer("other", torch.zeros(3))
    alert = spoiled(model, 20, "other")
    assert alert.step == 20
    assert "the buffer other" in alert.summary


@pytest.mark.parametrize(("name", "value"), [("mean", math.nan), ("var", math.inf)])
def test_running_statistics_that_are_not_finite_start_and_resolve_one_alert(
    name: str, value: float
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    buffer = model.get_buffer(f"1.running_{name}")
    values = {5: value, 160: 1.0}
    begin, end = train(
        rule("nonfinite"),
        260,
        model=model,
        before=lambda step: step in values and buffer.fill_(values[step]),
        every=50,
    )
    assert (begin.stage, end.stage, begin.module_name) == ("started", "resolved", "1")


@pytest.mark.parametrize("has_scaler", [False, True])
def test_a_scaler_that_skips_every_step_is_named_only_if_one_is_used(has_scaler: bool) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=has_scaler)
    with capture_run(model, rules=[rule("nonfinite")]) as run:
        for step in range(17):
            loss = classify(model) * (math.nan if step >= 5 else 1.0)
            run.log(loss=loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if step < 5 or has_scaler:
                scaler.step(optimizer)
                scaler.update()
    [alert] = run.alerts
    assert (len(run.records), alert.value) == (5, 10)
    assert ("scaler" in (alert.cause or "")) == has_scaler


def test_a_loss_that_is_logged_after_its_step_does_not_clear_the_step_with_nan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = SGD(model.parameters(), 0.1)
    with capture_run(model, every_n_steps=100, rules=[rule("nonfinite")]) as run:
        for step in range(30):
            optimizer.zero_grad()
            loss = (model(torch.randn(16, 8)) * (math.nan if step == 25 else 1)).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    [alert, *_] = run.alerts
    assert (alert.step, alert.module_name) == (25, None)
    assert "the step was not measured in full" in alert.message
