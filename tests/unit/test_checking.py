from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import telemetry
from telemetry import CheckResult


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for given, width in pairwise(widths):
        layers += [nn.Linear(given, width), activation()]
    return nn.Sequential(*layers[:-1])


class Between(nn.Module):
    """Two layers; a function applies the second one."""

    def __init__(self, apply: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.head, self.apply_head = nn.Linear(20, 64), nn.Linear(64, 5), apply

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_head(self.head, F.relu(self.inside(x)))


def check_model(model: nn.Module, **options: Any) -> CheckResult:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 20, generator=g), torch.randint(5, (64,), generator=g)
    return telemetry.check(model, x, nn.CrossEntropyLoss(), targets=y, show=False, **options)


def test_a_usual_model_has_no_findings() -> None:
    norms = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 5))
    for model in (mlp(20, 64, 64, 5), norms, Between(lambda head, h: head(h))):
        result = check_model(model)
        assert (result.findings, result.skipped, result.exit_code) == ((), (), 0)
        assert 1 < result.loss < 2.5


def test_a_frozen_trunk_and_a_head_that_starts_at_zero_are_not_reported() -> None:
    frozen, zero = mlp(20, 64, 64, 5), mlp(20, 64, 64, 5)
    frozen[0].requires_grad_(False)
    nn.init.zeros_(zero[4].weight)
    assert check_model(frozen).findings == ()
    result = check_model(zero)
    assert result.findings == ()
    assert "starts at zero" in result.skipped[0]


def dead() -> nn.Module:
    model = mlp(20, 64, 64, 5)
    nn.init.constant_(model[0].bias, -100.0)
    return model


def huge() -> nn.Module:
    model = mlp(20, *[64] * 40, 5, activation=nn.Identity)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def idle_norms() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    model[1].eval()
    return model


def wide() -> nn.Module:
    model = mlp(20, 64, 64, 5, activation=nn.Tanh)
    with torch.no_grad():
        model[0].weight.mul_(1000)
    return model


@pytest.mark.parametrize(
    ("make", "kind", "layer"),
    [
        (dead, "dead_units", "0"),
        (huge, "exploding_gradient", None),
        (wide, "saturated_units", "1"),
        (idle_norms, "eval_mode", "1"),
        (lambda: mlp(20, *[64] * 60, 5), "vanishing_gradient", "0"),
        (lambda: Between(lambda head, h: head(h).log()), "nonfinite", None),
        (lambda: Between(lambda head, h: 50 * head(h)), "loss_at_start", None),
        (lambda: Between(lambda head, h: head(h).softmax(1)), "wrong_loss_input", None),
        (lambda: Between(lambda head, h: head(h * 0)), "input_ignored", None),
        (lambda: Between(lambda head, h: head(h - h.mean(0))), "batch_leak", None),
        (lambda: Between(lambda head, h: head(h.softmax(0))), "batch_leak", None),
        (lambda: Between(lambda head, h: head(h.detach())), "untrained_parameters", "inside"),
    ],
)
def test_each_fault_is_found_with_its_kind_and_layer(
    make: Callable[[], nn.Module], kind: str, layer: str | None
) -> None:
    found = {finding.kind: finding for finding in check_model(make()).findings}
    assert kind in found
    assert found[kind].step == 0
    assert layer in (None, found[kind].module_name)
    assert len(found[kind].advice) >= 1


def test_a_check_reports_one_batch_and_its_repr_is_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].bias.data.fill_(-1000)
    inputs, classes = torch.randn(100, 20), torch.arange(100) % 3  # 283 samples of eight units
    result = telemetry.check(model, inputs, nn.CrossEntropyLoss(), targets=classes)
    dead = next(found for found in result.findings if found.kind == "dead_units")
    assert (dead.module_name, dead.observed_in, dead.value) == ("0", "1", 1)
    assert "one batch" in dead.summary
    output = capsys.readouterr().out
    assert "2 batches" not in output
    assert len(repr(result)) < 3000
    assert "2 steps" not in repr(telemetry.check(idle_norms(), inputs, lambda out: out.sum()))


