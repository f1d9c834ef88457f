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
from torch.optim import SGD

import telemetry
from telemetry import HookLogger
from tests.helpers.twins import assert_left_alone

Train = Callable[[nn.Sequential, int], None]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def one_pass(model: nn.Module) -> None:
    model(torch.randn(3, 2)).square().mean().backward()


def stepping_a_copy(model: nn.Sequential, passes: int) -> None:
    optimizer = SGD(copy.deepcopy(model).parameters(), lr=0.1)
    for _ in range(passes):
        optimizer.zero_grad()
        one_pass(model)
        optimizer.step()


def skipping_every_step(model: nn.Sequential, passes: int) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(passes):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(3, 2)).mean() * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()


def stepping_by_hand(model: nn.Sequential, passes: int) -> None:
    for _ in range(passes):
        one_pass(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad.zero_()


def stepping_behind_autograd(model: nn.Sequential, passes: int) -> None:
    """Optimizer like fastai's: no parameter's version changes, and gradients are kept."""
    for _ in range(passes):
        one_pass(model)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad.data, alpha=-0.1)
            parameter.grad.detach_()
            parameter.grad.zero_()


def forgetting_to_step(model: nn.Sequential, passes: int) -> None:
    for _ in range(passes):
        model.zero_grad()
        one_pass(model)


@pytest.mark.parametrize(
    ("train", "cause"),
    [
        (stepping_a_copy, "made for a copy of the model"),
        (skipping_every_step, "NaN or infinite at each: a GradScaler skips such steps"),
        (forgetting_to_step, "cleared in between: call optimizer.step(), or"),
        (stepping_by_hand, "or logger.step() if there is no"),
        (stepping_behind_autograd, "or logger.step() if there is no"),
    ],
)
def test_passes_without_a_step_are_reported_with_their_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train: Train, cause: str
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path):
        train(model, 19)
        assert not caplog.records
        train(model, 60)
        [message] = caplog.messages
    assert "20 backward passes have reached this model without a step" in message
    assert cause in message


@pytest.mark.parametrize("passes", [12, 60])
def test_passes_that_a_scaler_skips_are_recorded_as_one_step_with_their_origin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, passes: int
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger:
        skipping_every_step(model, passes)
        assert logger.current_step == 0
    assert "a GradScaler skips such steps" in caplog.text
    assert "training goes on" not in caplog.text  # it has ended
    [alert] = logger.alerts
    assert (alert.kind, alert.step) == ("nonfinite", 0)
    assert "the gradient of the loss" in alert.summary
    table = telemetry.read(tmp_path).layers
    assert {"activation_rms", "grad_norm"} <= {*table["statistic"]}


def accumulate(model: nn.Sequential, passes: int) -> None:
    for _ in range(passes):
        one_pass(model)


def accumulate_nan(model: nn.Sequential, passes: int) -> None:
    with torch.no_grad():
        model[2].bias.fill_(torch.nan)
    accumulate(model, passes)


def load_while_accumulating(model: nn.Sequential, passes: int) -> None:
    """A checkpoint is loaded after the first passes."""
    accumulate(model, 7)
    model.load_state_dict(mlp().state_dict())
    accumulate(model, passes - 7)


def reach_parts_in_turn(model: nn.Sequential, passes: int) -> None:
    """Each pass reaches one of two layers, which have other values."""
    for number in range(passes):
        model[number % 2 * 2](torch.randn(3, 2)).square().mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    "gather", [accumulate, accumulate_nan, load_while_accumulating, reach_parts_in_turn]
)
def test_accumulated_gradients_are_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gather: Train
) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with HookLogger(model, tmp_path, every_n_steps=1, alerts=()):
        for _ in range(2):
            gather(model, 200)
            optimizer.step()
            optimizer.zero_grad()
    assert "without a step of" not in caplog.text


@pytest.mark.parametrize("train", [stepping_by_hand, stepping_behind_autograd])
def test_passes_after_the_message_do_not_count_towards_the_step(
    tmp_path: Path, train: Train
) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[None]:
        assert isinstance(model, nn.Sequential)
        train(model, 50)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            one_pass(model)
            optimizer.step()
            yield

    outcome = assert_left_alone(mlp, loop, tmp_path)
    assert [record.activations["0"].calls for record in outcome.full] == [20, 1]


# --- runs that end before their first step -------------------------------------------------------


def nothing(model: nn.Sequential, passes: int) -> None: ...


def training_another(model: nn.Sequential, passes: int) -> None:
    twin = mlp()
    optimizer = SGD(twin.parameters(), lr=0.1)
    for _ in range(passes):
        one_pass(twin)
        optimizer.step()


def evaluating(model: nn.Sequential, passes: int) -> None:
    with torch.no_grad():
        model(torch.randn(3, 2))


def going_forward(model: nn.Sequential, passes: int) -> None:
    model(torch.randn(3, 2))


@pytest.mark.parametrize(
    ("train", "seen"),
    [
        (accumulate, "12 backward passes, no optimizer step: call optimizer.step(), or"),
        (stepping_a_copy, "12 backward passes, 12 steps of optimizers with other parameters; "),
        (training_another, "the model never ran, 12 steps of optimizers with other parameters"),
        (evaluating, "the model ran in evaluation mode, without gradients or on another thread"),
        (going_forward, "the model ran, but no backward pass has reached its parameters"),
        (nothing, "the model never ran, no optimizer step"),
    ],
)
def test_a_run_without_steps_is_reported_once_at_its_end_with_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train: Train, seen: str
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
    [message] = caplog.messages
    assert "0 steps recorded, no backward pass followed, no optimizer step" in message


def test_a_deleted_model_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    HookLogger(mlp(), tmp_path / "run")
    gc.collect()  # other models may be reported, too
    [record] = [record for record in caplog.records if record.name == "telemetry"]
    assert "0 steps recorded, the model" in record.getMessage()
    with pytest.raises(ValueError, match="the model is deleted; keep a reference"):
        HookLogger(nn.ModuleList([mlp()]), tmp_path / "other").__enter__()


def test_a_phase_or_an_exception_explains_missing_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger, logger.phase("validation"):
        evaluating(model, 1)
    with pytest.raises(TypeError), HookLogger(model, tmp_path):
        one_pass(None)  # type: ignore[arg-type]
    assert "0 steps recorded" not in caplog.text
