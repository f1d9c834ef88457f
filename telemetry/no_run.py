"""The run of a logger that is turned off: it does nothing and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from telemetry.alert import Alert

VARIABLE = "TELEMETRY_DISABLED"


def is_disabled(enabled: bool) -> bool:
    """Whether a logger is turned off, by its argument or by the environment.

    Raises:
        TypeError: ``enabled`` is neither True nor False.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"HookLogger(enabled={enabled!r}): must be True or False")
    return not enabled or os.environ.get(VARIABLE, "0") not in ("", "0")


class NoCapture:
    """Watches nothing."""

    attached = False

    def __init__(self, step: int) -> None:
        self.step = step

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def detach(self) -> None: ...


class NoRun:
    """Has the methods of :class:`telemetry.run.Run`.

    Args:
        log_dir: Where the logger would write.
        first_step: The number that ``current_step`` keeps.
    """

    closed = should_stop = False
    alerts: tuple[Alert, ...] = ()

    def __init__(self, log_dir: str, first_step: object) -> None:
        self.log_dir = log_dir
        self.capture = NoCapture(first_step if isinstance(first_step, int) else 0)
        self._state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The one that was loaded, for the next checkpoint."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)
        self.capture.step = self._state.get("step", self.capture.step)

    def start(self) -> None: ...

    def attach(self) -> None: ...

    def write(self, values: object) -> None: ...

    def hparams(self, values: object, metrics: object) -> None: ...

    def log(self, scalars: object, more: object, named: object) -> None: ...

    def step(self) -> None: ...

    def training_ended(self) -> None: ...

    def note_exception(self, exception: BaseException, timeout_s: float) -> None: ...

    def flush(self) -> None: ...

    def close(self, timeout_s: float) -> None: ...