def test_arguments_in_another_order_are_named() -> None:
    model, inputs, classes = nn.Linear(20, 3), torch.randn(8, 20), torch.arange(8) % 3
    loss: Any = nn.CrossEntropyLoss()
    swapped: list[tuple[tuple[Any, ...], Any, str]] = [
        ((inputs, model, loss), classes, "model"),
        ((model, loss, inputs), classes, "inputs"),
        ((model, inputs, classes), loss, "loss_function"),
        ((model, inputs, classes), None, "loss_function"),
    ]
    for given, targets, name in swapped:
        with pytest.raises(TypeError, match=rf"check\({name}=\.\.\.\): must be"):
            telemetry.check(*given, targets=targets)


def test_only_findings_above_a_note_set_the_exit_code() -> None:
    assert check_model(dead()).exit_code == 1
    assert check_model(idle_norms()).exit_code == 0


class Reached(nn.Module):
    """Layer with a function of its input and a function of its output."""

    def __init__(
        self, before: Callable[[Tensor], Tensor], after: Callable[[nn.Module, Tensor], Tensor]
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.before, self.after = nn.Linear(20, 5), before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.layer(self.before(x)))


def test_inputs_are_unchanged_though_a_model_changes_them_in_place() -> None:
    x = torch.randn(8, 20)
    given = x.clone()
    model = Reached(lambda x: x.sub_(0.5), lambda self, h: h)
    assert telemetry.check(model, x, lambda o: o.square().mean(), show=False).findings == ()
    assert torch.equal(x, given)
    relu = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(20, 5))
    assert telemetry.check(relu, x, lambda o: o.square().mean(), show=False).findings == ()


def no_gradient_in_eval(model: nn.Module, h: Tensor) -> Tensor:
    return h if model.training else h.detach()


def nan_in_eval(model: nn.Module, h: Tensor) -> Tensor:
    return h if model.training else h / h.sub(h)


@pytest.mark.parametrize(
    ("after", "reason"),
    [(no_gradient_in_eval, "have no gradient"), (nan_in_eval, "are not finite")],
)
def test_outputs_without_usable_gradients_are_not_taken_for_constants(
    after: Callable[[nn.Module, Tensor], Tensor], reason: str
) -> None:
    result = check_model(Reached(lambda x: x, after))
    assert result.findings == ()
    assert reason in result.skipped[0]


def test_a_summed_cross_entropy_is_compared_by_target() -> None:
    x, y = torch.randn(64, 20), torch.randint(5, (64,))
    loss = nn.CrossEntropyLoss(reduction="sum")
    for scale, kinds in ((1, []), (50, ["loss_at_start"])):
        model = Between(lambda head, h, scale=scale: scale * head(h))
        result = telemetry.check(model, x, loss, targets=y, show=False)
        assert [finding.kind for finding in result.findings] == kinds


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool, mean: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent, self.mean = nn.GRU(20, 16, batch_first=batch_first), mean

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.recurrent(x)[0]
        return h if self.mean is None else h - h.mean(self.mean)


@pytest.mark.parametrize(
    ("model", "severities"),
    [
        (Recurrent(batch_first=True), []),
        (Recurrent(batch_first=False), ["note"]),
        (Recurrent(batch_first=True, mean=0), ["warning"]),
    ],
)
def test_time_as_the_first_axis_is_a_note(model: nn.Module, severities: list[str]) -> None:
    x = torch.randn(12, 8, 20)
    result = telemetry.check(model, x, lambda output: output.square().mean(), show=False)
    assert [f.severity for f in result.findings if f.kind == "batch_leak"] == severities


def test_samples_that_influence_each_other_are_a_note() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(20, 5)

        def forward(self, nodes: Tensor, neighbors: Tensor) -> Tensor:
            output: Tensor = neighbors @ self.layer(nodes)
            return output

    inputs = torch.randn(16, 20), torch.rand(16, 16)
    result = telemetry.check(Graph(), inputs, lambda output: output.square().mean(), show=False)
    assert [(f.kind, f.severity) for f in result.findings] == [("batch_leak", "note")]
    assert result.findings[0].severity == "note"
    assert "relates samples to each other" in result.findings[0].advice[0]


