"""Copies of a watched model log nothing, and close removes all hooks and references."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

import telemetry
from telemetry import HookLogger
from telemetry.testing import capture_run
from tests.helpers.loops import hook_count
from tests.helpers.twins import (
    assert_left_alone,
    assert_same,
    by_pickle,
    by_saving,
    descend,
    loss_of,
    of_ours,
    training,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


def batch() -> Tensor:
    return torch.rand(4, 1, 8, 8)


def train(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    descend(model, batch(), optimizer, steps=steps)
    return optimizer


COPIES = [copy.deepcopy, by_pickle, by_saving]


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.parametrize("steps", [0, 1, 2])  # at 0 and 2 a step is measured
def test_a_copied_model_works_and_logs_nothing(
    make_copy: Callable[[nn.Module], nn.Module], steps: int
) -> None:
    model = Net()
    with capture_run(model, every_n_steps=2) as run:
        optimizer = train(model, steps)
        twin = make_copy(model)
        assert hook_count(twin) == 0
        x = batch()
        copy.copy(model.conv)(x * 100)
        twin(x * 100)
        descend(twin, x * 100)
        assert len(run.records) == steps
        descend(model, x, optimizer)
    record = run.records[-1]
    assert record.step == steps
    if record.full:
        assert [tensor.calls for tensor in record.activations.values()] == [1, 1, 1]


class HoldsItsLogger(Net):
    def __init__(self, log_dir: Path) -> None:
        super().__init__()
        self.logger = HookLogger(self, log_dir, every_n_steps=2)

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.logger.log(mean=output.mean())
        return output


@pytest.mark.slow
@pytest.mark.parametrize("make_copy", [*COPIES, torch.optim.swa_utils.AveragedModel])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_copy_of_a_model_with_a_logger_attribute_has_a_disabled_logger(
    tmp_path: Path, make_copy: Callable[[nn.Module], nn.Module], steps: int
) -> None:
    ours = of_ours()
    model = HoldsItsLogger(tmp_path)
    optimizer = train(model, steps)
    twin = make_copy(model)
    logger: Any = getattr(twin, "module", twin).logger
    assert isinstance(logger, HookLogger)
    twin(batch())
    with logger, logger.phase("validation"):
        logger.step()
        logger.flush()
    assert (logger.current_step, logger.log_dir) == (steps, model.logger.log_dir)
    assert logger.alerts == ()
    logger.log(copy=1.0)
    assert logger.state_dict() == {}
    logger.load_state_dict({"step": 7})
    assert copy.deepcopy(logger).current_step == 7
    descend(model, batch(), optimizer)
    assert model.logger.current_step == steps + 1
    model.logger.close()
    assert copy.copy(model.logger).current_step == steps + 1
    assert len(list(tmp_path.glob("*tfevents*"))) == 1
    assert "copy" not in set(telemetry.read(tmp_path).scalars.tag)
    del model, optimizer, twin, logger
    assert of_ours() <= ours


@pytest.mark.slow
def test_a_saved_model_loads_where_telemetry_is_not_installed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with HookLogger(model, tmp_path):
        torch.save(model, tmp_path / "model.pt")
    script = """
        import sys, torch
        sys.modules["telemetry"] = None
        model = torch.load(sys.argv[1], weights_only=False)
        print(model(torch.ones(1, 2)).shape)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "model.pt")]
    subprocess.run(command, check=True, cwd=tmp_path)


