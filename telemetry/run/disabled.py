"""Run of a disabled logger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from telemetry.alert import Alert


class DisabledRun:
    """Run of a disabled logger: records nothing and returns the state that it was given."""

    attached = should_stop = False
    alerts: tuple[Alert, ...] = ()
    noted_alerts: Sequence[Alert] = ()

    def __init__(self, log_dir: str, first_step: int) -> None:
        self.log_dir = log_dir
        self._first_step = first_step
        self._state: dict[str, Any] = {}

    @property
    def current_step(self) -> int:
        return self._state.get("step", self._first_step)  # type: ignore[no-any-return]

    def inert(self) -> DisabledRun:
        return self

    def log(self, scalars: object, more: Sequence[object], named: Mapping[str, object]) -> None: ...

    def hparams(self, values: object, metrics: object) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> None: ...

    def flush(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)

    def attach(self) -> None: ...

    def detach(self) -> None: ...

    def close(self, timeout_s: float) -> None: ...

    def end_block(self, exception: BaseException | None) -> None: ...
