"""The background thread: captured steps become records, records become alerts and events."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from tensorboard.compat.proto.summary_pb2 import Summary

from telemetry.alerts.memory import load_states, states_of
from telemetry.capture import CapturedStep
from telemetry.events import summaries
from telemetry.faults import Faults
from telemetry.host_copy import HostCopy
from telemetry.plain_text import printable_lines
from telemetry.ranks import is_first_rank
from telemetry.records import Alert, Rule, StepRecord
from telemetry.writing.board import Board, needed_in_every_file

log = logging.getLogger("telemetry")

MAX_DETAIL_BYTES = 64 * 2**20
MAX_BYTES = 2 * MAX_DETAIL_BYTES
"""While more bytes wait than the former, steps are taken without what was measured in full; while
more than the latter, not at all."""

CLOSE_TIMEOUT_S = 60.0
VALUES_AT_ONCE = 500

FEW = 8
FEW_S = 0.5
"""Steps with nothing but norms are taken so many at a time, or as many as come in so long: between
two steps of training all code leaves the core's cache, and one alone takes twice as long."""


class Sink(Protocol):
    """Where values go: a file that another thread writes, so that no alert waits for the disk."""

    def write_values(
        self,
        values: Sequence[Summary.Value],
        step: int,
        wall_time: float,
        /,
        *,
        droppable: bool,
        flush: bool,
        repeat: Sequence[Summary.Value],
    ) -> None:
        """Add one event.

        Args:
            values: What it holds.
            step: Of the event.
            wall_time: Likewise.
            droppable: Whether it may be left out when too much waits.
            flush: Have it written at once, without waiting for that.
            repeat: Those of the values that every further file has to hold, too.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedScalars:
    """What the user logged at one step; tensors perhaps still on their way to the host."""

    step: int
    wall_time: float
    values: Mapping[str, float | HostCopy]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadyValues:
    """Values that are written as they are."""

    step: int
    wall_time: float
    values: Sequence[Summary.Value]


Item = CapturedStep | LoggedScalars | ReadyValues | Callable[[], None]
Result = TypeVar("Result")


class _Thread(threading.Thread):
    """Of a pipeline; none of them waits for another, for that one may be waiting for it."""


class Pipeline:
    """Takes steps from the training thread and never makes it wait.

    While 64 MiB wait, a step that was measured in full is taken with its norms alone: rules look at
    each step. Only while as much again waits, steps are dropped; both is counted and told. What the
    user logged is never dropped. In a forked child everything is ignored.

    Steps that are not measured in full, and what the user logged, are taken up a few at a time,
    after half a second or eight steps at most; at once while a rule asks for full measurements.

    Args:
        board: Says what to write.
        sink: Takes the values to write, on the background thread.
        rules: Look at each record in turn. A rule may have an attribute ``wants_full``, which asks
            for a full measurement of the next step (:attr:`full_wanted`), and a method
            ``on_loss(step, loss)``, which is told each loss when it is logged: a loss may come
            again and again without a step.
        on_alert: Told of each alert, and when its step ended, on the background thread.
        faults: Where to tell what failed.
    """

    def __init__(
        self,
        *,
        board: Board,
        sink: Sink,
        rules: Iterable[Rule],
        on_alert: Callable[[Alert, float], None],
        faults: Faults,
    ) -> None:
        self._board = board
        self._sink = sink
        self._rules = tuple(rules)
        self._on_alert = on_alert
        self._faults = faults
        # Not a Queue: its lock is not reentrant, and close() may run from the garbage collector
        # while the same thread is inside of submit().
        self._queue: SimpleQueue[Item | threading.Event | None] = SimpleQueue()
        # Holds something when what is in the queue is not to wait for more.
        self._hurry: SimpleQueue[None] = SimpleQueue()
        # How many of what is in the queue have waited.
        self._few = 0
        # Counts with one writing thread each, where a common one would need a lock.
        self._steps_taken = self._steps_done = 0
        self._bytes_taken = self._bytes_done = 0
        self._scalars: dict[int, dict[str, float]] = {}
        self._pid = os.getpid()
        self._closed = False
        self._abandoned = False
        self._late: threading.Event | None = None
        self.thinned = 0
        self.dropped = 0
        self.full_wanted = False
        self._thread = _Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def submit(self, captured: CapturedStep) -> None:
        """Take a finished step, or as much of it as there is room for."""
        if self._closed or os.getpid() != self._pid:
            return
        bytes_waiting = self._bytes_taken - self._bytes_done
        if bytes_waiting > MAX_BYTES:
            self.dropped += 1
            self._tell_short(captured.step, "is not recorded", self.dropped)
            return
        if bytes_waiting > MAX_DETAIL_BYTES and captured.window.full:
            captured = captured.without_detail()
            self.thinned += 1
            self._tell_short(captured.step, "is recorded with its norms alone", self.thinned)
        self._steps_taken += 1
        self._bytes_taken += captured.nbytes
        self._queue.put(captured)
        if captured.window.full or self.full_wanted or (captured.step + 1) % FEW == 0:
            self._hurry.put(None)

    def submit_logged(self, item: LoggedScalars | ReadyValues) -> None:
        """Take what the user logged."""
        if not self._closed and os.getpid() == self._pid:
            self._queue.put(item)

    @property
    def is_late(self) -> bool:
        """Whether a :meth:`flush` has given up, and what it waited for is still not done."""
        return self._late is not None and not self._late.is_set()

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until everything taken so far is judged and handed on to be written.

        At once on a background thread, of this pipeline or another.
        """
        here = threading.current_thread()
        if self._closed or os.getpid() != self._pid or isinstance(here, _Thread):
            return
        done = threading.Event()
        self._queue.put(done)
        self._hurry.put(None)
        if not done.wait(timeout_s):
            self._late = done
            log.warning("telemetry: the steps so far are not judged within %.3g s", timeout_s)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What the rules know when they have judged everything so far, as plain values.

        Args:
            step: In progress; what was logged for it is part of the state.
        """

        def save() -> dict[str, Any]:
            rules = states_of(self._rules, self._faults)
            return {"rules": rules, "logged": dict(self._scalars.get(step, {}))}

        return self._in_turn(save) or {}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Let the rules go on from there, and ``step`` be in progress; what did not fit."""

        def load() -> list[str]:
            logged = state.get("logged")
            self._scalars = {step: dict(logged)} if isinstance(logged, Mapping) else {}
            misfits = load_states(self._rules, state.get("rules"))
            self._see_what_is_wanted()
            return misfits

        misfits = self._in_turn(load)
        return ["the rules"] if misfits is None else misfits

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Judge what is waiting, end the thread, and report what was lost; harmless when repeated.

        Not to be called on the background thread.
        """
        if os.getpid() != self._pid:
            return
        told, self._closed = self._closed, True
        self._queue.put(None)
        self._hurry.put(None)
        self._thread.join(timeout_s)
        self._abandoned = True
        if not told:
            self._tell_losses(timeout_s)

    def _in_turn(self, act: Callable[[], Result]) -> Result | None:
        """What ``act`` gives when everything so far is judged; None if that takes too long."""
        if self._closed or os.getpid() != self._pid or self.on_own_thread():
            return act()
        results: SimpleQueue[Result] = SimpleQueue()
        self._queue.put(lambda: results.put(act()))
        self._hurry.put(None)
        try:
            return results.get(timeout=CLOSE_TIMEOUT_S)
        except Empty:
            log.warning("telemetry: judging takes longer than %.0f s", CLOSE_TIMEOUT_S)
            return None

    def on_own_thread(self) -> bool:
        """Whether the caller is the background thread: a rule or a callback."""
        return threading.current_thread() is self._thread

    def _tell_short(self, step: int, what: str, count: int) -> None:
        if count == 1:
            log.warning(
                "telemetry: step %d %s, earlier ones are still being judged; "
                "a larger every_n_steps keeps up (told once, counted until close)",
                step,
                what,
            )

    def _tell_losses(self, timeout_s: float) -> None:
        losses = {
            "were recorded with their norms alone": self.thinned,
            "were dropped": self.dropped,
            f"were not judged within {timeout_s:.3g} s": self._steps_taken - self._steps_done,
        }
        told = [f"{count} steps {what}" for what, count in losses.items() if count]
        if told:
            log.warning("telemetry: %s", "; ".join(told))

    # --- on the background thread --------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._next()) is not None and not self._abandoned:
            with self._faults.contained("to record a step"):
                self._take(item)
        if not self._abandoned:
            self._write_pending()

    def _next(self) -> Item | threading.Event | None:
        """What has waited longest; what then comes with it is next, without another wait."""
        while True:
            try:
                item = self._queue.get(timeout=self._board.pending_s(time.time()))
                break
            except Empty:
                self._write_pending()
        if self._few == 0:
            with contextlib.suppress(Empty):
                pending_s = self._board.pending_s(time.time())
                self._hurry.get(timeout=FEW_S if pending_s is None else min(FEW_S, pending_s))
                while True:
                    self._hurry.get_nowait()
            self._few = 1 + self._queue.qsize()
        self._few -= 1
        return item

    def _take(self, item: Item | threading.Event) -> None:
        if isinstance(item, threading.Event):
            self._write_pending()
            item.set()
        elif callable(item):
            item()
        elif isinstance(item, ReadyValues):
            self._write(item.values, item.step, item.wall_time)
        elif isinstance(item, LoggedScalars):
            self._write_scalars(item)
        else:
            try:
                self._write_step(item)
            finally:
                self._steps_done += 1
                self._bytes_done += item.nbytes

    def _write(
        self,
        values: Sequence[Summary.Value],
        step: int,
        wall_time: float,
        *,
        droppable: bool = False,
        flush: bool = False,
    ) -> None:
        repeat = () if droppable else needed_in_every_file(values)
        self._sink.write_values(
            values, step, wall_time, droppable=droppable, flush=flush, repeat=repeat
        )

    def _write_pending(self) -> None:
        with self._faults.contained("to write the latest norms"):
            step, pending = self._board.pending_values()
            if pending:
                self._write(pending, step, time.time(), droppable=True)

    def _write_scalars(self, item: LoggedScalars) -> None:
        values = {
            name: float(value.wait()) if isinstance(value, HostCopy) else value
            for name, value in item.values.items()
        }
        self._scalars.setdefault(item.step, {}).update(values)
        points = [summaries.scalar(name, value) for name, value in values.items()]
        self._write(points, item.step, item.wall_time)
        if "loss" in values:
            self._tell(self._judge_loss(item.step, values["loss"]), item.wall_time)

    def _write_step(self, captured: CapturedStep) -> None:
        scalars = self._scalars.get(captured.step, {})
        record = captured.record(scalars)
        if not record.phase:
            self._scalars = {s: v for s, v in self._scalars.items() if s > record.step}
            self._tell(self._judge(record), record.wall_time)
        droppable = not self._board.is_needed(record)
        step, wall_time, late = self._board.late_values(record)
        if late:
            self._write(late, step, wall_time, droppable=True)
        # Deep models have tens of thousands of values, of which only a few are in memory at a time.
        values = iter(self._board.values_of(record))
        while some := list(islice(values, VALUES_AT_ONCE)):
            self._write(some, record.step, record.wall_time, droppable=droppable)

    def _judge(self, record: StepRecord) -> Iterator[Alert]:
        for rule in self._rules:
            try:
                yield from _checked(rule(record))
            except Exception:
                self._report(rule)
        self._see_what_is_wanted()

    def _see_what_is_wanted(self) -> None:
        self.full_wanted = any(getattr(rule, "wants_full", False) for rule in self._rules)

    def _judge_loss(self, step: int, loss: float) -> Iterator[Alert]:
        for rule in self._rules:
            on_loss = getattr(rule, "on_loss", None)
            if on_loss is None:
                continue
            try:
                yield from _checked(on_loss(step, loss))
            except Exception:
                self._report(rule)

    def _report(self, rule: Rule) -> None:
        name = getattr(rule, "__name__", None) or type(rule).__name__
        self._faults.report(f"to apply the rule {name!r}")

    def _tell(self, alerts: Iterable[Alert], wall_time: float) -> None:
        for alert in alerts:
            self._tell_one(alert, wall_time)

    def _tell_one(self, alert: Alert, wall_time: float) -> None:
        level = logging.ERROR if alert.severity == "error" else logging.WARNING
        if alert.stage == "end":
            level = logging.INFO
        if is_first_rank():
            log.log(level, "%s: %s", alert.title, printable_lines(alert.message))
        self._write_pending()
        with self._faults.contained("to write an alert"):
            self._write(self._board.alert_values(alert), alert.step, wall_time, flush=True)
        with self._faults.contained("to call on_alert"):
            self._on_alert(alert, wall_time)


def _checked(found: object) -> Iterator[Alert]:
    """What a rule returned; the user's own may return anything."""
    for alert in found if isinstance(found, Iterable) else (found,):
        if not isinstance(alert, Alert):
            raise TypeError(f"a rule must return alerts, () for none; it returned {found!r}")
        yield alert
