"""Keras 3 on torch: ``fit`` with its own optimizers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.frameworks import AlertFrom, curve, run_example

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
