"""The loss that a model returns, as those of Transformers do when they are given labels."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from telemetry.capture.inert import Inert
from telemetry.integrations.trainer_logger import TrainerLogger


class ReturnedLoss(Inert):
    """A hook that logs the item ``"loss"`` of what a model returns in training.

    Compiled models show no loss.

    Args:
        logger: Logs it.
        model: The model.
    """

    def __init__(self, logger: TrainerLogger, model: nn.Module) -> None:
        self._logger, self._model = weakref.ref(logger), weakref.ref(model)
        self.handle: RemovableHandle = model.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        logger, loss = self._logger(), output.get("loss") if isinstance(output, Mapping) else None
        # A module that shares its hooks with the model is a copy, as DataParallel makes.
        if logger is not None and loss is not None and module is self._model():
            logger.log_loss(loss)
