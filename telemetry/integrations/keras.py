"""Keras 3 with the torch backend: ``model.fit(..., callbacks=[TelemetryCallback("runs/x")])``."""

from __future__ import annotations

from typing import Any

from keras.callbacks import Callback
from keras.layers import Layer
from torch import nn

from telemetry.integrations.trainer_logger import TrainerLogger


class TelemetryCallback(TrainerLogger, Callback):
    """Logs the model of ``fit``, under the names of its layers.

    Steps are the optimizer's iterations, so they continue after ``load_model``. The loss is the
    running mean of the epoch, as in Keras. Arguments are as for :class:`TrainerLogger`.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        # named_modules() of most Keras models does not contain their layers.
        self._layers = nn.Module()
        for layer in self.model.layers:
            self._layers.add_module(layer.name.replace(".", "_"), layer)
        # Keras registers the parameters of a layer that fit() built at the first access.
        for layer in self._layers.modules():
            if isinstance(layer, Layer):
                layer.torch_params  # noqa: B018
        self.begin(self._layers, first_step=int(self.model.optimizer.iterations))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.hook_logger is not None:
            self.log_loss(logs["loss"])
            self.hook_logger.step()  # Keras' optimizers are not torch's
        if self.should_stop:
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        self.begin_phase("validation")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.end_phase()

    def on_train_end(self, logs: Any = None) -> None:
        self.end()
