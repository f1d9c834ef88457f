"""What happens to a step where several ranks write one run: it is sent, merged, recorded once."""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from telemetry.alert import Alert, alert_fields, parse_alert
from telemetry.capture import CapturedStep, LightStep
from telemetry.capture.rank_part import PartMaker
from telemetry.events.background import each_within
from telemetry.failures import Failures
from telemetry.host_copy import HostCopy
from telemetry.loss import LossChoice
from telemetry.pipeline import FullSteps, Item, LoggedScalars, Processor, ReadyValues
from telemetry.pipeline.queue import MAX_BYTES
from telemetry.ranks.channel import CLOSE_S, Channel
from telemetry.ranks.common_steps import CommonSteps
from telemetry.ranks.encoding import decode, encode
from telemetry.ranks.observer import RankObserver
from telemetry.ranks.part import Merged, News
from telemetry.ranks.rank_part import RankPart, merge
from telemetry.ranks.whole import Whole
from telemetry.records import StepRecord

_OWN_KEPT = 8
"""Full measurements of the first rank that are kept until they come back merged."""

_LOOK_S = 0.05
"""How often the first rank looks for steps that came back merged."""

_numbers = itertools.count()


class RankProcessor:
    """Sends what this rank measured to the first rank; on that, records what comes back merged.

    Channels of several loggers are told apart by the order in which each process makes its loggers.

    Args:
        rank: This one; the first is 0.
        size: How many train together.
        recorder: Judges and writes merged steps; None on all ranks but the first.
        full_steps: Is told which steps the first rank has announced.
        current_step: Says which step is in progress.
        failures: Where failures are reported.
        loss: Which of what is logged is the loss.

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
        full_steps: FullSteps,
        current_step: Callable[[], int],
        failures: Failures,
        loss: LossChoice,
    ) -> None:
        self.observer = RankObserver(rank=rank, size=size)
        self.abandoned = False
        self._maker = PartMaker(self.observer.standing)
        self._recorder = recorder
        # Those that came back. Each count has one thread that writes it.
        self._merged: deque[Merged] = deque()
        self._bytes_taken = self._bytes_done = 0
        self._full_steps = full_steps
        self._steps = CommonSteps(full_steps.ask, current_step=current_step, failures=failures)
        self._failures = failures
        self._loss = loss
        self._scalars: dict[int, dict[str, float]] = {}
        self._whole = Whole()
        self._own: dict[tuple[int, str], StepRecord] = {}
        self._eval_mode = False
        self._sent: set[tuple[int, bool]] = set()  # and not recorded so far
        self._changed = threading.Condition()
        self._alert: Alert | None = None
        full_steps.announce = self._announce
        self._channel = Channel(
            name=str(next(_numbers)),
            rank=rank,
            world_size=size,
            merge=lambda payloads: encode(merge([decode(payload) for payload in payloads])),
            deliver=self.take,
            heard=self._hear,
            failures=failures,
            first_step=self._steps.first_step,
        )
        if recorder is not None:
            first_step = self._steps.first_step
            self._channel.announce(lambda news: replace(news, first_step=first_step))

    # --- on the background thread: see Processor ------------------------------------------------

    def process(self, item: Item) -> None:
        """Send a step, keep what was logged for it, or write values."""
        self._record_merged()
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

    def _record_merged(self) -> None:
        """Record the steps that came back merged."""
        while self._merged:
            merged = self._merged.popleft()
            with self._failures.contained("to record a step of several ranks"):
                self._record(merged)
            self._bytes_done += len(merged.payload)
            self._note_recorded(merged)

    def _record(self, merged: Merged) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        recorder.abandoned = self.abandoned
        for item in self._items_of(merged):
            if isinstance(item, LoggedScalars):
                recorder.process(item)
            else:
                recorder.record(item)

    def pending_s(self) -> float | None:
        if self._recorder is None:
            return None
        pending_s = self._recorder.pending_s()
        return _LOOK_S if pending_s is None else min(_LOOK_S, pending_s)

    def write_pending(self) -> None:
        self._record_merged()
        if self._recorder is not None and not self.abandoned:
            self._recorder.write_pending()

    def end(self) -> None:
        self._record_merged()
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
            self._forget_scalars(record.step)
            self._eval_mode = record.eval_mode
        if self._recorder is not None and (record.full or record.phase):
            self._own[record.step, record.phase] = record
            while len(self._own) > _OWN_KEPT:
                del self._own[next(iter(self._own))]
        self._send_part(self._maker.part(record, captured))

    def _forget_scalars(self, step: int) -> None:
        self._scalars = {s: v for s, v in self._scalars.items() if s > step}

    def _send_part(self, part: RankPart) -> None:
        if self._recorder is not None:
            with self._changed:
                self._sent.add(_place(part))
        self._channel.send(part.step, encode(part), phase=part.phase)

    def _items_of(self, merged: Merged) -> Iterator[LoggedScalars | StepRecord]:
        """What was logged for a step, and its record."""
        part = decode(merged.payload)
        means = {name: figure.mean for name, figure in part.scalars.items()}
        if means and not part.phase:
            self._loss.see(part.step, means)
            yield LoggedScalars(step=part.step, wall_time=part.wall_time, values=means)
        own = self._own.pop((part.step, part.phase), None)
        record = self._whole.record(part, own) if part.stages else None
        if record is not None:
            self._steps.see(part, record)
            record = replace(record, eval_mode=self._eval_mode, loss_tag=self._loss.tag)
            yield _with_own(record, own)

    def take(self, merged: Merged) -> None:
        """On the thread of the channel; what there is no room for is not recorded."""
        if self._bytes_taken - self._bytes_done <= MAX_BYTES:
            self._bytes_taken += len(merged.payload)
            self._merged.append(merged)
            return
        self._failures.log_once(
            f"step {merged.step} is not recorded, earlier ones are still being judged; use a "
            "larger every_n_steps to keep up",
            kind="merged steps",
        )
        self._note_recorded(merged)

    def _note_recorded(self, merged: Merged) -> None:
        place = _place(merged)
        with self._changed:
            self._sent = {other for other in self._sent if other > place}
            self._changed.notify_all()

    # --- news for all ranks ----------------------------------------------------------------------

    def _announce(self, step: int) -> None:
        """Rules that have judged a step want a full one; the next is the same on all ranks."""
        if (at := self._steps.next_full(step)) is not None:
            self._channel.announce(lambda news: replace(news, full_steps=(at,)))

    def _hear(self, news: News) -> None:
        self._steps.hear(news)
        if news.message and self._alert is None:
            self._alert = parse_alert(json.loads(news.message))

    # --- on the training thread ------------------------------------------------------------------

    def raise_together(self, alert: Alert) -> None:
        """Have all ranks raise this alert at the end of the same step; on the first rank."""
        self._channel.raise_together(json.dumps(alert_fields(alert)))

    def to_raise(self, step: int | None) -> Alert | None:
        """The alert to raise now that this step has ended; None as a step: no other will."""
        agreement = self._channel.agreement
        due = agreement.training_ended() if step is None else agreement.step_ended(step)
        return self._alert if due else None

    def wait(self, timeout_s: float) -> None:
        """Wait until all that was sent has come back merged; only on the first rank."""
        with self._changed:
            self._changed.wait_for(lambda: not self._sent, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the exchange; on the first rank, after all that others sent in time is recorded."""
        each_within(min(CLOSE_S, timeout_s), self.wait, self._channel.close)


def _place(item: RankPart | Merged) -> tuple[int, bool]:
    """Phases of a step come before the step itself."""
    return item.step, not item.phase


def _with_own(record: StepRecord, own: StepRecord | None) -> StepRecord:
    """With what is not merged, and which the first rank has like the others."""
    if own is None:
        return record
    record = replace(record, fingerprints=own.fingerprints)
    if own.layout.parameters != record.layout.parameters:
        return record
    return replace(record, trainable=own.trainable, reached=own.reached, held=own.held)
