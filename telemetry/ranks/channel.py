"""One rank's end of the channel between ranks: what it measured goes up, announcements come down.

The ranks of a machine send to the one that leads it, and the leaders to the first rank
(:mod:`telemetry.ranks.meeting`). Each of these hosts a ``torch.distributed.TCPStore`` for that
(:mod:`telemetry.ranks.stores`) and merges what belongs to one step
(:mod:`telemetry.ranks.gathering`); leaders send that on (:mod:`telemetry.ranks.uplink`).
Announcements are posted on these stores, where the ranks below ask for them four times a second,
and whenever they send. No collective takes part, no process group is made, and nobody waits but
background threads, each time for a bounded time and with bounded memory.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from telemetry.failures import Failures
from telemetry.ranks.gathering import END, LAP, PLACES, Gathering, Message, News, Part, Step, blocks
from telemetry.ranks.meeting import Meeting
from telemetry.ranks.raising import ANSWER_S, Agreement
from telemetry.ranks.stores import Inbox
from telemetry.ranks.uplink import LAST_S, Uplink

# How long it takes until a rank is late; a leader waits twice as long for those below it, and the
# first rank three times, so that it has heard from the leaders, which waited.
PATIENCE_S = 5.0

CLOSE_S = 20.0
BUSY_S, IDLE_S = 0.02, 0.2
"""How often a rank looks for what has arrived: while a step waits for others, and otherwise."""
_LEAVE_S = 2.0

# A time for which this process was stopped counts as no more: what others sent meanwhile has yet to
# be read, and nobody else was late.
_LONGEST_TURN_S = 1.0


class Channel:
    """Connects one logger with those of the other ranks. It has threads of its own.

    The ranks meet as soon as there is a default process group; until then, what they send waits. A
    forked child ignores everything.

    On its thread, ``encode`` and ``decode`` make bytes of the parts of several steps and back;
    ``merge`` makes one part of several ranks' in any grouping; ``deliver`` is called on the first
    rank with each step, in order; and ``heard`` on all with each version of the news. The training
    thread asks ``agreement`` at the end of each step whether to raise.

    Args:
        name: The same for the loggers of one run on all ranks, and no other logger's.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        world_size: int,
        encode: Callable[[list[Any]], bytes],
        decode: Callable[[bytes], Sequence[Any]],
        merge: Callable[[list[Any]], Any],
        deliver: Callable[[Step], None],
        heard: Callable[[News], None],
        failures: Failures,
        first_step: int = 0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._me = frozenset({rank})
        self._world_size = world_size
        self._encode = encode
        self._decode = decode
        self._merge = merge
        self._deliver = deliver
        self._heard = heard
        self._failures = failures
        self._patience_s = patience_s
        self._now, self._turned_at = 0.0, time.monotonic()
        self._given: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lap, self._last = 0, -1
        self._own: list[Step] = []  # measured here, and yet to be sent or merged
        self._gathering: Gathering | None = None
        self._inbox: Inbox | None = None
        self._uplink: Uplink | None = None
        self._news = News()
        self._asked_at = math.inf
        self._pid = os.getpid()
        self._closing = False
        self._close_at = math.inf
        self.agreement = Agreement(first_step)
        self._meeting = Meeting(hashlib.sha256(name.encode()).hexdigest()[:16])
        if rank == 0:
            inbox = Inbox()
            self._serve(inbox)
            self._meeting.publish(inbox)
        else:
            self._uplink = Uplink(self._meeting, patience_s)
        self._thread = threading.Thread(target=self._run, name="telemetry-ranks", daemon=True)
        self._thread.start()

    # --- from any thread -------------------------------------------------------------------------

    def send(self, step: int, part: Part, *, phase: str = "") -> None:
        """Hand over what this rank measured; the phases of a step come before the step itself."""
        self._give(lambda: self._send(step, part, phase))

    def announce(self, change: Callable[[News], News]) -> None:
        """Change the news; on the first rank."""
        self._give(lambda: self._post(change(self._news)))

    def raise_together(self, message: str) -> None:
        """Have all ranks raise at the end of one step, the same one; on the first rank."""
        self._give(lambda: self._ask_all(message))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what waits, let the ranks below go elsewhere, and end. Harmless when repeated.

        The first rank waits for what others measured at the steps that it has, as long as for any
        late rank, and all within ``timeout_s``; threads that hang have four seconds more.
        """
        if os.getpid() != self._pid:
            return
        if not self._closing:
            self._closing, self._close_at = True, time.monotonic() + timeout_s
            self._given.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s + LAST_S)

    def _give(self, act: Callable[[], None]) -> None:
        if os.getpid() == self._pid and not self._closing:
            self._given.put(act)

    # --- on the channel's thread -----------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._turn()
        with self._failures.contained("to end the exchange with other ranks"):
            self._end()

    def _turn(self, *, hurry: bool = False) -> None:
        """Do what there is to do, after a wait of a moment for more of it."""
        with self._failures.contained("to exchange records with other ranks"):
            self._do_given()
            turned_at, self._turned_at = self._turned_at, time.monotonic()
            self._now += min(self._turned_at - turned_at, _LONGEST_TURN_S)
            if self._inbox is None and self._meeting.inbox is not None:
                self._serve(self._meeting.inbox)
            for data in () if self._inbox is None else self._inbox.collect():
                self._take(Message.from_bytes(data))
            self._hand_on(hurry=hurry)
            if self._uplink is not None:
                self._uplink.look(self._now)
                if (heard := self._uplink.news) and (news := News.from_bytes(heard)) != self._news:
                    self._post(news)
            self._choose()

    def _do_given(self) -> None:
        """What comes within a moment travels together."""
        try:
            act = self._given.get(timeout=BUSY_S if self._is_busy else IDLE_S)
            if not self._closing:
                time.sleep(BUSY_S)
            while True:
                act()
                act = self._given.get_nowait()
        except Empty:
            pass

    @property
    def _is_busy(self) -> bool:
        return self._gathering is not None and self._gathering.waiting > 0

    def _serve(self, inbox: Inbox) -> None:
        """Others send to this rank, from now on."""
        self._inbox, is_first = inbox, self._uplink is None
        inbox.post(self._news.to_bytes())
        self._gathering = Gathering(
            world_size=self._world_size,
            decode=self._decode,
            merge=self._merge,
            patience_s=(3 if is_first else 2) * self._patience_s,
            start_s=3 * self._patience_s if is_first else self._patience_s / 4,
            forwards_late=not is_first,
        )

    def _send(self, step: int, part: Part, phase: str) -> None:
        end = self._lap + (step + 1) * PLACES - 1
        if end <= self._last:  # it goes back to an earlier step
            self._lap += LAP
            end += LAP
        self._last = max(end - PLACES + 1, self._last + 1) if phase else end
        self._own.append(Step(self._last, self._me, part))

    def _take(self, message: Message) -> None:
        """Something from below, or an answer of this rank."""
        if self._gathering is not None:
            self._gathering.add(message, self._now)
        if self._uplink is not None and not message.payload:
            self._uplink.put(message.to_bytes(), droppable=False)

    def _hand_on(self, *, hurry: bool) -> None:
        """Send or deliver the steps that are complete."""
        own, self._own = self._own, []
        steps = iter(own) if self._gathering is None else self._merged(self._gathering, own, hurry)
        if self._uplink is None:
            for step in steps:
                with self._failures.contained("to record what the ranks measured"):
                    self._deliver(step)
            return
        for block in blocks(steps):
            self._uplink.put(Message.of(block, self._encode).to_bytes(), droppable=True)

    def _merged(self, gathering: Gathering, own: list[Step], hurry: bool) -> Iterator[Step]:
        for step in own:
            gathering.add_own(step, self._now)
        while (whole := gathering.take(self._now, hurry=hurry)) is not None:
            if self._uplink is None and not whole.is_phase:
                gathering.tell_missing(whole)
            yield whole

    def _post(self, news: News) -> None:
        """To the ranks below, and to this one."""
        self._news = news
        if self._inbox is not None:
            self._inbox.post(news.to_bytes())
        self._heard(news)  # first: the training thread may need it as soon as it goes on
        if news.message and (held := self.agreement.hold()) is not None:
            self._take(Message(held=held, ranks=self._me))
        if news.raise_at is not None:
            self.agreement.decide(news.raise_at)

    def _ask_all(self, message: str) -> None:
        if not self._news.message:
            self._asked_at = self._now
            self._post(replace(self._news, message=message))

    def _choose(self) -> None:
        """Where all raise, once all have answered or had their time; on the first rank."""
        asked = self._asked_at < math.inf and self._news.raise_at is None
        if asked and self._gathering is not None:
            late = self._now - self._asked_at > ANSWER_S
            if (step := self._gathering.held(at_once=late)) is not None:
                self._post(replace(self._news, raise_at=step))

    def _end(self) -> None:
        if self._uplink is not None:
            self._dismiss()
            self._turn(hurry=True)
            left = Message(places=(END,), ranks=self._me)
            self._uplink.put(left.to_bytes(), droppable=False)
            self._uplink.close(self._close_at - time.monotonic())
        else:
            while self._is_busy and time.monotonic() < self._close_at:
                self._turn()
            self._turn(hurry=True)
            self._dismiss()
            self._meeting.close()
        self.agreement.decide(self._news.raise_at)
        self._inbox = self._meeting.inbox = None  # which ends its server

    def _dismiss(self) -> None:
        """Send the ranks below elsewhere; those of the first rank have nowhere to go, and end."""
        if self._inbox is None:
            return
        self._inbox.dismiss()
        give_up = min(self._close_at, time.monotonic() + _LEAVE_S)
        while self._inbox.children and time.monotonic() < give_up:
            self._turn()
