"""Interface of a rule: it judges the record of each step and returns alerts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from telemetry.alert import Alert
from telemetry.records import StepRecord


class Rule(ABC):
    """Judge of each step, which may keep state between steps.

    Only :meth:`__call__` must be written. To override :attr:`name` or :attr:`requests_full_step`,
    set it in the body of the class, or define a property. All methods are called on one background
    thread, in the order of the steps. An exception is logged once, and the next step is judged.
    """

    failed = ""
    """Part of the rule that raised its latest exception; empty: the rule as a whole."""

    @property
    def name(self) -> str:
        """Name in log messages and in :meth:`HookLogger.state_dict`; by default the class's."""
        return type(self).__name__

    @property
    def requests_full_step(self) -> bool:
        """Whether the rule requests a full step; read after each call.

        The step is measured some steps later, if the run's allowance has one left: see
        :class:`telemetry.capture.Schedule`.
        """
        return False

    @property
    def full_steps_needed(self) -> int:
        """Number of consecutive full steps that a request is for."""
        return 1

    @abstractmethod
    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        """Judge one step of training; return ``()`` if nothing is wrong."""

    @property
    def requests_norms_above(self) -> float:
        """Loss above which the rule requests the norms of each of the next 64 steps.

        Read after each call. Steps may be so fast that the norms of each of them cost more than 3 %
        of the time: see "Fast steps" in docs/understand/full-steps.md. ``-math.inf``, the default:
        the rule judges every step; ``math.inf``: it accepts any distance.
        """
        return -math.inf

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        """Judge a loss as soon as it is logged, since an optimizer step may never follow.

        Args:
            step: The step in progress.
            loss: The logged value; it may be NaN or infinite.
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain containers, numbers, strings, tensors.

        Nothing is saved for an empty dict.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - a default
        """Continue from what :meth:`state_dict` returned.

        Raises:
            Exception: The state does not fit; the message is logged and the run continues.
        """


class FunctionRule(Rule):
    """A plain callable as a rule."""

    def __init__(self, function: Callable[[StepRecord], Iterable[Alert]]) -> None:
        self._function = function

    @property
    def name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        return self._function(record)


AnyRule = Rule | Callable[[StepRecord], Iterable[Alert]]
"""A rule, or a function that takes a record and returns alerts."""


def as_rule(rule: AnyRule) -> Rule:
    """Return the rule itself, or a plain callable as a rule; TypeError: it cannot be called."""
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str):
        raise TypeError(
            f"{rule!r} is the name of a rule; names go into a dict: {{{rule!r}: None}} omits it"
        )
    if not callable(rule):
        raise TypeError(f"{rule!r} is not a rule: it cannot be called")
    if isinstance(rule, type):
        raise TypeError(f"{rule.__name__} is a class; pass an instance: {rule.__name__}()")
    return FunctionRule(rule)