def test_state_dicts_of_a_watched_model_and_its_optimizer_contain_nothing_of_the_logger(
    tmp_path: Path,
) -> None:
    def states(watch: Callable[[nn.Module], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(0)
        model = Net()
        with watch(model):
            optimizer = train(model, 1)
            return model.state_dict(), optimizer.state_dict()

    bare, bare_optimizer = states(nullcontext)
    watched, watched_optimizer = states(lambda model: HookLogger(model, tmp_path, every_n_steps=1))
    assert list(bare) == list(watched)
    for name, value in bare.items():
        assert_same(value, watched[name], name)
    assert bare_optimizer == watched_optimizer


@pytest.mark.slow
def test_outputs_can_be_saved_without_a_warning_and_do_not_keep_the_logger(tmp_path: Path) -> None:
    ours, model = of_ours(), Net()
    logger = HookLogger(model, tmp_path)
    output = model.conv(batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert output._backward_hooks
        torch.save(output, io.BytesIO())
    logger.close()
    del logger, model
    assert len(of_ours() - ours) <= 1  # the hook on the output
    output.sum().backward()


def replicas_of(model: nn.Module, count: int = 2) -> list[nn.Module]:
    """Copy like ``torch.nn.parallel.replicate``, on the CPU: shallow copies of all modules."""
    replicas = []
    for _ in range(count):
        twins = {module: module._replicate_for_data_parallel() for module in model.modules()}
        for module, twin in twins.items():
            for name, child in module._modules.items():
                setattr(twin, name, twins[child])
            for name, parameter in module._parameters.items():
                setattr(twin, name, parameter * 1)
            for name, buffer in module._buffers.items():
                twin._buffers[name] = buffer
        replicas.append(twins[model])
    return replicas


@pytest.mark.parametrize("on_a_thread", [False, True])
@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_replicas_of_data_parallel_are_not_logged(
    tmp_path: Path, every_n_steps: int, on_a_thread: bool
) -> None:
    def loss(model: nn.Module) -> Tensor:
        inputs = [batch(), batch()]
        with ThreadPoolExecutor(1) as thread:  # one, as the replicas share buffers
            apply = thread.map if on_a_thread else map
            outputs = [*apply(lambda replica, x: replica(x), replicas_of(model), inputs)]
        return torch.cat(outputs).square().mean()

    loop = training(loss)
    outcome = assert_left_alone(Net, loop, tmp_path, every_n_steps=every_n_steps)
    assert [record.step for record in outcome.records] == [0, 1, 2]
    assert all(record.grad_present.all() for record in outcome.records)
    assert not any(record.activations for record in outcome.records)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_close_removes_everything_from_the_model(tmp_path: Path, steps: int) -> None:
    pre, post = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    before, of_modules = (len(pre), len(post)), nn.modules.module._global_forward_pre_hooks
    patched = dict(of_modules), torch.autograd.backward
    ours, model = of_ours(), Net()
    state = {name: set(vars(module)) for name, module in model.named_modules()}
    replaced = weakref.ref(model.head)
    logger = HookLogger(model, tmp_path, every_n_steps=2)
    optimizer = train(model, steps)
    other = nn.Linear(2, 2)
    with HookLogger(other, tmp_path / "other"):  # one hook: threads iterate over them
        assert (len(pre), len(post)) == (before[0] + 1, before[1] + 1)
    model.head = nn.Linear(72, 3)
    gc.collect()
    assert replaced() is None
    logger.close()
    del logger
    assert hook_count(model) == 0
    assert (len(pre), len(post)) == before
    assert (dict(of_modules), torch.autograd.backward) == patched
    assert {name: set(vars(module)) for name, module in model.named_modules()} == state
    assert not hasattr(nn.Module, "__prepare_scriptable__")
    assert of_ours() <= ours
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.slow
@pytest.mark.parametrize("make", [Net, lambda: nn.Linear(64, 3)])
@pytest.mark.parametrize(("steps", "in_a_step"), [(0, False), (1, False), (2, False), (0, True)])
def test_a_logger_that_is_dropped_does_not_keep_the_model(
    tmp_path: Path, make: Callable[[], nn.Module], steps: int, in_a_step: bool
) -> None:
    ours, model = of_ours(), make()
    x = batch() if isinstance(model, Net) else torch.rand(2, 64)
    HookLogger(model, tmp_path, every_n_steps=2, modules=nn.Module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    descend(model, x, optimizer, steps=steps)
    references = [weakref.ref(model), weakref.ref(optimizer)]
    if in_a_step:
        model(x).sum().backward()
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert of_ours() <= ours


@pytest.mark.parametrize("every_n_steps", [1, 100])
def test_parameters_of_a_watched_model_can_be_swapped(tmp_path: Path, every_n_steps: int) -> None:
    """``Module.to`` swaps tensors on request, which weak references and hooks would forbid."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        yield from training(lambda m: loss_of(m, batch()), 3)(model, logger)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double()
            yield from training(lambda m: loss_of(m, batch().double()), 2)(model, logger)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    outcome = assert_left_alone(Net, loop, tmp_path, every_n_steps=every_n_steps)
    assert len(outcome.yielded) == 5
    assert outcome.full[0].activation_grads["conv"].calls == 1
