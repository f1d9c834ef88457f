"""First step and state of a resumed run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from telemetry.events import list_event_files
from telemetry.events.page_format import LAYOUT_PREFIX, LOSS_PREFIX, parse_chunk, session_of
from telemetry.events.reading import CorruptEventFileError, events_from_end, read_events
from telemetry.failures import Failures
from telemetry.plain_text import type_of
from telemetry.records import StepRecord
from telemetry.tag_names import TOTAL_GRAD_NORM

STATE_FORMAT = 1
_FEW_FILES = 8
_FEW_BYTES = 1 << 20
_FEW_EVENTS = 1000

# Tags in each step of a logger and of no other program. Steps of a user's own tags may have another
# meaning.
_MARKS = (TOTAL_GRAD_NORM.encode(), b"telemetry/n/", b"telemetry/m/")


def next_step(log_dir: str, first_step: int) -> int:
    """Return the number after the last recorded step; ``first_step`` if there is none."""
    if "://" in log_dir:
        raise ValueError(
            "HookLogger(resume=True): finds steps in local directories only, not in "
            f"{log_dir}; pass first_step, or call load_state_dict() with the state of a checkpoint"
        )
    last = last_step(event_files(log_dir))
    return first_step if last is None else last + 1


def logs_after_steps(log_dir: str) -> bool:
    """Whether the newest session logged its first loss after its first step had ended."""
    begins: dict[str, int] = {}
    for path, _ in islice(event_files(log_dir), _FEW_FILES):
        with suppress(CorruptEventFileError):
            for event in islice(read_events(path), _FEW_EVENTS):
                for tag in (value.tag for value in event.summary.value):
                    if tag.startswith(LAYOUT_PREFIX):
                        begins.setdefault(session_of(tag), event.step)
                    elif tag.startswith(LOSS_PREFIX):
                        return bool(event.step > begins.get(session_of(tag), event.step))
    return False


class LaterSteps:
    """Warns once if a run repeats steps that its local directory already holds."""

    def __init__(self, log_dir: str, failures: Failures, *, expected: bool) -> None:
        self._log_dir = log_dir
        self._failures = failures
        self._earlier: tuple[tuple[Path, int], ...] = ()
        if "://" not in log_dir and not expected:
            with failures.contained("to find earlier steps"):
                self._earlier = tuple(islice(event_files(log_dir), _FEW_FILES))

    def expect_them(self) -> None:
        """Disable the warning: the run was resumed."""
        self._earlier = ()

    def on_step(self, record: StepRecord) -> None:
        """Compare the first step of the run with the recorded ones."""
        earlier, self._earlier = self._earlier, ()
        if not earlier:
            return
        with self._failures.contained("to find earlier steps"):
            last = last_step(earlier, max_bytes=_FEW_BYTES)
            if last is not None and last > record.step:
                self._failures.log_once(
                    f"{self._log_dir} already holds steps up to {last}, and this run repeats them "
                    f"from {record.step} on. To resume that run: HookLogger(first_step={last + 1}) "
                    "or resume=True, or load_state_dict() with the state of a checkpoint. "
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
    usable |= {name: state.get(name) for name in ("schedule", "rules", "logged", "loss")}
    if isinstance(order, list | tuple):
        usable["forward_order"] = [name for name in order if isinstance(name, str)]
    return usable, incompatible


def event_files(log_dir: str) -> Iterator[tuple[Path, int]]:
    """Yield event files of a local directory and their sizes, newest first; none without it."""
    with suppress(FileNotFoundError):
        for path in reversed(list_event_files(log_dir)):
            if path.is_file():
                yield path, path.stat().st_size


def last_step(files: Iterable[tuple[Path, int]], *, max_bytes: float = math.inf) -> int | None:
    """Return the last step that a logger recorded; None without any.

    It is the last step of the newest session, which may have restarted at an earlier step. Files,
    the newest first, are read from their ends, at most about ``max_bytes`` of each.
    """
    for path, size in files:
        with open(path, "rb") as file:
            for data in events_from_end(file, size, _MARKS, max_bytes=max_bytes):
                if (step := _step_of(data)) is not None:
                    return step
    return None


def _step_of(data: bytes) -> int | None:
    """Return the step of a logger's event; None for any other event."""
    try:
        event = Event.FromString(data)
    except DecodeError:
        return None
    tags = (value.tag for value in event.summary.value)
    if any(tag == TOTAL_GRAD_NORM or parse_chunk(tag) is not None for tag in tags):
        return int(event.step)
    return None
