"""Training without a step of an optimizer of this model is logged once, with usual causes."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from telemetry import HookLogger
from telemetry.capture.missed_steps import PASSES_WITHOUT_STEP, MissedSteps
from tests.helpers.twins import assert_left_alone


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


def one_pass(model: nn.Module) -> None:
    model(torch.randn(3, 2)).square().mean().backward()


def stepping_a_copy(model: nn.Module, passes: int) -> None:
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(passes):
        optimizer.zero_grad()
        one_pass(model)
        optimizer.step()


def skipping_every_step(model: nn.Module, passes: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(passes):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 2)).mean() * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def stepping_by_hand(model: nn.Module, passes: int) -> None:
    for _ in range(passes):
        one_pass(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad.zero_()


def stepping_behind_autograd(model: nn.Module, passes: int) -> None:
    """Optimizer like fastai's: no version changes, and gradients are cleared in place."""
    for _ in range(passes):
        one_pass(model)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad.data, alpha=-0.1)
            parameter.grad.data.zero_()


def forgetting_to_step(model: nn.Module, passes: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(passes):
        optimizer.zero_grad()
        one_pass(model)


CAUSES: list[tuple[Callable[[nn.Module, int], None], str]] = [
    (stepping_a_copy, "made for a copy of the model"),
    (skipping_every_step, "unless the GradScaler skips every step"),
    (forgetting_to_step, "cleared in between: call optimizer.step(), or"),
    (stepping_by_hand, "call logger.step()"),
    (stepping_behind_autograd, "call logger.step()"),
]


@pytest.mark.parametrize(("train", "cause"), CAUSES)
def test_passes_without_a_step_are_reported_with_their_cause(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    train: Callable[[nn.Module, int], None],
    cause: str,
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path):
        train(model, PASSES_WITHOUT_STEP - 1)
        assert not caplog.records
        train(model, 60)
    [record] = caplog.records
    assert "20 backward passes have reached this model without a step" in record.getMessage()
    assert cause in record.getMessage()
    assert ("GradScaler" in record.getMessage()) == (train is skipping_every_step)


def accumulate(model: nn.Module, passes: int) -> None:
    for _ in range(passes):
        one_pass(model)


def accumulate_nan(model: nn.Module, passes: int) -> None:
    with torch.no_grad():
        model[2].bias.fill_(torch.nan)
    accumulate(model, passes)


def load_while_accumulating(model: nn.Module, passes: int) -> None:
    """A checkpoint is loaded after the first pass."""
    for number in range(passes):
        one_pass(model)
        if number == 6:
            model.load_state_dict(mlp().state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("gather", [accumulate, accumulate_nan, load_while_accumulating])
def test_accumulated_gradients_are_not_reported(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    gather: Callable[[nn.Module, int], None],
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with HookLogger(model, tmp_path, every_n_steps=1, alerts=()):
        for _ in range(2):
            gather(model, 10 * PASSES_WITHOUT_STEP)
            optimizer.step()
            optimizer.zero_grad()
    assert not [r for r in caplog.records if "without a step of" in r.getMessage()]


def test_each_parameter_is_compared_with_its_own_earlier_state() -> None:
    one, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    missed_steps = MissedSteps()
    for passes in range(1, 2 * PASSES_WITHOUT_STEP):
        reached = one if passes % 2 else other
        assert missed_steps.after_pass(passes, {id(reached): reached}) is None


@pytest.mark.parametrize("train", [stepping_by_hand, stepping_behind_autograd])
def test_passes_after_the_message_do_not_count_towards_the_step(
    tmp_path: Path, train: Callable[[nn.Module, int], None]
) -> None:
    """The step in progress has the passes up to the message."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[None]:
        train(model, 50)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            one_pass(model)
            optimizer.step()
            yield

    outcome = assert_left_alone(mlp, loop, tmp_path)
    assert [record.activations["0"].calls for record in outcome.full] == [PASSES_WITHOUT_STEP, 1]


# --- runs that end before their first step -------------------------------------------------------


def nothing(model: nn.Module, passes: int) -> None:
    pass


def training_another(model: nn.Module, passes: int) -> None:
    twin = mlp()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(passes):
        one_pass(twin)
        optimizer.step()


def evaluating(model: nn.Module, passes: int) -> None:
    with torch.no_grad():
        model(torch.randn(3, 2))


def going_forward(model: nn.Module, passes: int) -> None:
    model(torch.randn(3, 2))


def failing(model: nn.Module, passes: int) -> None:
    one_pass(model)
    raise ValueError("planted")


ENDS: list[tuple[Callable[[nn.Module, int], None], str]] = [
    (accumulate, "12 backward passes, no optimizer step: call optimizer.step(), or"),
    (stepping_a_copy, "12 backward passes, 12 steps of optimizers with other parameters; those"),
    (training_another, "the model never ran, 12 steps of optimizers with other parameters"),
    (evaluating, "the model ran in evaluation mode, without gradients or on another thread only"),
    (going_forward, "the model ran, but no backward pass has reached its parameters"),
    (nothing, "the model never ran, no optimizer step"),
]


@pytest.mark.parametrize(("train", "seen"), ENDS)
def test_a_run_without_steps_is_reported_at_its_end_with_the_cause(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    train: Callable[[nn.Module, int], None],
    seen: str,
) -> None:
    caplog.set_level(logging.INFO, "telemetry")
    model = mlp()
    with HookLogger(model, tmp_path) as logger:
        train(model, 12)
    logger.close()
    [record] = [r for r in caplog.records if "recorded" in r.getMessage()]
    assert record.levelno == (logging.INFO if train is nothing else logging.WARNING)
    assert record.getMessage().startswith(f"0 steps recorded, {seen}")
    assert "\n" not in record.getMessage()


def test_a_run_that_ends_before_its_first_full_step_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path, first_step=3):
        accumulate(model, 12)
    [record] = caplog.records
    assert "0 steps recorded, no backward pass followed, no optimizer step" in record.getMessage()


def test_a_deleted_model_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    HookLogger(mlp(), tmp_path)
    gc.collect()  # other models may be reported, too
    [record] = [record for record in caplog.records if record.name == "telemetry"]
    assert "0 steps recorded, the model" in record.getMessage()


def test_a_with_block_of_a_deleted_model_raises_with_the_reason(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="the model is deleted; keep a reference"):
        HookLogger(torch.nn.ModuleList([mlp()]), tmp_path).__enter__()


def test_a_phase_or_an_exception_explains_missing_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger, logger.phase("validation"):
        evaluating(model, 1)
    with pytest.raises(ValueError, match="planted"), HookLogger(model, tmp_path):
        failing(model, 1)
    assert "0 steps recorded" not in caplog.text
