"""A loop with Accelerate, its tracking and its checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import accelerate
import pytest
import torch
from torch import nn

from telemetry import HookLogger
from telemetry.integrations.accelerate import TelemetryTracker
from tests.helpers.frameworks import (
    AlertFrom,
    assert_complete,
    batches,
    curve,
    mlp,
    run_example,
    same_weights,
)
from tests.helpers.twins import Recorder


def train(
    folder: Path, tracker: TelemetryTracker | None, *, resume: bool = False, epochs: int = 1
) -> nn.Module:
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        log_with=tracker,
        project_dir=folder,
    )
    accelerator.init_trackers("project", {"lr": 0.1, "layers": [4, 6]})
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    if tracker is not None:
        tracker.watch(accelerator, model)
    if resume:
        accelerator.load_state(folder / "saved")
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.log({"loss": loss, "note": "text"})
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if tracker is not None and tracker.should_stop:
                break
    accelerator.save_state(folder / "saved", safe_serialization=False)
    accelerator.end_training()
    return model


def test_the_tracker_logs_a_loop_and_a_checkpoint_resumes_its_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    bare = train(tmp_path / "bare", None)
    watched = train(tmp_path, TelemetryTracker(run))
    assert same_weights(bare, watched)
    assert list(curve(run, "loss")) == list(curve(run, "grad_norm/total")) == [0, 1, 2]
    assert curve(run, "_hparams_/session_start_info")
    train(tmp_path, TelemetryTracker(run), resume=True)
    assert sorted(curve(run, "grad_norm/total")) == list(range(6))
    # How many full steps rules request in so short a run depends on the worker's timing.
    messages = [record.msg for record in caplog.records if record.name.startswith("telemetry")]
    assert [message for message in messages if "full steps" not in message] == []


def test_steps_of_an_optimizer_that_accelerate_prepared_are_logged(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, recorder = mlp(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    with HookLogger(prepared, tmp_path, optimizer=optimizer, alerts=[recorder], every_n_steps=1):
        for x, _ in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    assert_complete(recorder.records, steps=3, calls=2)


def test_an_alert_sets_should_stop_in_a_run_in_the_default_directory(tmp_path: Path) -> None:
    tracker = TelemetryTracker(alerts=[AlertFrom(0)], on_alert="stop")
    train(tmp_path, tracker, epochs=200)
    assert tracker.should_stop
    [run] = Path("runs").iterdir()
    assert list(curve(run, "loss"))[:2] == [0, 1]


def test_the_example_of_the_docs_runs() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "loader": batches()}
    run_example(
        "Accelerate",
        Accelerator=partial(accelerate.Accelerator, cpu=True),
        loss_function=nn.functional.mse_loss,
        **names,
    )
    assert list(curve(Path("runs/first"), "loss")) == list(range(6))
