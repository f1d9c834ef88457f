"""fastai: ``Learner(..., cbs=TelemetryCallback("runs/x"))``."""

from __future__ import annotations

from fastai.callback.core import Callback, CancelFitException
from fastai.optimizer import OptimWrapper

from telemetry.integrations.trainer_logger import TrainerLogger


class TelemetryCallback(TrainerLogger, Callback):
    """Logs a fastai learner as :class:`TrainerLogger`; several fits are one run."""

    def before_fit(self) -> None:
        self.run = not any(hasattr(self.learn, name) for name in ("lr_finder", "gather_preds"))
        if self.run:
            self.begin(self.learn.model, resume=True)

    def before_backward(self) -> None:
        self.log_loss(self.learn.loss)

    def after_step(self) -> None:
        if self.hook_logger is not None and not isinstance(self.learn.opt, OptimWrapper):
            self.hook_logger.step()  # fastai's own optimizers are not torch's

    def after_batch(self) -> None:
        self.end_phase()
        if self.learn.training and self.should_stop:
            raise CancelFitException

    def before_validate(self) -> None:
        self.begin_phase("validation")

    def after_fit(self) -> None:
        self.end()
