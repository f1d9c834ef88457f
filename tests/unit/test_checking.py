from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import telemetry
from telemetry import CheckResult
from tests.helpers.applied import Applied


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for given, width in pairwise(widths):
        layers += [nn.Linear(given, width), activation()]
    return nn.Sequential(*layers[:-1])


def between(apply: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """Return two layers; a function applies the second one."""
    layers = {"inside": nn.Linear(20, 64), "head": nn.Linear(64, 5)}
    return Applied(lambda self, x: apply(self.head, F.relu(self.inside(x))), **layers)


def normalized() -> nn.Sequential:
    parts = nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 5)
    return nn.Sequential(*parts)


def check(model: nn.Module, *inputs: Tensor, **options: Any) -> CheckResult:
    """Check with the mean square of the outputs as the loss."""
    given = inputs[0] if len(inputs) == 1 else inputs
    return telemetry.check(model, given, lambda out: out.square().mean(), show=False, **options)


def check_classes(model: nn.Module, loss: nn.Module | None = None) -> CheckResult:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 20, generator=g), torch.randint(5, (64,), generator=g)
    return telemetry.check(model, x, loss or nn.CrossEntropyLoss(), targets=y, show=False)


def test_a_usual_model_has_no_findings() -> None:
    frozen = mlp(20, 64, 64, 5)
    frozen[0].requires_grad_(False)
    for model in (mlp(20, 64, 64, 5), frozen, normalized(), between(lambda head, h: head(h))):
        result = check_classes(model)
        assert (result.findings, result.skipped, result.exit_code) == ((), (), 0)
        assert 1 < result.loss < 2.5


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_outputs_that_only_resemble_probabilities_are_logits(shift: float) -> None:
    """The first are not negative; the others add up to one."""
    normal = between(lambda head, h: F.relu(head(h)))
    if shift:
        normal = between(lambda head, h: head(h) - head(h).mean(1, keepdim=True) + shift)
    assert "wrong_loss_input" not in {finding.kind for finding in check_classes(normal).findings}


def dead() -> nn.Module:
    model = mlp(20, 64, 64, 5)
    nn.init.constant_(model[0].bias, -100.0)
    return model


def scaled(model: nn.Sequential, factor: float, *layers: int) -> nn.Module:
    for layer in layers:
        model[layer].weight.data.mul_(factor)
    return model


def idle_norms() -> nn.Module:
    model = normalized()
    model[1].eval()
    return model


@pytest.mark.parametrize(
    ("make", "kind", "layer", "exit_code"),
    [
        (dead, "dead_units", "0", 1),
        (
            lambda: scaled(mlp(20, *[64] * 40, 5, activation=nn.Identity), 3, *range(0, 82, 2)),
            *("exploding_gradient", None, 1),
        ),
        (
            lambda: scaled(mlp(20, 64, 64, 5, activation=nn.Tanh), 1000, 0),
            *("saturated_units", "1", 1),
        ),
        (idle_norms, "eval_mode", "1", 0),  # a note
        (lambda: mlp(20, *[64] * 60, 5), "vanishing_gradient", "0", 1),
        (lambda: between(lambda head, h: head(h).log()), "nonfinite", None, 1),
        (lambda: between(lambda head, h: 50 * head(h)), "loss_at_start", None, 1),
        (lambda: between(lambda head, h: head(h).softmax(1)), "wrong_loss_input", None, 1),
        (lambda: between(lambda head, h: head(h * 0)), "input_ignored", None, 1),
        (lambda: between(lambda head, h: head(h - h.mean(0))), "batch_leak", None, 1),
        (lambda: between(lambda head, h: head(h.softmax(0))), "batch_leak", None, 1),
        (lambda: between(lambda head, h: head(h.detach())), "untrained_parameters", "inside", 1),
    ],
)
def test_each_fault_is_found_with_its_kind_and_layer(
    make: Callable[[], nn.Module], kind: str, layer: str | None, exit_code: int
) -> None:
    result = check_classes(make())
    found = {finding.kind: finding for finding in result.findings}
    assert kind in found
    assert found[kind].step == 0
    assert layer in (None, found[kind].module_name)
    assert len(found[kind].advice) >= 1
    assert result.exit_code == exit_code


def test_a_function_without_a_gradient_is_no_ignored_input() -> None:
    result = check_classes(between(lambda head, h: head(h.round())))
    assert "input_ignored" not in {finding.kind for finding in result.findings}
    assert result.skipped == ("samples: no gradient of the outputs reaches the inputs",)


