"""PyTorch-Ignite: ``TelemetryHandler("runs/x").attach(trainer, model)``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ignite.engine import Engine, Events
from torch import nn

from telemetry.integrations.trainer_logger import TrainerLogger


class TelemetryHandler(TrainerLogger):
    """Logs the model of an ignite engine; a ``Checkpoint`` may save it with the engine.

    The loss is the output of the engine's function if that is a number, or its item ``"loss"``. It
    is logged after the step, at the number of ignite's iteration.
    Arguments are as for :class:`TrainerLogger`.
    """

    def attach(
        self, engine: Engine, model: nn.Module, evaluators: Mapping[str, Engine] | None = None
    ) -> None:
        """Log the runs of an engine that trains the model.

        Args:
            evaluators: Other engines with the model, by name; the first batch of each of their
                runs is measured as a phase of that name.
        """
        engine.add_event_handler(Events.STARTED, self._started, model)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._iteration_completed)
        for event in (Events.COMPLETED, Events.TERMINATE):
            engine.add_event_handler(event, lambda _: self.end())
        for name, evaluator in (evaluators or {}).items():
            evaluator.add_event_handler(Events.STARTED, partial(self.begin_phase, name))
            evaluator.add_event_handler(Events.ITERATION_COMPLETED, self.end_phase)

    def _started(self, engine: Engine, model: nn.Module) -> None:
        self.begin(model, first_step=engine.state.iteration)

    def _iteration_completed(self, engine: Engine) -> None:
        output = engine.state.output
        self.log_loss(output.get("loss") if isinstance(output, Mapping) else output)
        if self.should_stop:
            engine.terminate()
