"""Who hands a finished step over to the background thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

from telemetry.capture.captured import CapturedStep, RunTotals
from telemetry.capture.layout import LayoutKeeper
from telemetry.capture.window import Window
from telemetry.faults import Faults
from telemetry.torch_private import undisturbed


class HandOver:
    """Makes each window that is complete a :class:`CapturedStep`, and delivers it.

    Args:
        layout: Of the model.
        deliver: Called on the training thread; must not wait.
        faults: Where the background thread reports what failed.

    Attributes:
        layout: Of the model.
        happened: Whether anything was handed over so far.
    """

    def __init__(
        self, layout: LayoutKeeper, deliver: Callable[[CapturedStep], None], faults: Faults
    ) -> None:
        self.layout = layout
        self.happened = False
        self._deliver = deliver
        self._faults = faults
        self._totals = RunTotals()

    def __call__(self, window: Window) -> None:
        """Nothing is added to the window any more."""
        layout = self.layout.current(window.order)
        with undisturbed() if window.full else nullcontext():
            captured = CapturedStep.of(
                window,
                wall_time=time.time(),
                layout=layout,
                totals=self._totals,
                faults=self._faults,
            )
        self._deliver(captured)
        self.happened = True
