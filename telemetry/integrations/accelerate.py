"""Accelerate: ``Accelerator(log_with=TelemetryTracker("runs/x"))``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import Tensor, nn

from telemetry.integrations.trainer_logger import TrainerLogger
from telemetry.run.logger import HookLogger


class TelemetryTracker(TrainerLogger, GeneralTracker):
    """Tracker that logs the model of an Accelerate loop.

    ``accelerator.init_trackers()`` registers it, :meth:`watch` starts it,
    ``accelerator.log({"loss": loss})`` logs at the step in progress, ``accelerator.end_training()``
    closes it. Checkpoints of ``accelerator.save_state()`` hold its state. With ``on_alert="stop"``,
    leave the loop when ``tracker.should_stop``. Arguments are as for :class:`TrainerLogger`.
    """

    name = "telemetry"
    requires_logging_directory = False
    main_process_only = False  # all ranks write one run
    _configuration: Mapping[str, Any] = {}

    @property
    def tracker(self) -> HookLogger | None:
        return self.hook_logger

    def watch(self, accelerator: Accelerator, model: nn.Module) -> HookLogger:
        """Start logging the training of a model, after ``accelerator.prepare``."""
        accelerator.register_for_checkpointing(self)
        logger = self.begin(model)
        if self._configuration:
            logger.hparams(self._configuration)
        return logger

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        shown = {name: v for name, v in values.items() if isinstance(v, bool | int | float | str)}
        self._configuration = shown

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if self.hook_logger is not None:
            numbers = {tag: v for tag, v in values.items() if isinstance(v, int | float | Tensor)}
            self.hook_logger.log(numbers)

    def finish(self) -> None:
        self.end()
