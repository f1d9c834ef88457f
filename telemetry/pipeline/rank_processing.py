"""What happens to a step where several ranks write one run: it is sent, merged, recorded once."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from telemetry.alert import Alert, alert_fields, parse_alert
from telemetry.capture import CapturedStep, LightStep
from telemetry.capture.measured import MeasuredMaker
from telemetry.events.background import each_within
from telemetry.failures import Failures
from telemetry.pipeline import FullSteps, Item, LoggedScalars, Processor, ReadyValues
from telemetry.pipeline.queue import MAX_BYTES
from telemetry.ranks.channel import CLOSE_S, Channel
from telemetry.ranks.gathering import News
from telemetry.ranks.measured import Measured
from telemetry.ranks.observer import RankObserver
from telemetry.ranks.whole import WholeRecords
from telemetry.records import StepRecord
from telemetry.records.loss import LossChoice
from telemetry.shared.plain_text import ranks_in_words
from telemetry.torch_private.host_copy import HostCopy

# Full measurements of the first rank that are kept until they come back merged.
_OWN_KEPT = 8

# A step that rules ask for is announced so much before, for all ranks to hear of it.
_LEAD_STEPS = 16
_LEAD_S = 2.0

_numbers = itertools.count()


class RankProcessor:
    """Sends what this rank measured to the first rank; on that, records what comes back merged.

    Channels of several loggers are told apart by the order in which each process makes its loggers.

    Args:
        recorder: Judges and writes merged steps; None on all ranks but the first.
        in_turn: Has something done on the background thread.

    Attributes:
        observer: Tells the capture what this rank is to measure.
        abandoned: Set when nobody waits for the rest any more, and nothing may be written.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        recorder: Processor | None,
        in_turn: Callable[[Callable[[], None]], None],
        full_steps: FullSteps,
        current_step: Callable[[], int],
        failures: Failures,
        loss: LossChoice,
    ) -> None:
        self.observer = RankObserver(rank=rank, size=size)
        self.abandoned = False
        self._maker = MeasuredMaker(self.observer.standing)
        self._recorder = recorder
        self._in_turn = in_turn
        # Of those that came back. Each has one thread that writes it.
        self._bytes_taken = self._bytes_done = 0
        self._full_steps = full_steps
        self._current_step = current_step
        self._first_step = current_step()
        self._announced: set[int] = set()  # of these, late ranks have nothing in full
        self._last: tuple[int, float] = (-1, 0.0)  # step and time of the latest record
        self._step_s = 0.0
        self._failures = failures
        self._loss = loss
        self._scalars: dict[int, dict[str, float]] = {}
        self._whole = WholeRecords()
        self._own: dict[tuple[int, str], StepRecord] = {}
        self._eval_mode = False
        self._awaited: tuple[int, bool] | None = None  # the latest sent, until it is recorded
        self._changed = threading.Condition()
        self._alert: Alert | None = None
        full_steps.announce = self._announce
        self._channel = Channel(
            name=str(next(_numbers)),
            rank=rank,
            world_size=size,
            deliver=self.take,
            heard=self._hear,
            failures=failures,
            first_step=self._first_step,
        )

    # --- on the background thread: see Processor ------------------------------------------------

    def process(self, item: Item) -> None:
        if isinstance(item, LoggedScalars):
            self._loss.see(item.step, item.values)
            self._scalars.setdefault(item.step, {}).update(
                (name, float(value.wait()) if isinstance(value, HostCopy) else value)
                for name, value in item.values.items()
            )
        elif not isinstance(item, ReadyValues):
            self._send(item)
        elif self._recorder is not None:
            self._recorder.process(item)

    def _record_merged(self, merged: Measured) -> None:
        with self._failures.contained("to record a step of several ranks"):
            self._record(merged)
        self._bytes_done += merged.nbytes
        self._note_recorded(merged)

    def _record(self, part: Measured) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        recorder.abandoned = self.abandoned
        means = part.scalars.means()
        if means and not part.phase:
            self._loss.see(part.step, means)
            recorder.log(LoggedScalars(step=part.step, wall_time=part.wall_time, values=means))
        own = self._own.pop((part.step, part.phase), None)
        record = self._whole.record(part, own) if part.stages else None
        if record is not None:
            self._see(part, record)
            recorder.record(replace(record, eval_mode=self._eval_mode, loss_tag=self._loss.tag))

    def pending_s(self) -> float | None:
        return None if self._recorder is None else self._recorder.pending_s()

    def write_pending(self) -> None:
        if self._recorder is not None and not self.abandoned:
            self._recorder.write_pending()

    def end(self) -> None:
        if self._recorder is not None and not self.abandoned:
            self._recorder.end()

    def state_dict(self, step: int) -> dict[str, Any]:
        """What the rules remember, on the first rank; and what this rank logged for the step."""
        state = {} if self._recorder is None else self._recorder.state_dict(step)
        own = {"full_steps": self._full_steps.state_dict(), "logged": self._scalars.get(step, {})}
        return {"rules": {}, "loss": self._loss.state_dict(), **state, **own}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Continue from there; the rules, on the first rank."""
        logged = state.get("logged")
        self._scalars = {step: dict(logged)} if isinstance(logged, Mapping) else {}
        self._full_steps.load_state_dict(state, step)
        if self._recorder is None:
            self._loss.load_state_dict(state.get("loss"))
            return []
        return self._recorder.load_state_dict({**state, "logged": None}, step)

    def send_rest(self) -> None:
        """Send what was logged for a step that did not end, for it will not."""
        for step, values in sorted(self._scalars.items()):
            self._send_part(self._maker.logged(step, values))
        self._scalars = {}

    def _send(self, step: CapturedStep | LightStep) -> None:
        captured = step if isinstance(step, CapturedStep) else None
        in_phase = captured is not None and bool(captured.phase)
        scalars = {} if in_phase else self._scalars.get(step.step, {})
        record = step.record(scalars, self._loss.tag)
        if not record.phase:
            self._scalars = {s: v for s, v in self._scalars.items() if s > record.step}
            self._eval_mode = record.eval_mode
        if self._recorder is not None and (record.full or record.phase):
            self._own[record.step, record.phase] = record
            while len(self._own) > _OWN_KEPT:
                del self._own[next(iter(self._own))]
        self._send_part(self._maker.part(record, captured))

    def _send_part(self, part: Measured) -> None:
        self._awaited = part.step, not part.phase  # phases of a step come before it
        self._channel.send(part)

    def take(self, merged: Measured) -> None:
        """On the thread of the channel; what there is no room for is not recorded."""
        if self._bytes_taken - self._bytes_done <= MAX_BYTES:
            self._bytes_taken += merged.nbytes
            self._in_turn(lambda: self._record_merged(merged))
            return
        self._failures.log_once(
            f"step {merged.step} is not recorded, earlier ones are still being judged; use a "
            "larger every_n_steps to keep up",
            kind="merged steps",
        )
        self._note_recorded(merged)

    def _note_recorded(self, merged: Measured) -> None:
        with self._changed:
            if self._awaited is not None and (merged.step, not merged.phase) >= self._awaited:
                self._awaited = None
                self._changed.notify_all()

    # --- news for all ranks ----------------------------------------------------------------------

    def _announce(self, step: int) -> None:
        """Rules that have judged a step want a full one; the next is the same on all ranks.

        Nothing is done if one that comes later has been announced, or while nobody knows how long a
        step takes.
        """
        if step <= max(self._announced, default=-1) or self._step_s <= 0:
            return
        now, step_s, (last, wall_time) = self._current_step(), self._step_s, self._last
        if now > last + 1:  # the first steps are slow
            step_s = min(step_s, max(1e-6, time.time() - wall_time) / (now - last - 1))
        at = now + max(_LEAD_STEPS, math.ceil(_LEAD_S / step_s))
        self._announced.add(at)
        self._channel.announce(at)

    def _see(self, part: Measured, record: StepRecord) -> None:
        """Note how long steps take; report ranks that measure other steps in full than the rest."""
        if not record.phase:
            step, wall_time = self._last
            self._last = record.step, record.wall_time
            self._step_s = max(0.0, record.wall_time - wall_time) / max(1, record.step - step)
        others = part.ranks - part.measured
        if part.measured and others and part.step not in self._announced:
            self._failures.log_once(
                f"step {part.step} was measured in full by {ranks_in_words(part.measured)} and not "
                f"by {ranks_in_words(others)}; use the same every_n_steps on all ranks, without "
                "max_overhead",
                kind="intervals",
            )

    def _hear(self, news: News) -> None:
        """Do as the first rank announces; report if it counts otherwise than this one."""
        if news.first_step not in (None, self._first_step):
            self._failures.log_once(
                f"this rank counts its steps from {self._first_step} and the first rank from "
                f"{news.first_step}, so their records do not meet; give all ranks the same "
                'first_step (with "auto", each has to see the directory of the run)',
                kind="first step",
            )
        if news.full_step > self._current_step():  # else this rank is too late
            self._full_steps.ask(news.full_step)
        if news.message and self._alert is None:
            self._alert = parse_alert(json.loads(news.message))

    # --- on the training thread ------------------------------------------------------------------

    def raise_together(self, alert: Alert) -> None:
        """Have all ranks raise this alert at the end of the same step; on the first rank."""
        self._channel.raise_together(json.dumps(alert_fields(alert)))

    def to_raise(self, step: int | None) -> Alert | None:
        """The alert to raise now that this step has ended; None as a step: no other will."""
        return self._alert if self._channel.agreement.step_ended(step) else None

    def wait(self, timeout_s: float) -> None:
        """Wait until all that was sent has come back merged; only on the first rank."""
        if self._recorder is not None and self._channel.is_in_own_process:
            with self._changed:
                self._changed.wait_for(lambda: self._awaited is None, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the exchange; on the first rank, after all that others sent in time is recorded."""
        each_within(min(CLOSE_S, timeout_s), self.wait, self._channel.close)
