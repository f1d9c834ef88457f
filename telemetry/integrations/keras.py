"""Keras 3 with the torch backend: ``model.fit(..., callbacks=[TelemetryCallback("runs/x")])``."""

from __future__ import annotations

from typing import Any

from keras.callbacks import Callback
from torch import nn

from telemetry.integrations.trainer_logger import TrainerLogger, Writer


class TelemetryCallback(TrainerLogger, Callback):
    """Logs what ``fit`` trains, under the names of the model's layers.

    Steps are counted as the optimizer counts them, so they go on after ``load_model``. The loss is
    Keras' own: the mean over the epoch so far. Arguments are as for :class:`TrainerLogger`.
    """

    def __init__(self, writer: Writer, **options: Any) -> None:
        super().__init__(writer, **options)

    def on_train_begin(self, logs: Any = None) -> None:
        # Keras keeps the layers of most models where PyTorch does not look for them.
        self._layers = nn.Module()
        for layer in self.model.layers:
            self._layers.add_module(layer.name.replace(".", "_"), layer)
        self.begin(self._layers, None, first_step=int(self.model.optimizer.iterations))

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
