"""PyTorch selects slower paths for modules with hooks; a watched model keeps the fast ones."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telemetry import HookLogger
from telemetry.testing import capture_run
from tests.helpers.applied import Applied
from tests.helpers.require import needs_observable_graphs
from tests.helpers.twins import (
    assert_left_alone,
    by_pickle,
    by_saving,
    descend,
    mlp,
    one_step,
    run,
    training,
)

INTERVALS = [1, 10, 100]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(20)  # without, both paths round alike


class Layer(nn.TransformerEncoderLayer):
    """Transformer layer with a causal mask."""

    def __init__(self) -> None:
        super().__init__(64, 4, 128, batch_first=True)

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(src, CAUSAL)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = None if padding is not None else CAUSAL
        x = self.encoder(x, mask=mask, src_key_padding_mask=padding)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def batch() -> Tensor:
    return torch.randn(4, 20, 64)


def padding() -> Tensor:
    return (torch.arange(20) >= 15).expand(4, 20)


def slow(model: nn.Module) -> nn.Module:
    """Give every module of a model a hook."""
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: None)
    return model


def evaluate(model: nn.Module, logger: HookLogger | None = None, around: Any = None) -> Tensor:
    with contextlib.nullcontext() if around == "gradients" else torch.no_grad(), MODES[around]():
        return model(batch())


MODES: dict[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    None: contextlib.nullcontext,
    "gradients": contextlib.nullcontext,
    "half precision": partial(torch.autocast, "cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
}


def evaluate_padded(model: nn.Module, logger: HookLogger | None) -> Tensor:
    with torch.no_grad():
        return model(batch(), padding())  # the encoder makes nested tensors


def validation(logger: HookLogger | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if logger is None else logger.phase("validation")


def evaluate_in_a_phase(model: nn.Module, logger: HookLogger | None) -> Tensor:
    with validation(logger), torch.no_grad():
        return torch.cat([model(batch(), padding()), model(batch())], dim=1)


EVALUATIONS: dict[str, Callable[..., Tensor]] = {
    **{str(mode): partial(evaluate, around=mode) for mode in MODES},
    "padded": evaluate_padded,
    "phase": evaluate_in_a_phase,
}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.skipif(
    torch.__version__.startswith("2.4."), reason="PyTorch 2.4 rounds alike on both paths"
)
def test_hooks_change_the_results_of_these_models() -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    x = batch()
    with torch.no_grad():
        assert not torch.equal(model(x), slow(copy.deepcopy(model))(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("every_n_steps", INTERVALS)
@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation_around_a_training_step_is_left_alone_and_not_measured(
    tmp_path: Path, name: str, every_n_steps: int
) -> None:
    evaluation = EVALUATIONS[name]
    if name == "half precision" and torch.__version__.startswith("2.4."):
        pytest.skip("PyTorch 2.4 itself cannot evaluate the fused layer under autocast on a CPU")

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.eval()
            yield evaluation(model, logger)
            model.train()
            yield train_step(model, optimizer, model(batch()).square().mean())
            yield evaluation(model.eval(), logger)

    outcome = assert_left_alone(Encoder, loop, tmp_path, every_n_steps=every_n_steps)
    assert outcome.full[0].activations["encoder.layers.1.linear1"].calls == 1
    assert outcome.full[0].activations["head"].calls == 1


@pytest.mark.parametrize("every_n_steps", INTERVALS)
def test_a_frozen_encoder_in_evaluation_mode_stays_fused_and_is_not_measured(
    tmp_path: Path, every_n_steps: int
) -> None:
    def loop(model: Any, logger: HookLogger | None) -> Iterator[Tensor]:
        model.encoder.requires_grad_(False)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        for _ in range(3):
            model.encoder.eval()
            yield train_step(model, optimizer, model(batch()).square().mean())

    outcome = assert_left_alone(Encoder, loop, tmp_path, every_n_steps=every_n_steps)
    # The modules of the encoder do not run.
    assert "head" in outcome.full[0].activations
    assert not any(name.startswith("encoder") for name in outcome.full[0].activations)


@pytest.mark.parametrize("modules", [None, nn.TransformerEncoderLayer])
def test_a_model_of_one_fused_layer_is_measured_only_if_its_type_is_selected(
    tmp_path: Path, modules: Any
) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            yield evaluate(model.eval(), logger)
            with validation(logger):
                yield evaluate(model, logger)
            yield train_step(model, optimizer, model.train()(batch()).square().mean())

    outcome = assert_left_alone(Layer, loop, tmp_path, modules=modules)
    assert ("" in outcome.full[0].activations) == (modules is not None)


def hook_counts(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("every_n_steps", INTERVALS)
@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, by_pickle, by_saving, torch.optim.swa_utils.AveragedModel]
)
def test_training_towards_frozen_copies_is_left_alone(
    tmp_path: Path, make_copy: Callable[[nn.Module], nn.Module], every_n_steps: int
) -> None:
    def loop(model: Any, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        copies = []

        def reference(number: int) -> None:
            if len(copies) == number:
                copies.append(make_copy(model).eval())
                assert hook_counts(copies[-1]) == 0, number

        reference(0)
        for _ in range(3):
            x = batch()
            features = model.encoder(x)
            reference(1)
            loss = model.head(features).square().mean()
            for twin in copies:
                loss = loss + (evaluate(twin) - model(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            reference(2)
            optimizer.step()
            reference(3)
            yield loss
        if logger is not None:
            logger.close()
        for twin in copies:
            yield evaluate(twin)

    assert_left_alone(Encoder, loop, tmp_path, every_n_steps=every_n_steps)


def test_a_module_with_user_hooks_is_measured_after_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model[0].register_forward_hook(lambda module, args, output: output * 0 + 3)
    with capture_run(model) as run:
        twins = []
        # Also one that comes later.
        handle = model[1].register_forward_hook(lambda module, args, output: output * 0 + 5)
        model[1].register_forward_pre_hook(lambda m, args: twins.append(copy.deepcopy(model)))
        model(torch.randn(3, 4)).sum().backward()
        assert [len(module._forward_hooks) for module in model] == [1, 1]
        optimizer.step()
        handle.remove()
    assert [len(module._forward_hooks) for module in twins[0]] == [1, 1]
    record = run.records[0]
    assert [record.activations[name].sketch.max for name in "01"] == [3, 5]
    assert record.activations["0"].calls == 1


def test_a_module_that_calls_itself_is_measured_each_time() -> None:
    def forward(m: Any, x: Tensor, depth: int = 2) -> Tensor:
        return x * m.weight if depth == 0 else m(x, depth - 1) + 1

    for hooked in (False, True):
        model = Applied(forward)
        model.weight = nn.Parameter(torch.ones(()))
        if hooked:
            model.register_forward_hook(lambda module, args, output: None)
        assert one_step(model, torch.ones(3)).activations[""].calls == 3
        assert len(model._forward_hooks) == hooked


@pytest.mark.slow
@needs_observable_graphs
@pytest.mark.parametrize("in_a_graph", [False, True])
@pytest.mark.parametrize("every_n_steps", [1, 2])
@pytest.mark.filterwarnings("ignore::Warning")
def test_a_compiled_encoder_is_evaluated_unchanged_and_not_recompiled(
    tmp_path: Path, in_a_graph: bool, every_n_steps: int
) -> None:
    from torch._dynamo.utils import counters

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        torch._dynamo.reset()
        counters.clear()
        if logger is not None:
            logger.remove()
            logger.attach()
        compiled: Any = torch.compile(model, backend="eager")
        evaluated = compiled if in_a_graph else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            yield evaluate(evaluated.eval())
            compiled.train()
            yield train_step(model, optimizer, compiled(batch()).square().mean())
            yield evaluate(evaluated.eval())
            if step == 2:
                graphs.append(counters["stats"]["unique_graphs"])
        graphs.append(counters["stats"]["unique_graphs"])

    graphs: list[int] = []
    outcome = assert_left_alone(Encoder, loop, tmp_path, every_n_steps=every_n_steps)
    assert graphs[-2] == graphs[-1]  # nothing is compiled again
    for record in outcome.full:
        assert record.activations["encoder.layers.1.linear1"].calls == 1
        assert record.activation_grads["head"].calls == 1
    assert "train" not in vars(nn.TransformerEncoderLayer)


@pytest.mark.slow
@needs_observable_graphs
def test_a_compiled_model_warns_only_of_global_hooks_of_the_user(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with HookLogger(model, tmp_path, every_n_steps=2), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global hooks")
        descend(compiled, torch.randn(3, 4), optimizer, steps=3)
        twin = copy.deepcopy(model)
    assert hook_counts(twin) == 0
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, output: None)
    with pytest.warns(UserWarning, match="global hooks"):
        compiled(torch.randn(3, 4))
    handle.remove()
    torch._dynamo.reset()


@pytest.mark.slow
@needs_observable_graphs
@pytest.mark.filterwarnings("ignore::Warning")
def test_steps_that_are_not_measured_have_no_hooks_though_something_else_is_compiled(
    tmp_path: Path,
) -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend="eager")
    hooks = []

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            loss = double(model(torch.randn(3, 4)).to([torch.float32, torch.float64][step % 2]))
            yield train_step(model, optimizer, loss.sum().float())
            double(torch.ones(2, dtype=[torch.int8, torch.int16, torch.int32][step % 3]))
            hooks.append(hook_counts(model))

    outcome = assert_left_alone(mlp, loop, tmp_path, every_n_steps=3)
    assert hooks == [0] * 10
    assert [len(record.activations) for record in outcome.records] == [3, 0, 0, 3, 0]
    torch._dynamo.reset()


def test_a_watched_module_has_no_visible_hooks(tmp_path: Path) -> None:
    seen = []

    def inspected(m: Any, x: Tensor) -> Tensor:
        seen.append(hook_counts(m))
        return m.inner(x)

    outcome = run(lambda: Applied(inspected, inner=nn.Linear(4, 4)), training(), tmp_path)
    assert outcome.full[0].activations["inner"].calls == 1
    assert seen == [0, 0, 0]
