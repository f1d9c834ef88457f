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
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optim_module

from telemetry import HookLogger
from tests.helpers.twins import Recorder, assert_left_alone, assert_same, by_pickle, by_saving, run


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
    for _ in range(steps):
        model(batch()).sum().backward()
        optimizer.step()
    return optimizer


COPIES = [copy.deepcopy, by_pickle, by_saving]


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.parametrize("steps", [0, 1, 2])  # at 0 and 2 a step is measured
def test_a_copied_model_works_and_logs_nothing(
    tmp_path: Path, make_copy: Callable[[nn.Module], nn.Module], steps: int
) -> None:
    model, recorder = Net(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=2) as logger:
        optimizer = train(model, steps)
        twin = make_copy(model)
        assert hook_counts(twin) == 0
        x = batch()
        twin(x * 100)
        twin(x * 100).sum().backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert logger.current_step == steps
        model(x).sum().backward()
        optimizer.step()
    record = recorder.records[-1]
    if record.full:
        assert [tensor.calls for tensor in record.activations.values()] == [1, 1, 1]


def test_a_moving_average_by_deepcopy_leaves_training_alone(tmp_path: Path) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(batch()).square().mean()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            average(batch())
            yield loss

    outcome = assert_left_alone(Net, loop, tmp_path)
    assert all(record.activations["conv"].calls == 1 for record in outcome.full)


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
    assert logger.state_dict() == {}
    logger.load_state_dict({"step": 7})
    assert copy.deepcopy(logger).current_step == 7
    model(batch()).sum().backward()
    optimizer.step()
    assert model.logger.current_step == steps + 1
    model.logger.close()
    assert copy.copy(model.logger).current_step == steps + 1
    reference = weakref.ref(model.logger._run._capture)
    del model, optimizer
    gc.collect()
    assert reference() is None


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
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "model.pt")],
        check=True,
        timeout=120,
        cwd=tmp_path,
    )


def test_state_dicts_of_a_watched_model_and_its_optimizer_contain_nothing_of_the_logger(
    tmp_path: Path,
) -> None:
    def states() -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(0)
        model = Net()
        optimizer = train(model, 1)
        return model.state_dict(), optimizer.state_dict()

    def watched_states() -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(0)
        model = Net()
        with HookLogger(model, tmp_path, every_n_steps=1):
            optimizer = train(model, 1)
            return model.state_dict(), optimizer.state_dict()

    (bare, bare_optimizer), (watched, watched_optimizer) = states(), watched_states()
    assert list(bare) == list(watched)
    for name, value in bare.items():
        assert_same(value, watched[name], name)
    assert bare_optimizer == watched_optimizer


def test_outputs_can_be_saved_without_a_warning(tmp_path: Path) -> None:
    model = Net()
    with HookLogger(model, tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        output = model.conv(batch())
        assert output._backward_hooks
        torch.save(output, io.BytesIO())


@pytest.mark.slow
def test_outputs_that_the_user_keeps_do_not_keep_the_logger(tmp_path: Path) -> None:
    model = Net()
    logger = HookLogger(model, tmp_path)
    output = model(batch())
    logger.close()
    hooks = weakref.ref(logger._run._capture)
    del logger
    gc.collect()
    assert hooks() is None
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


@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_replicas_of_data_parallel_are_not_logged(tmp_path: Path, every_n_steps: int) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            replicas = replicas_of(model)
            outputs = [replica(batch()) for replica in replicas]
            loss = torch.cat(outputs).square().mean()
            loss.backward()
            optimizer.step()
            yield loss

    outcome = assert_left_alone(Net, loop, tmp_path, every_n_steps=every_n_steps)
    assert [record.step for record in outcome.records] == [0, 1, 2]
    assert all(record.grad_present.all() for record in outcome.records)
    assert not any(record.activations for record in outcome.records)


def test_replicas_on_separate_threads_are_not_logged(tmp_path: Path) -> None:
    model, recorder = Net(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=1):
        with ThreadPoolExecutor() as threads:
            outputs = list(threads.map(lambda replica: replica(batch()), replicas_of(model)))
        torch.cat(outputs).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    [record] = recorder.records
    assert not record.activations
    assert record.grad_present.all()


def test_a_shallow_copy_of_a_module_is_not_logged(tmp_path: Path) -> None:
    model, recorder = Net(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=1):
        copy.copy(model.conv)(batch())
        train(model, 1)
    assert recorder.records[0].activations["conv"].calls == 1


# --- nothing is left ------------------------------------------------------------------------------


def hook_counts(model: nn.Module) -> int:
    modules = [
        hooks
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "hooks" in name and hooks
    ]
    parameters = [
        p for p in model.parameters() if p._backward_hooks or p._post_accumulate_grad_hooks
    ]
    return len(modules) + len(parameters)


def of_ours() -> set[int]:
    """Return the identities of all live objects of this package."""
    gc.collect()
    ours = ("telemetry.capture", "telemetry.run")
    return {id(o) for o in gc.get_objects() if str(type(o).__module__).startswith(ours)}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_close_removes_everything_from_the_model(tmp_path: Path, steps: int) -> None:
    global_hooks = (
        optim_module._global_optimizer_pre_hooks,
        optim_module._global_optimizer_post_hooks,
    )
    before = [len(hooks) for hooks in global_hooks]
    ours = of_ours()
    model = Net()
    state = {name: set(vars(module)) for name, module in model.named_modules()}
    logger = HookLogger(model, tmp_path, every_n_steps=2)
    optimizer = train(model, steps)
    logger.close()
    del logger
    assert hook_counts(model) == 0
    assert [len(hooks) for hooks in global_hooks] == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == state
    assert not hasattr(nn.Module, "__prepare_scriptable__")
    assert of_ours() <= ours
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.slow
@pytest.mark.parametrize("make", [Net, lambda: nn.Linear(64, 3)])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_logger_that_is_dropped_does_not_keep_the_model(
    tmp_path: Path, make: Callable[[], nn.Module], steps: int
) -> None:
    ours = of_ours()
    model = make()
    HookLogger(model, tmp_path, every_n_steps=2, modules=nn.Module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(batch() if isinstance(model, Net) else torch.rand(2, 64)).sum().backward()
        optimizer.step()
    references = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert of_ours() <= ours


@pytest.mark.slow
def test_a_model_dropped_in_the_middle_of_a_step_is_freed(tmp_path: Path) -> None:
    model = Net()
    HookLogger(model, tmp_path, every_n_steps=1)
    model(batch()).sum().backward()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.slow
def test_a_replaced_module_is_freed(tmp_path: Path) -> None:
    model = Net()
    with HookLogger(model, tmp_path, every_n_steps=100):
        train(model, 1)
        reference = weakref.ref(model.head)
        model.head = nn.Linear(72, 5)
        gc.collect()
        assert reference() is None


def test_parameters_of_a_watched_model_can_be_swapped(tmp_path: Path) -> None:
    """``Module.to`` swaps tensors on request, which weak references and hooks would forbid."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(batch().double()).square().mean()
                loss.backward()
                optimizer.step()
                yield loss
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    outcome = assert_left_alone(Net, loop, tmp_path)
    assert run(Net, loop, None).yielded
    assert outcome.full[0].activation_grads["conv"].calls == 1
