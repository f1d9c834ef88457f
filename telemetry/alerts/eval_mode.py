"""Training in evaluation mode."""

from __future__ import annotations

import re
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.episode import Episode
from telemetry.records import Layout, StepRecord
from telemetry.rule import Rule


class EvalMode(Rule):
    """A note when optimizer steps are taken while the whole model is in evaluation mode.

    That is usual after ``from_pretrained()`` or a validation, where ``train()`` was forgotten.
    Silent where only some modules are in evaluation mode, as batch norms that are frozen on
    purpose, and where no module does anything else in training: the model has neither dropout nor
    batch norm.

    Args:
        steps: Number of such steps in a row.
    """

    name = "eval_mode"
    _steps: int = 0
    _differ: tuple[str, ...] = ()
    _episode: Episode

    def __init__(self, *, steps: int = 20) -> None:  # by eye: a step or two may be an experiment
        self._needed = steps
        self._episode = Episode(1)
        self._layout: Layout | None = None

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if record.layout is not self._layout:
            self._layout = record.layout
            self._differ = tuple(
                sorted({m.type_name for m in record.layout.modules if _DIFFER.search(m.type_name)})
            )
        self._steps = self._steps + 1 if record.eval_mode and self._differ else 0
        found = self._alert(record) if self._steps >= self._needed else None
        return self._episode.update(record.step, found)

    def _alert(self, record: StepRecord) -> Alert:
        return Alert(
            kind=self.name,
            severity="note",
            step=record.step,
            module_name=None,
            value=float(self._steps),
            threshold=float(self._needed),
            message=(
                f"{self._steps} steps in a row were taken in evaluation mode, in which "
                f"{', '.join(self._differ[:3])} work differently.\n"
                "Call model.train() before training and after each validation, unless this is "
                "meant to be so."
            ),
        )


# What torch's own modules that look at ``training`` are called, and most of other libraries.
_DIFFER = re.compile("BatchNorm|Drop|RReLU")
