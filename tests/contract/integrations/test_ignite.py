"""Ignite's engines, with its own checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint
from torch import nn

from telemetry.integrations.ignite import TelemetryHandler
from tests.helpers.frameworks import AlertFrom, batches, curve, mlp, run_example, same_weights


def trainer_of(model: nn.Module, output: Callable[..., Any] | None = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {} if output is None else {"output_transform": output}
    return create_supervised_trainer(model, optimizer, nn.functional.mse_loss, **options)


@pytest.mark.usefixtures("silent")
def test_the_handler_logs_an_engine_and_leaves_training_alone(tmp_path: Path) -> None:
    bare, watched = mlp(), mlp()
    trainer_of(bare).run(batches(), max_epochs=2)
    trainer, evaluator = trainer_of(watched), create_supervised_evaluator(watched)
    losses: list[float] = []
    handler = TelemetryHandler(tmp_path)
    handler.attach(trainer, watched, {"validation": evaluator})
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda e: losses.append(e.state.output))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(batches()))
    trainer.run(batches(), max_epochs=2)
    assert same_weights(bare, watched)
    assert curve(tmp_path, "loss") == pytest.approx(dict(enumerate(losses, start=1)))
    assert list(curve(tmp_path, "grad_norm/total")) == list(range(12))
    assert curve(tmp_path, "validation/activation/0000.0")


@pytest.mark.usefixtures("silent")
def test_a_checkpoint_of_the_engine_resumes_the_steps(tmp_path: Path) -> None:
    for epochs in (1, 2, 3):
        model = mlp()
        trainer = trainer_of(model, lambda *values: {"loss": values[-1]})
        handler = TelemetryHandler(tmp_path)
        handler.attach(trainer, model)
        saved = {"trainer": trainer, "telemetry": handler}
        if epochs > 1:
            loaded = saved if epochs == 2 else {"trainer": trainer}  # of an older checkpoint
            Checkpoint.load_objects(loaded, torch.load(tmp_path / "saved.pt"))
        trainer.run(batches(), max_epochs=epochs)
        torch.save({name: each.state_dict() for name, each in saved.items()}, tmp_path / "saved.pt")
    assert sorted(curve(tmp_path, "grad_norm/total")) == list(range(18))
    assert sorted(curve(tmp_path, "loss")) == list(range(1, 19))


def test_an_alert_terminates_the_engine_of_a_run_in_the_default_directory() -> None:
    model = mlp()
    trainer = trainer_of(model, lambda *values: "no number")
    TelemetryHandler(alerts=[AlertFrom(2)], on_alert="stop").attach(trainer, model)
    state = trainer.run(batches(), max_epochs=10_000)
    assert 2 < state.iteration < 60_000
    [run] = Path("runs").iterdir()
    assert list(curve(run, "grad_norm/total")) == list(range(state.iteration))


def test_the_example_of_the_docs_runs() -> None:
    model = mlp()
    names = {"model": model, "trainer": trainer_of(model), "loader": batches()}
    run_example("Ignite", evaluator=create_supervised_evaluator(model), **names)
    assert list(curve(Path("runs/first"), "loss")) == list(range(1, 13))