class Tokens(nn.Module):
    """Takes token ids and labels, and returns a dict, as transformers do."""

    def __init__(self, leak: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables, self.head, self.leak = nn.Embedding(50, 32), nn.Linear(32, 50), leak

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.tables(ids)
        logits = self.head(h + h.mean(0) if self.leak else h)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("leak", [False, True])
def test_samples_of_token_ids_are_compared_after_the_embedding(leak: bool) -> None:
    ids = torch.randint(50, (8, 6))
    inputs = UserDict(ids=ids, labels=ids)  # as tokenizers return
    result = telemetry.check(Tokens(leak), inputs, show=False)
    assert [finding.kind for finding in result.findings] == ["batch_leak"] * leak


def test_checks_that_cannot_run_are_reported() -> None:
    model = mlp(20, 16, 5)
    one = telemetry.check(model, torch.randn(1, 20), lambda output: output.sum(), show=False)
    assert one.skipped == (
        "loss compared with ln C: it is not known to be a cross entropy",
        "samples: the inputs are no batch of two or more",
    )


def state(model: nn.Module) -> list[Any]:
    return [
        *(value.clone() for value in model.state_dict().values()),
        *(None if p.grad is None else p.grad.clone() for p in model.parameters()),
        torch.get_rng_state(),
        torch.tensor(np.random.get_state()[1].astype(np.int64)),  # noqa: NPY002
    ]


@pytest.mark.parametrize("raises", [False, True])
def test_parameters_gradients_modes_hooks_and_random_states_are_unchanged(raises: bool) -> None:
    model = nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 5)
    )
    model[3].eval()
    model[0].weight.grad = gradient = torch.randn(64, 20)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        random.random()
        np.random.rand()  # noqa: NPY002
        if raises:
            raise RuntimeError("of the model")

    model[4].register_forward_hook(hook)
    before, modes, drawn = state(model), [m.training for m in model.modules()], random.getstate()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    if raises:
        with pytest.raises(RuntimeError, match="of the model"):
            check_model(model)
    else:
        check_model(model)
    for was, now in zip(before, state(model), strict=True):
        assert (was is None and now is None) or torch.equal(was, now)
    assert model[0].weight.grad is gradient
    assert modes == [m.training for m in model.modules()]
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert drawn == random.getstate()


def test_buffers_that_are_replaced_or_expanded_are_unchanged() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 5)
            self.register_buffer("average", torch.zeros(5))
            self.register_buffer("scale", torch.ones(1).expand(5))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x) * self.scale
            self.average = 0.9 * self.average + 0.1 * output.detach().mean(0)
            return output

    model = Average()
    average = model.average
    check_model(model)
    assert model.average is average
    assert torch.equal(average, torch.zeros(5))


def test_gradients_outside_the_model_are_left_alone() -> None:
    discriminator, x = nn.Linear(5, 1), torch.randn(16, 20, requires_grad=True)
    telemetry.check(mlp(20, 16, 5), x, lambda o: -discriminator(o).mean(), show=False)
    assert x.grad is None
    assert discriminator.weight.grad is None


def test_a_missing_loss_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"Tensor of shape \[4, 5\] and no loss; pass .* targets="):
        telemetry.check(mlp(20, 5), torch.randn(4, 20))
    with pytest.raises(ValueError, match=r"loss_function=...\): must return a tensor, not float"):
        telemetry.check(mlp(20, 5), torch.randn(4, 20), lambda output: output.sum().item())
    with pytest.raises(ValueError, match=r"does not depend on any parameter; look for detach\(\)"):
        telemetry.check(mlp(20, 5), torch.randn(4, 20), lambda output: output.detach().sum())
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        telemetry.check(mlp(20, 5).requires_grad_(False), torch.randn(4, 20), torch.sum)


def test_the_table_has_layers_findings_advice_and_skipped_checks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    telemetry.check(dead(), torch.randn(32, 20), lambda output: output.square().mean())
    output = capsys.readouterr().out
    assert "layer" in output.split("\n")[0]
    assert "error: dead units in module 0" in output
    assert "LeakyReLU" in output
    assert "skipped: loss compared with ln C" in output