@pytest.mark.parametrize(
    ("loss", "severity"),
    [
        (nn.MSELoss(), "warning"),
        (nn.functional.smooth_l1_loss, "warning"),
        (lambda output, targets: (output - targets).square().mean(), "note"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")  # PyTorch warns, too
def test_outputs_and_targets_that_broadcast_are_found(loss: Any, severity: str) -> None:
    model, inputs, targets = nn.Linear(20, 1), torch.randn(64, 20), torch.randn(64)
    (found,) = telemetry.check(model, inputs, loss, targets=targets).findings
    assert (found.kind, found.severity) == ("wrong_loss_input", severity)
    assert "[64, 1] and targets [64] broadcast to [64, 64]" in found.summary
    assert not telemetry.check(model, inputs, loss, targets=targets[:, None]).findings
    assert not telemetry.check(model, inputs, loss, targets=torch.randn(1)).findings


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
    assert "layer" in output.split("\n")[0]
    assert "dead units in module 0" in output
    assert "LeakyReLU" in output  # advice
    assert len(repr(result)) < 3000
    assert "2 steps" not in repr(check(idle_norms(), inputs))


def test_a_summed_cross_entropy_is_compared_by_target() -> None:
    for scale, kinds in ((1, []), (50, ["loss_at_start"])):
        model = between(lambda head, h, scale=scale: scale * head(h))
        result = check_classes(model, nn.CrossEntropyLoss(reduction="sum"))
        assert [finding.kind for finding in result.findings] == kinds


@pytest.mark.parametrize(
    ("batch_first", "mean", "severities"),
    [(True, None, []), (False, None, ["note"]), (True, 0, ["warning"])],
)
def test_time_as_the_first_axis_is_a_note(
    batch_first: bool, mean: int | None, severities: list[str]
) -> None:
    def apply(self: Any, x: Tensor) -> Tensor:
        h: Tensor = self.recurrent(x)[0]
        return h if mean is None else h - h.mean(mean)

    model = Applied(apply, recurrent=nn.GRU(20, 16, batch_first=batch_first))
    findings = check(model, torch.randn(12, 8, 20)).findings
    assert [f.severity for f in findings if f.kind == "batch_leak"] == severities


def test_samples_that_influence_each_other_are_a_note() -> None:
    graph = Applied(lambda self, x, neighbors: neighbors @ self.layer(x), layer=nn.Linear(20, 5))
    [finding] = check(graph, torch.randn(16, 20), torch.rand(16, 16)).findings
    assert (finding.kind, finding.severity) == ("batch_leak", "note")
    assert "relates samples to each other" in finding.advice[0]


@pytest.mark.parametrize("leak", [False, True])
def test_samples_of_token_ids_are_compared_after_the_embedding(leak: bool) -> None:
    def apply(self: Any, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # as transformers do
        h = self.tables(ids)
        logits = self.head(h + h.mean(0) if leak else h)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    ids = torch.randint(50, (8, 6))
    inputs = UserDict(ids=ids, labels=ids)  # as tokenizers return
    model = Applied(apply, tables=nn.Embedding(50, 32), head=nn.Linear(32, 50))
    result = telemetry.check(model, inputs, show=False)
    assert [finding.kind for finding in result.findings] == ["batch_leak"] * leak


def zero_head() -> nn.Module:
    model = mlp(20, 64, 64, 5)
    nn.init.zeros_(model[4].weight)
    return model


def in_eval(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return layers whose outputs evaluation changes by a function."""
    return between(lambda head, h: head(h) if head.training else function(head(h)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (zero_head, "starts at zero"),
        (lambda: in_eval(torch.detach), "have no gradient"),
        (lambda: in_eval(lambda h: h / h.sub(h)), "are not finite"),
    ],
)
def test_outputs_without_usable_gradients_are_not_taken_for_constants(
    make: Callable[[], nn.Module], reason: str
) -> None:
    result = check_classes(make())
    assert result.findings == ()
    assert reason in result.skipped[0]


def test_checks_that_cannot_run_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    one = telemetry.check(mlp(20, 16, 5), torch.randn(1, 20), torch.sum)
    assert one.skipped == (
        "loss compared with ln C: it is not known to be a cross entropy",
        "samples: the inputs are no batch of two or more",
    )
    assert f"skipped: {one.skipped[0]}" in capsys.readouterr().out


MODEL, LOSS = nn.Linear(20, 3), nn.CrossEntropyLoss()
INPUTS, CLASSES = torch.randn(8, 20), torch.arange(8) % 3


@pytest.mark.parametrize(
    ("given", "targets", "name"),
    [
        ((INPUTS, MODEL, LOSS), CLASSES, "model"),
        ((MODEL, LOSS, INPUTS), CLASSES, "inputs"),
        ((MODEL, INPUTS, CLASSES), LOSS, "loss_function"),
        ((MODEL, INPUTS, CLASSES), None, "loss_function"),
    ],
)
def test_arguments_in_another_order_are_named(given: Any, targets: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"check\({name}=\.\.\.\): must be"):
        telemetry.check(*given, targets=targets)


def test_a_lazy_module_has_to_be_called_before() -> None:
    with pytest.raises(ValueError, match=r"check\(model=.*call the model once before"):
        telemetry.check(nn.LazyLinear(3), INPUTS, LOSS, targets=CLASSES)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, r"Tensor of shape \[8, 3\] and no loss; pass .* targets="),
        (lambda out: out.sum().item(), r"loss_function=...\): must return a tensor, not float"),
        (lambda out: out.detach().sum(), r"does not depend on any parameter; look for detach\(\)"),
        (torch.sum, "no parameter that requires a gradient"),
    ],
)
def test_a_missing_loss_is_an_error_that_names_the_remedy(loss: Any, message: str) -> None:
    model = nn.Linear(20, 3).requires_grad_(loss is not torch.sum)
    with pytest.raises(ValueError, match=message):
        telemetry.check(model, INPUTS, *([] if loss is None else [loss]))


def test_inputs_are_unchanged_though_a_model_changes_them_in_place() -> None:
    x = torch.randn(8, 20)
    given = x.clone()
    model = Applied(lambda self, x: self.layer(x.sub_(0.5)), layer=nn.Linear(20, 5))
    relu = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(20, 5))
    for changing in (model, relu):
        assert check(changing, x).findings == ()
        assert torch.equal(x, given)


def state(model: nn.Module) -> list[Any]:
    """Return parameters, buffers, gradients, random states, modes, and counts of hooks."""
    return [
        *(value.tolist() for value in model.state_dict().values()),
        *(None if p.grad is None else p.grad.tolist() for p in model.parameters()),
        *(torch.get_rng_state().tolist(), random.getstate()),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        *(module.training for module in model.modules()),
        *(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
    ]


@pytest.mark.parametrize("raises", [False, True])
def test_parameters_gradients_modes_hooks_and_random_states_are_unchanged(raises: bool) -> None:
    model = normalized()
    model[3].eval()
    model[0].weight.grad = gradient = torch.randn(64, 20)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        random.random()
        np.random.rand()  # noqa: NPY002
        if raises:
            raise RuntimeError("of the model")

    model[4].register_forward_hook(hook)
    before = state(model)
    with pytest.raises(RuntimeError, match="of the model") if raises else nullcontext():
        check_classes(model)
    assert state(model) == before
    assert model[0].weight.grad is gradient


def test_what_a_forward_pass_changes_or_adds_is_restored() -> None:
    def apply(self: Any, x: Tensor) -> Tensor:
        output: Tensor = self.scripted(self.layer(x)) * self.scale
        self.average = 0.9 * self.average + 0.1 * output.detach().mean(0)
        self.layer.weight.data.mul_(0.99)
        self.calls += 1
        self.latest = output
        return output

    model = Applied(apply, layer=nn.Linear(20, 5), scripted=torch.jit.script(nn.BatchNorm1d(5)))
    model.calls = 0
    average = torch.zeros(5)
    model.register_buffer("average", average)
    model.register_buffer("scale", torch.ones(1).expand(5))
    before = state(model)
    check_classes(model)
    assert state(model) == before
    assert (model.calls, hasattr(model, "latest")) == (0, False)
    assert model.average is average
    assert torch.equal(average, torch.zeros(5))


def test_gradients_outside_the_model_are_left_alone() -> None:
    discriminator, x = nn.Linear(5, 1), torch.randn(16, 20, requires_grad=True)
    telemetry.check(mlp(20, 16, 5), x, lambda o: -discriminator(o).mean(), show=False)
    assert x.grad is None
    assert discriminator.weight.grad is None
