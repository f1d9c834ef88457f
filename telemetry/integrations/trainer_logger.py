"""Base class of all callbacks: the logger of a trainer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils import tensorboard

from telemetry.failures import Failures
from telemetry.run.arguments import setting
from telemetry.run.logger import HookLogger


class TrainerLogger:
    """:class:`HookLogger` that is created at the beginning of a training and closed at its end.

    Args:
        log_dir: As for ``HookLogger``; None: ``TELEMETRY_LOG_DIR``, or the directory of the
            trainer, if it has one.
        options: Other arguments of ``HookLogger``; TypeError for any other. With
            ``on_alert="stop"`` the trainer stops by its own means, on all ranks at the same step.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | tensorboard.SummaryWriter | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        try:
            inspect.signature(HookLogger).bind(None, None, **options)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: HookLogger {error}") from None
        self.hook_logger: HookLogger | None = None  # of the latest training, open or closed
        self.failures = Failures()
        self._log_dir = log_dir
        self._options = options
        self._state: Mapping[str, Any] | None = None
        self._phase = ExitStack()
        self._loss_step = -1
        self._training = False

    def begin(self, model: nn.Module, log_dir: Any = None, **options: Any) -> HookLogger:
        """Start logging the training of ``model``.

        ``log_dir`` and ``options`` are those of the trainer; those of the user override them.
        """
        self.end()
        log_dir = setting("log_dir", self._log_dir, log_dir)
        self.hook_logger = logger = HookLogger(model, log_dir, **{**options, **self._options})
        state, self._state = self._state, None
        if state:
            logger.load_state_dict(state)
        self._loss_step, self._training = -1, True
        return logger

    def end(self, exception: BaseException | None = None) -> None:
        """Close the logger at the end of the training; idempotent."""
        self._phase.close()
        if self.hook_logger is not None and self._training:
            self._training = False
            self.hook_logger.__exit__(type(exception), exception, None)

    def log_loss(self, loss: object) -> None:
        """Log a loss if it is a single number; of several micro-batches, the first counts."""
        if isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() == 1):
            logger = self.hook_logger
            if logger is not None and logger.current_step != self._loss_step:
                self._loss_step = logger.current_step
                logger.log(loss=loss)

    def begin_phase(self, name: str) -> None:
        """Start a phase that is not training; see ``HookLogger.phase``."""
        self._phase.close()
        if self.hook_logger is not None and self._training:
            self._phase.enter_context(self.hook_logger.phase(name))

    def end_phase(self) -> None:
        """End the phase; idempotent."""
        self._phase.close()

    @property
    def should_stop(self) -> bool:
        """Whether an alert requests the end of the training (``on_alert="stop"``)."""
        return self.hook_logger is not None and self.hook_logger.should_stop

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the logger; empty before the first training."""
        return {} if self.hook_logger is None else self.hook_logger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state into the logger, or into the next one if no training is in progress."""
        if self.hook_logger is not None and self._training:
            self.hook_logger.load_state_dict(state)
        else:
            self._state = state
