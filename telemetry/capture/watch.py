"""What is watched: one model, and what every piece of capture needs to know of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from telemetry.capture.parameters import ParameterTable
from telemetry.failures import Failures
from telemetry.ranks.observer import RankObserver
from telemetry.selection import Selection
from telemetry.torch_private import undisturbed


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a full measurement holds.

    Raises:
        TypeError: Something is neither True nor False.
    """

    activations: bool = True
    activation_gradients: bool = True
    gradients: bool = True
    weights: bool = True
    images: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, bool):
                raise TypeError(f"HookLogger({name}={value!r}): must be True or False")


class Switch:
    """Whether the hooks on modules do anything.

    Compiled graphs are guarded by these attributes: there is one graph with observers and one
    without.

    Attributes:
        training: Whether passes of training are observed.
        in_phase: Whether those of a phase are.
        armed: Whether any are.
        output_grads: Whether gradients with respect to outputs are observed, too.
    """

    def __init__(self, *, output_grads: bool) -> None:
        self.training = self.in_phase = self.armed = False
        self.output_grads = output_grads

    def turn(self, *, training: bool | None = None, in_phase: bool | None = None) -> None:
        """Observe these passes, or no longer; None: as before."""
        self.training = self.training if training is None else training
        self.in_phase = self.in_phase if in_phase is None else in_phase
        self.armed = self.training or self.in_phase


@dataclass(kw_only=True, eq=False)
class Watch:
    """One model that is watched.

    Attributes:
        model: Held weakly.
        table: Its parameters.
        selection: Which of its modules are watched.
        content: What a full measurement holds.
        switch: What the hooks on its modules look at.
        failures: Where to report what failed.
        own_time: Entered while anything is done on the training thread; None: nobody asks for it.
        ranks: Tells what this rank is to measure for all; None: everything. Set before the first
            measurement.
    """

    model: weakref.ref[nn.Module]
    table: ParameterTable
    selection: Selection
    content: Content
    switch: Switch
    failures: Failures
    own_time: AbstractContextManager[None] | None
    ranks: RankObserver | None = None

    def contain(self, doing: str, act: Callable[..., None], *args: Any) -> None:
        """Act from inside of a hook; an exception is reported and not raised."""
        try:
            if self.own_time is None:
                act(*args)
            else:
                with self.own_time:
                    act(*args)
        except Exception:
            self.failures.report(doing)

    def contain_alone(self, doing: str, act: Callable[..., None], *args: Any) -> None:
        """The same by :func:`alone`."""
        self.contain(doing, alone, act, *args)


def alone(act: Callable[..., None], *args: Any) -> None:
    """Act where no mode of the caller's sees it; do nothing where that cannot be."""
    with undisturbed() as possible:
        if possible:
            act(*args)
