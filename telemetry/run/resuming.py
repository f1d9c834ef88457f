"""First step and state of a resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from telemetry.failures import Failures
from telemetry.plain_text import type_of
from telemetry.reading.run_data import RunData
from telemetry.reading.run_log import RunDirectory
from telemetry.records import StepRecord

STATE_FORMAT = 1


class EarlierRun(NamedTuple):
    """Run that a logger goes on with, in the same directory; ``run`` is empty for a new one."""

    run: str = ""
    next_step: int = 0
    loss_delay: int = 0  # where it resumes: steps between a batch and its loss


def earlier_run(log_dir: str, first_step: int, *, resume: bool) -> EarlierRun:
    """Return the newest run in the directory, if a logger does not begin with step 0.

    ``resume``: the next step follows the last recorded one, if there is one.
    """
    if "://" in log_dir:
        if resume:
            raise ValueError(
                "HookLogger(resume=True): finds steps in local directories only, not in "
                f"{log_dir}; pass first_step, or call load_state_dict() with the state of a "
                "checkpoint"
            )
        return EarlierRun(next_step=first_step)
    if not (resume or first_step):
        return EarlierRun()
    known = RunData(RunDirectory(log_dir))
    if not resume or (last := known.last_step) is None:
        return EarlierRun(known.run, first_step)
    return EarlierRun(known.run, last + 1, known.loss_delay())


class LaterSteps:
    """Warns once if a run begins at steps that its local directory already holds."""

    def __init__(self, log_dir: str, failures: Failures, *, expected: bool) -> None:
        self._log_dir = log_dir
        self._failures = failures
        self._last: int | None = None
        if "://" not in log_dir and not expected:
            with failures.contained("to find earlier steps"):
                self._last = RunData(RunDirectory(log_dir)).last_step

    def expect_them(self) -> None:
        """Disable the warning: the run was resumed."""
        self._last = None

    def on_step(self, record: StepRecord) -> None:
        """Compare the first step of the run with the recorded ones."""
        last, self._last = self._last, None
        if last is not None and last > record.step:
            self._failures.log_once(
                f"{self._log_dir} already holds a run up to step {last}, and this is another "
                f"one from {record.step} on, whose curves TensorBoard mixes with it. To resume "
                f"that run: HookLogger(first_step={last + 1}) or resume=True, or "
                "load_state_dict() with the state of a checkpoint. "
                "A new run should have another directory"
            )


def checked_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the usable part of a logger's state, and descriptions of the rest."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"HookLogger.load_state_dict({type_of(state)}): must be what state_dict() returned"
        )
    step, order = state.get("step"), state.get("forward_order")
    has_step = isinstance(step, int) and step >= 0
    usable: dict[str, Any] = {"step": step} if has_step else {}
    incompatible = [] if has_step else [f"the step: {step!r}"]
    if (form := state.get("format")) != STATE_FORMAT:
        return usable, [*incompatible, f"the state of the rules: its format {form!r} is unknown"]
    usable |= {name: state.get(name) for name in ("run", "schedule", "rules", "logged", "loss")}
    if isinstance(order, list | tuple):
        usable["forward_order"] = [name for name in order if isinstance(name, str)]
    return usable, incompatible
