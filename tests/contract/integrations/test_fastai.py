"""fastai's learner, with its own optimizer and with torch's."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam, OptimWrapper
from torch import nn

from telemetry import HookLogger
from telemetry.integrations.fastai import TelemetryCallback
from tests.helpers.frameworks import AlertFrom, batches, curve, mlp, run_example, same_weights


def learner(optimizer: Any = Adam, *callbacks: Any) -> Learner:
    return Learner(
        DataLoaders(batches(), batches()), mlp(), loss_func=nn.functional.mse_loss,
        opt_func=optimizer, cbs=list(callbacks),
    )  # fmt: skip


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("optimizer", [Adam, partial(OptimWrapper, opt=torch.optim.AdamW)])
def test_the_callback_logs_several_fits_as_one_run_and_leaves_training_alone(
    tmp_path: Path, optimizer: Any
) -> None:
    bare, watched = learner(optimizer), learner(optimizer, TelemetryCallback(tmp_path))
    for each in (bare, watched):
        each.fit(1)
        each.fit(1)
    assert same_weights(bare.model, watched.model)
    assert sorted(curve(tmp_path, "loss")) == list(range(12))
    assert sorted(curve(tmp_path, "grad_norm/total")) == list(range(12))
    assert curve(tmp_path, "validation/activation/0000.0")
    watched.save(tmp_path / "saved")
    later = learner(optimizer, TelemetryCallback(tmp_path)).load(tmp_path / "saved")
    later.fit(1)
    assert sorted(curve(tmp_path, "loss")) == list(range(18))


def test_a_logger_without_the_callback_warns_early_that_it_counts_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare, watched = learner(), learner()
    bare.fit(6)
    with HookLogger(watched.model, tmp_path):
        watched.fit(6)
    assert same_weights(bare.model, watched.model)
    [record] = [record for record in caplog.records if record.name.startswith("telemetry")]
    assert record.levelno == logging.WARNING
    assert TelemetryCallback.__module__ in record.getMessage()


def test_an_alert_cancels_the_fit_of_a_run_in_the_default_directory() -> None:
    callback = TelemetryCallback(alerts=[AlertFrom(2)], on_alert="stop")
    learner(Adam, callback).fit(10_000)
    assert 2 < (steps := callback.hook_logger.current_step) < 60_000
    [run] = Path("runs").iterdir()
    assert list(curve(run, "loss")) == list(range(steps))


def test_the_example_of_the_docs_runs() -> None:
    names = {"Learner": Learner, "loaders": DataLoaders(batches(), batches()), "model": mlp()}
    run_example("fastai", loss_function=nn.functional.mse_loss, **names)
    assert list(curve(Path("runs/first"), "loss")) == list(range(12))
