"""Hugging Face Transformers: ``Trainer(callbacks=[TelemetryCallback()])``."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from telemetry.capture.hooks import Inert
from telemetry.integrations.trainer_logger import TrainerLogger


class TelemetryCallback(TrainerLogger, TrainerCallback):
    """Logs the model of a ``Trainer``, by default into the run that its own callback writes.

    Without ``report_to="tensorboard"`` it writes into a new directory in ``output_dir/runs``.

    Arguments are as for :class:`TrainerLogger`. The loss is the mean over all micro-batches of a
    step, if the model returns it as ``loss``.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        saved = _saved(args, state)
        with self.failures.contained("to read its state next to the checkpoint"):
            if saved.is_file():
                self.load_state_dict(json.loads(saved.read_text(encoding="utf-8")))
        self.begin(model, _log_dir(args), first_step=state.global_step)
        ranks = args.world_size // (getattr(model, "tp_size", None) or 1)
        self._loss = ReturnedLoss(model, ranks if args.average_tokens_across_devices else 1)

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
        with self.failures.contained("to save its state next to the checkpoint"):
            if args.should_save and saved.parent.is_dir():
                saved.write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._loss.handle.remove()
        self.end()


def _log_dir(args: Any) -> Path:
    """Return the directory that the trainer's own callback has just begun, else a new one."""
    runs = Path(args.output_dir, "runs")
    if "tensorboard" in args.report_to:
        if given := os.environ.get("TENSORBOARD_LOGGING_DIR"):
            return Path(given).expanduser()
        of_process = runs.glob(f"*/events.out.tfevents.*.{os.getpid()}.*")
        if newest := max(of_process, key=lambda path: path.stat().st_mtime_ns, default=None):
            return newest.parent
    return runs / time.strftime("%b%d_%H-%M-%S_telemetry")


def _saved(args: Any, state: Any) -> Path:
    """Return the file of the logger's state in a checkpoint of the trainer."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}", "telemetry.json")


class ReturnedLoss(Inert):
    """Forward hook that keeps ``"loss"`` of the output of an uncompiled model in training.

    ``ranks`` is the number of ranks whose items ``num_items_in_batch`` counts together.
    """

    def __init__(self, model: nn.Module, ranks: int = 1) -> None:
        self._model = weakref.ref(model)
        self._ranks = ranks
        self._losses: list[Tensor] = []
        self._are_shares = False
        self.handle: RemovableHandle = model.register_forward_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, named: Mapping[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        loss = output.get("loss") if isinstance(output, Mapping) else None
        # Copies of the model share its hooks, as in DataParallel.
        if isinstance(loss, Tensor) and loss.numel() == 1 and module is self._model():
            # Trainer may multiply it in place by the number of ranks.
            self._losses.append(loss.detach().clone())
            self._are_shares = named.get("num_items_in_batch") is not None

    def of_step(self) -> Tensor | None:
        """Return the loss of all micro-batches since the last call, as ``Trainer`` computes it.

        A model that receives ``num_items_in_batch`` returns its share of the mean over all ranks.
        """
        losses, self._losses = self._losses, []
        if not losses:
            return None
        total = torch.stack([loss.reshape(()) for loss in losses]).sum()
        return total * self._ranks if self._are_shares else total / len(losses)
