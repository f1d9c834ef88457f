"""Backward passes: which of them are training, and what each one brought."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from telemetry.capture.tally import Tally
from telemetry.torch_private import NO_TASK, at_end_of_backward, backward_task


class BackwardPass:
    """One run of the autograd engine.

    Attributes:
        tally: What was observed in it.
        accumulated: Parameters whose gradient has accumulated, by identity. None in a probe:
            ``autograd.grad`` changes no gradient.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self.accumulated: dict[int, Tensor] = {}


class BackwardPasses:
    """The backward passes that are running; there are several if one starts another.

    Args:
        ended: Told of each pass when it has ended and its gradients are reduced over ranks.
    """

    def __init__(self, ended: Callable[[BackwardPass], None]) -> None:
        self._ended = ended
        self._running: dict[int, BackwardPass] = {}

    def current(self) -> BackwardPass | None:
        """The pass that this thread is in; None where passes cannot be followed to their end."""
        task = backward_task()
        running = self._running.get(task)
        if running is None and task != NO_TASK:
            # Deferred, to come after the callback by which DDP ends its reduction.
            if not at_end_of_backward(lambda: self._end(task), deferred=1):
                return None
            running = self._running[task] = BackwardPass()
        return running

    def _end(self, task: int) -> None:
        self._ended(self._running.pop(task))
