"""Lightning: ``Trainer(callbacks=[TelemetryCallback()])``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger
except ImportError:  # its former name
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.loggers import TensorBoardLogger

from telemetry.integrations.trainer_logger import TrainerLogger


class TelemetryCallback(TrainerLogger, Callback):
    """Logs the model of a Lightning trainer, by default into the trainer's TensorBoard run.

    Arguments are as for :class:`TrainerLogger`. The loss is that of automatic optimization; with
    manual optimization, log it with ``callback.hook_logger.log(loss=...)``.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loggers = [each for each in trainer.loggers if isinstance(each, TensorBoardLogger)]
        default = os.path.join(trainer.default_root_dir, "telemetry")
        writer = loggers[0].experiment if loggers else default
        self.begin(pl_module, writer, first_step=trainer.global_step)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        if pl_module.automatic_optimization:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = 1 if scaler is None else scaler.scale(torch.ones_like(loss.detach()))
            # Lightning has divided it by the number of micro-batches and multiplied it by scale.
            self.log_loss(loss.detach() * trainer.accumulate_grad_batches / scale)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop |= self.should_stop

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.hook_logger is not None and not trainer.sanity_checking:
            self.begin_phase("validation")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.end_phase()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        self.end(exception)
