"""One rank's end of the channel between ranks: what it measured goes up, announcements come down.

The ranks of a machine send to the one that leads it, and the leaders to the first rank
(:mod:`telemetry.ranks.meeting`). Each of these hosts a ``torch.distributed.TCPStore`` for that
(:mod:`telemetry.ranks.stores`) and merges what belongs to one step
(:mod:`telemetry.ranks.gathering`); leaders send that on (:mod:`telemetry.ranks.uplink`). The first
rank has the whole. Announcements are posted on each of these stores, where the ranks below ask for
them four times a second, and whenever they send.

No collective takes part, no process group is made, and no rank waits for another except on its
background threads, each time for a bounded time and with bounded memory.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue

from telemetry.failures import Failures
from telemetry.ranks.gathering import (
    LAP,
    Gathering,
    Kind,
    Merge,
    Message,
    News,
    RunningClock,
    named,
)
from telemetry.ranks.meeting import Meeting, Search
from telemetry.ranks.raising import Agreement, Vote
from telemetry.ranks.stores import Inbox
from telemetry.ranks.uplink import LAST_S, Uplink

log = logging.getLogger("telemetry")

# How long it takes until a rank is late; a leader waits twice as long for those below it, and the
# first rank three times, so that it has heard from the leaders, which waited.
PATIENCE_S = 5.0

CLOSE_S = 20.0
BUSY_S, IDLE_S = 0.02, 0.2
"""How often a rank looks for what has arrived: while a step waits for others, and otherwise."""
_LEAVE_S = 2.0


class Channel:
    """Connects one logger with those of the other ranks. It has threads of its own.

    The ranks meet as soon as there is a default process group. Until then the first rank has only
    its own measurements, and what the others send waits. A forked child ignores everything.

    On its thread, ``merge`` makes one payload of several, in any order and grouping; ``deliver`` is
    called on the first rank with each step, in order; and ``heard`` on all ranks with each version
    of the news. The training thread asks ``agreement`` at the end of each step whether to raise.

    Args:
        name: The same for the loggers of one run on all ranks, and no other logger's.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        world_size: int,
        merge: Merge,
        deliver: Callable[[Message], None],
        heard: Callable[[News], None],
        failures: Failures,
        first_step: int = 0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._name = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._rank = rank
        self._world_size = world_size
        self._merge = merge
        self._deliver = deliver
        self._heard = heard
        self._failures = failures
        self._patience_s = patience_s
        self._clock = RunningClock()
        self._now = 0.0
        self._given: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._places = Order()
        self._gathering: Gathering | None = None
        self._inbox: Inbox | None = None
        self._uplink: Uplink | None = None
        self._news, self._posted = News(), b""
        self._vote: Vote | None = None
        self._attendance = Attendance(world_size)
        self._pid = os.getpid()
        self._closing = False
        self._close_at = math.inf
        self.agreement = Agreement(first_step)
        self._connect()
        self._thread = threading.Thread(target=self._run, name="telemetry-ranks", daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        if self._rank == 0:
            self._meeting = Meeting(self._name, self._open_inbox())
        else:
            greeting = Message(kind=Kind.JOINED, ranks=frozenset({self._rank}))
            search = Search(self._name, self._rank, self._open_inbox)
            self._uplink = Uplink(search, greeting.to_bytes(), self._patience_s)

    # --- from any thread -------------------------------------------------------------------------

    def send(self, step: int, payload: bytes, *, phase: str = "") -> None:
        """Hand over what this rank measured; the phases of a step come before the step itself."""
        self._give(lambda: self._send(step, payload, phase))

    def announce(self, change: Callable[[News], News]) -> None:
        """Change the news; on the first rank."""
        self._give(lambda: self._post(change(self._news)))

    def raise_together(self, message: str) -> None:
        """Have all ranks raise at the end of one step, the same one; on the first rank."""
        self._give(lambda: self._call_vote(message))

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
            self._now = self._clock.now()
            self._receive()
            self._hand_on(hurry=hurry)
            if self._uplink is not None:
                self._hear(self._uplink.look(self._now))
            self._count_votes()

    def _do_given(self) -> None:
        busy = self._gathering is not None and self._gathering.waiting > 0
        try:
            act = self._given.get(timeout=BUSY_S if busy else IDLE_S)
            while True:
                act()
                act = self._given.get_nowait()
        except Empty:
            pass

    def _receive(self) -> None:
        for data in () if self._inbox is None else self._inbox.collect():
            self._take(Message.from_bytes(data))

    def _send(self, step: int, payload: bytes, phase: str) -> None:
        place, ranks = self._places.next(step, phase), frozenset({self._rank})
        self._take(Message(place=place, phase=phase, ranks=ranks, payload=payload))

    def _take(self, message: Message) -> None:
        """Something from this rank or from below."""
        if self._gathering is not None and message.kind != Kind.HELD:
            self._gathering.add(message, self._now)
        if self._uplink is not None:
            if self._gathering is None or message.kind != Kind.RECORD:
                self._uplink.put(message.to_bytes(), droppable=message.kind == Kind.RECORD)
        elif message.kind == Kind.HELD and self._vote is not None:
            self._vote.add(message.ranks, message.place)

    def _hand_on(self, *, hurry: bool) -> None:
        """Send or deliver the steps that are complete."""
        gathering = self._gathering
        while gathering is not None and (message := gathering.take(self._now, hurry=hurry)):
            if self._uplink is not None:
                self._uplink.put(message.to_bytes(), droppable=True)
                continue
            with self._failures.contained("to record what the ranks measured"):
                if not message.phase:
                    self._attendance.check(message.step, message.ranks, gathering)
                self._deliver(message)

    def _hear(self, news: bytes) -> None:
        if news and news != self._posted:
            self._pass_on(News.from_bytes(news), news)

    def _post(self, news: News) -> None:
        self._pass_on(news, news.to_bytes())

    def _pass_on(self, news: News, data: bytes) -> None:
        """To the ranks below, and to this one."""
        self._news, self._posted = news, data
        if self._inbox is not None:
            self._inbox.post(data)
        self._heard(news)  # first: the training thread may need it as soon as it goes on
        if news.hold and (held := self.agreement.hold()) is not None:
            self._take(Message(kind=Kind.HELD, place=held, ranks=frozenset({self._rank})))
        if news.raise_at is not None:
            self.agreement.decide(news.raise_at)

    def _call_vote(self, message: str) -> None:
        if self._vote is None:
            self._vote = Vote(self._now)
            self._post(replace(self._news, hold=True, message=message))

    def _count_votes(self) -> None:
        if self._vote is not None and self._gathering is not None:
            voters = self._gathering.members | {self._rank}
            if self._vote.choose(voters, self._now):
                self._post(replace(self._news, raise_at=self._vote.decided))

    def _open_inbox(self) -> Inbox:
        """On the first rank; and on a thread of the uplink's if this rank leads its machine."""
        if self._inbox is not None:
            return self._inbox
        is_first, patience_s = self._rank == 0, self._patience_s
        inbox = Inbox()
        inbox.post(self._posted)
        self._gathering = Gathering(
            world_size=self._world_size,
            merge=self._merge,
            patience_s=(3 if is_first else 2) * patience_s,
            start_s=self._now + (3 * patience_s if is_first else patience_s / 4),
            forwards_late=not is_first,
        )
        self._inbox = inbox
        return inbox

    def _end(self) -> None:
        if self._uplink is not None:
            self._send_children_elsewhere()
            self._turn(hurry=True)
            left = Message(kind=Kind.LEFT, ranks=frozenset({self._rank}))
            self._uplink.put(left.to_bytes(), droppable=False)
            self._uplink.close(self._close_at - time.monotonic())
        else:
            while self._gathering is not None and self._gathering.waiting and self._has_time:
                self._turn()
            self._turn(hurry=True)
            self._send_children_elsewhere()
            self._meeting.close()
        self.agreement.decide(self._news.raise_at)
        self._inbox = None  # which ends its server

    def _send_children_elsewhere(self) -> None:
        """Those of the first rank have nowhere else to go, and end."""
        if self._inbox is None:
            return
        self._inbox.dismiss()
        give_up = min(self._close_at, time.monotonic() + _LEAVE_S)
        while self._inbox.children and time.monotonic() < give_up:
            self._turn()

    @property
    def _has_time(self) -> bool:
        return time.monotonic() < self._close_at


class Order:
    """The order of what a rank sends: each step has a place, the same on all ranks."""

    def __init__(self) -> None:
        self._lap, self._last = 0, (-1, "")

    def next(self, step: int, phase: str) -> int:
        """The place of a step, or of a phase before it; never lower than the one before.

        A run that goes back to an earlier step, or repeats a phase, begins another lap.
        """
        place = 2 * step + (not phase)
        self._lap += place < self._last[0] or (place, phase) == self._last
        self._last = place, phase
        return self._lap * LAP + place


class Attendance:
    """Tells which ranks the records lack: once when they go, and once when they return."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._missed: set[int] = set()
        self._back: set[int] = set()
        self._elsewhere: set[int] = set()

    def check(self, step: int, ranks: frozenset[int], gathering: Gathering) -> None:
        """Log what is new at a step of which these ranks are there."""
        absent, silent = gathering.never_joined - ranks, gathering.silent - ranks
        self._tell_missed(step, ranks, absent, "made no HookLogger for this run so far")
        self._tell_missed(step, ranks, silent, "sent nothing in time and may hang or have died")
        back = (self._missed & ranks) - self._back
        if back:
            self._back |= back
            log.warning(
                "telemetry: from step %d on, the records hold what %s measured", step, named(back)
            )
        others = gathering.members - ranks - self._elsewhere
        if others:
            self._elsewhere |= others
            log.warning(
                "telemetry: step %d was measured by %s, and not by %s; use the same every_n_steps "
                "on all ranks", step, named(ranks), named(others),
            )  # fmt: skip

    def _tell_missed(
        self, step: int, ranks: frozenset[int], missed: frozenset[int], reason: str
    ) -> None:
        new = missed - self._missed
        if new:
            self._missed |= new
            log.warning(
                "telemetry: from step %d on, the records hold %d of %d ranks: %s %s",
                step, len(ranks), self._world_size, named(new), reason,
            )  # fmt: skip
