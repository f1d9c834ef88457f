"""At which step a resumed run begins, and what it takes over from the earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from telemetry.failures import Failures
from telemetry.plain_text import type_of
from telemetry.reading.last_step import EventFile, event_files, last_step
from telemetry.records import StepRecord
from telemetry.run.arguments import FirstStep

STATE_FORMAT = 1
_FEW_FILES = 8
_FEW_BYTES = 1 << 20


def resolved(first_step: FirstStep, log_dir: str) -> int:
    """The number of the first step; for ``"auto"`` the one after the last in the directory.

    Raises:
        ValueError: The directory is remote.
        OSError: It cannot be read.
    """
    if first_step != "auto":
        return first_step
    if "://" in log_dir:
        raise ValueError(
            f'HookLogger(first_step="auto"): finds steps in local directories only, not in '
            f"{log_dir}; pass the number, or call load_state_dict() with the state of a checkpoint"
        )
    last = last_step(event_files(log_dir))
    return 0 if last is None else last + 1


class LaterSteps:
    """Warns once if a run counts steps again that its local directory already holds."""

    def __init__(self, log_dir: str, failures: Failures, *, expected: bool) -> None:
        self._log_dir = log_dir
        self._failures = failures
        self._earlier: tuple[EventFile, ...] = ()
        if "://" not in log_dir and not expected:
            with failures.contained("to look for earlier steps"):
                self._earlier = tuple(islice(event_files(log_dir), _FEW_FILES))

    def expect_them(self) -> None:
        """Do not warn: the run was resumed."""
        self._earlier = ()

    def on_step(self, record: StepRecord) -> None:
        """Compare the first step with those that are there."""
        earlier, self._earlier = self._earlier, ()
        if not earlier:
            return
        with self._failures.contained("to look for earlier steps"):
            last = last_step(earlier, max_bytes=_FEW_BYTES)
            if last is not None and last > record.step:
                self._failures.log_once(
                    f"{self._log_dir} already holds steps up to {last}, and this run counts from "
                    f"{record.step} again. To resume that run: HookLogger(first_step={last + 1}) "
                    'or first_step="auto", or load_state_dict() with the state of a checkpoint. '
                    "A new run should have another directory"
                )


def checked_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The usable part of a logger's state, and in words what cannot be used.

    Raises:
        TypeError: ``state`` is not a dict.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"HookLogger.load_state_dict({type_of(state)}): must be what state_dict() returned"
        )
    usable: dict[str, Any] = {}
    misfits = []
    step, order = state.get("step"), state.get("forward_order")
    if isinstance(step, int) and step >= 0:
        usable["step"] = step
    else:
        misfits.append(f"the step: {step!r}")
    if state.get("format") != STATE_FORMAT:
        misfits.append(f"the state of the rules: its format {state.get('format')!r} is unknown")
        return usable, misfits
    usable |= {name: state.get(name) for name in ("full", "full_steps", "rules", "logged", "loss")}
    if isinstance(order, list | tuple):
        usable["forward_order"] = [name for name in order if isinstance(name, str)]
    return usable, misfits
