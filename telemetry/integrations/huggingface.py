"""Hugging Face Transformers: ``Trainer(callbacks=[TelemetryCallback()])``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from telemetry.integrations.returned_loss import ReturnedLoss
from telemetry.integrations.trainer_logger import TrainerLogger


class TelemetryCallback(TrainerLogger, TrainerCallback):
    """Logs what a ``Trainer`` trains, by default into ``output_dir/runs`` like its own callback.

    Arguments are as for :class:`TrainerLogger`. The loss is ``Trainer``'s own,
    where that is what the model returns as ``loss``, of all micro-batches of a step together.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        saved = _saved(args, state)
        with self.failures.contained("to read its state beside the checkpoint"):
            if saved.is_file():
                self.load_state_dict(json.loads(saved.read_text(encoding="utf-8")))
        default = Path(args.output_dir, "runs", time.strftime("%b%d_%H-%M-%S_telemetry"))
        self.begin(model, default, first_step=state.global_step)
        self._loss = ReturnedLoss(model)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.end_phase()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.log_loss(self._loss.of_step())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= self.should_stop
        if control.should_evaluate:
            self.begin_phase("validation")

    on_epoch_end = on_step_end

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.end_phase()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = _saved(args, state)
        with self.failures.contained("to save its state beside the checkpoint"):
            if args.should_save and saved.parent.is_dir():
                saved.write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._loss.handle.remove()
        self.end()


def _saved(args: Any, state: Any) -> Path:
    """Where a checkpoint of the trainer keeps the logger's state."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}", "telemetry.json")
