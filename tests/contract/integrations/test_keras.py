"""Keras 3 on torch: ``fit`` with its own optimizers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from telemetry import HookLogger
from tests.helpers.frameworks import AlertFrom, curve, run_example
from tests.helpers.twins import Recorder

os.environ["KERAS_BACKEND"] = "torch"

import keras

from telemetry.integrations.keras import TelemetryCallback

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")


def model_of() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.layers.Input((4,)), keras.layers.Dense(6, activation="relu", name="hidden"),
        keras.layers.Dense(2, name="out"),
    ])  # fmt: skip
    model.compile(optimizer="adam", loss="mse")
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 1) -> None:
    model.fit(X, X[:, :2], batch_size=4, epochs=epochs, validation_split=0.25, verbose=0,
              callbacks=list(callbacks))  # fmt: skip


@pytest.mark.usefixtures("silent")
def test_the_callback_logs_layers_by_name_and_leaves_training_alone(tmp_path: Path) -> None:
    bare = model_of()
    fit(bare)
    fit(bare)
    watched, callback = model_of(), TelemetryCallback(tmp_path, every_n_steps=2)
    fit(watched, callback)
    fit(watched, callback)
    for expected, got in zip(bare.get_weights(), watched.get_weights(), strict=True):
        np.testing.assert_array_equal(expected, got)
    assert sorted(curve(tmp_path, "loss")) == list(range(10))
    assert sorted(curve(tmp_path, "grad_norm/total")) == list(range(10))
    assert curve(tmp_path, "activation/0000.hidden")
    assert curve(tmp_path, "validation/activation/0000.hidden")
    assert curve(tmp_path, "activation_grad/0000.hidden")
    assert curve(tmp_path, "activation_grad/0002.out")
    watched.save(tmp_path / "saved.keras")
    fit(keras.models.load_model(tmp_path / "saved.keras"), TelemetryCallback(tmp_path))
    assert sorted(curve(tmp_path, "loss")) == list(range(15))


def test_a_sequential_is_reported_and_its_layers_are_logged_in_a_module_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keras stores the layers of a Sequential outside of the modules that PyTorch registers."""
    model, recorder = model_of(), Recorder()
    layers = nn.ModuleList(model.layers)

    def train(logger: HookLogger) -> None:
        for _ in range(3):
            model.zero_grad()
            model(torch.rand(8, 4), training=True).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            logger.step()

    with HookLogger(model, tmp_path / "model") as logger:
        train(logger)
    [message] = [record.getMessage() for record in caplog.records]
    assert "Keras keeps the layers of such a model where PyTorch does not look" in message
    assert "layers = torch.nn.ModuleList(model.layers)" in message
    with HookLogger(layers, tmp_path / "layers", alerts=[recorder], every_n_steps=1) as logger:
        train(logger)
    assert [list(record.activations) for record in recorder.records] == [["0", "1"]] * 3
    assert all(set(record.activation_grads) == {"0", "1"} for record in recorder.records)
    assert len(caplog.records) == 1


class Block(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="block")
        self.inner = keras.layers.Dense(6, activation="relu")

    def call(self, x: Any) -> Any:
        return self.inner(x)


def test_a_model_that_fit_builds_has_its_parameters(tmp_path: Path) -> None:
    model = keras.Sequential([Block(), keras.layers.Dense(2, name="out")])
    model.compile(optimizer="adam", loss="mse")
    fit(model, TelemetryCallback(tmp_path, every_n_steps=2))
    assert sorted(curve(tmp_path, "grad_norm/total")) == list(range(5))
    assert curve(tmp_path, "activation/0000.block.inner")
    assert curve(tmp_path, "activation/0002.out")


def test_an_alert_stops_the_training_of_a_run_in_the_default_directory() -> None:
    model = model_of()
    fit(model, TelemetryCallback(alerts=[AlertFrom(2)], on_alert="stop"), epochs=10_000)
    assert 2 < (steps := int(model.optimizer.iterations)) < 50_000
    [run] = Path("runs").iterdir()
    assert list(curve(run, "loss")) == list(range(steps))


def test_the_example_of_the_docs_runs() -> None:
    run_example("Keras", model=model_of(), x=X, y=X[:, :2])
    assert list(curve(Path("runs/first"), "loss")) == [0, 1]
