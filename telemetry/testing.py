"""Test doubles: apply rules to records and record a model, without any file.

Unlike :class:`~telemetry.HookLogger`, they run on the caller's thread and raise exceptions of rules
and hooks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from telemetry.alert import Alert
from telemetry.alerts import default_rules
from telemetry.capture import Loop, Schedule, Step
from telemetry.failures import RaisingFailures
from telemetry.pipeline.judge import Judge
from telemetry.records import StepRecord
from telemetry.records.loss import LossChoice
from telemetry.records.step import ClippedFraction
from telemetry.rule import AnyRule, as_rule
from telemetry.run.arguments import content_of
from telemetry.selection import Selection, Selectors

__all__ = ["CapturedRun", "alerts_of", "capture_run"]


class CapturedRun:
    """Records and alerts of a run.

    Attributes:
        records: Record of each optimizer step, oldest first.
        alerts: Alerts of the rules, oldest first.
    """

    def __init__(self, rules: Iterable[AnyRule] | None = None) -> None:
        chosen = default_rules() if rules is None else map(as_rule, rules)
        self.records: list[StepRecord] = []
        self.alerts: list[Alert] = []
        self._judge = Judge(chosen, RaisingFailures())
        self._logged: dict[int, dict[str, float]] = {}
        self._loss, self._clipped_fraction = LossChoice(), ClippedFraction()
        self._loop: Loop | None = None
        self._schedule = Schedule(1, math.inf)

    def log(
        self, scalars: Mapping[str, float | Tensor] | None = None, /, **named: float | Tensor
    ) -> None:
        """Log scalars at the step in progress, as :meth:`HookLogger.log` does."""
        assert self._loop is not None
        step = self._loop.step
        values = {
            name: float(value.detach() if isinstance(value, Tensor) else value)
            for name, value in {**(scalars or {}), **named}.items()
        }
        self._logged.setdefault(step, {}).update(values)
        self._loss.add(step, values)
        if (tag := self._loss.tag) in values:
            self.alerts += self._judge.judge_loss(step, values[tag])

    def _take(self, step: Step) -> None:
        record = step.resolve()
        record.scalars, record.loss_tag = self._logged.pop(record.step, {}), self._loss.tag
        self._loss.step_ended(record.step)
        record.loss_delay = self._loss.delay
        record.clipped_fraction = self._clipped_fraction.after(record)
        self._add(record)

    def _add(self, record: StepRecord) -> None:
        self.records.append(record)
        self.alerts += self._judge.judge(record)
        if count := self._judge.request(self._schedule, record):
            self._schedule.request_full(record.step + 2, count)


def alerts_of(records: Iterable[StepRecord], rules: Iterable[AnyRule] | None = None) -> list[Alert]:
    """Apply rules to records.

    Args:
        records: In the order of their steps. A loss among their scalars counts as logged before.
        rules: New rules; None: the default rules.

    Returns:
        All alerts in order, including the stages ``escalated`` and ``resolved``.
    """
    run = CapturedRun(rules)
    for record in records:
        if record.loss is not None:
            run.alerts += run._judge.judge_loss(record.step, record.loss)
        run._add(record)
    return run.alerts


@contextmanager
def capture_run(
    model: nn.Module,
    *,
    every_n_steps: int = 1,
    rules: Iterable[AnyRule] | None = None,
    optimizer: Optimizer | None = None,
    modules: Selectors | None = None,
    measure: str | Iterable[str] = "!images",
) -> Iterator[CapturedRun]:
    """Record a model while the body trains it.

    ::

        with capture_run(model) as run:
            train(model)
        assert [alert.kind for alert in run.alerts] == ["dead_units"]

    Args:
        every_n_steps: Measure in full at steps 0, N, 2N, ..., and where a rule requests it,
            two steps later, as in a :class:`~telemetry.HookLogger` without delay.
        rules: As in :func:`alerts_of`.

    The other arguments are those of :class:`~telemetry.HookLogger`.
    """
    run = CapturedRun(rules)
    run._schedule = Schedule(every_n_steps, math.inf)
    run._loop = loop = Loop(
        model,
        selection=Selection.parse(modules),
        schedule=run._schedule,
        content=content_of(measure),
        deliver=run._take,
        safe_point=lambda: None,
        primary=optimizer,
        failures=RaisingFailures(),
    )
    loop.attach()
    try:
        yield run
    finally:
        loop.detach()
