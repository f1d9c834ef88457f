"""One rank's end of the channel between ranks: what it measured goes up, announcements come down.

The ranks of a machine send to the one that leads it, and the leaders to the first rank
(:mod:`telemetry.ranks.meeting`), over connections of their own
(:mod:`telemetry.ranks.connections`). Who receives merges what belongs to one step
(:mod:`telemetry.ranks.gathering`). No collective takes part, no process group is made, and nobody
waits but background threads, each time for a bounded time and with bounded memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from torch import distributed

from telemetry.failures import Failures
from telemetry.ranks.connections import Inbox, Uplink, is_set_within
from telemetry.ranks.gathering import Gathering
from telemetry.ranks.measured import Measured
from telemetry.ranks.meeting import Meeting, in_thread
from telemetry.ranks.messages import END, Message, News, blocks, decode, encode
from telemetry.ranks.raising import ANSWER_S, Agreement

# Places in the order of all: each step has so many, the last is its own and the others of phases
# before it. A run that goes back to an earlier step begins another lap.
PLACES = 2**10
LAP = PLACES * 2**34

# How long it takes until a rank is late; a leader waits twice as long for those below it, and the
# first rank three times, so that it has heard from the leaders, which waited.
PATIENCE_S = 5.0

CLOSE_S = 20.0
TURN_S, IDLE_S = 0.02, 0.2
"""How long what comes waits for more, to travel with it; and how often what waits is looked at."""
_LAST_S = 2.0

# A time for which this process was stopped counts as no more: what others sent meanwhile has yet to
# be read, and nobody else was late.
_LONGEST_TURN_S = 1.0


class Channel:
    """Connects one logger with those of the other ranks. It has threads of its own.

    The ranks meet as soon as there is a default process group; until then, what they send waits. A
    forked child ignores everything.

    On its thread, ``deliver`` is called on the first rank with each step, in order; and ``heard``
    on all with each version of the news. The training thread asks ``agreement`` at the end of each
    step whether to raise.

    Args:
        name: The same for the loggers of one run on all ranks, and no other logger's.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        world_size: int,
        deliver: Callable[[Measured], None],
        heard: Callable[[News], None],
        failures: Failures,
        first_step: int = 0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._me = frozenset({rank})
        self._deliver = deliver
        self._heard = heard
        self._failures = failures
        self._now, self._turned_at = 0.0, time.monotonic()
        self._lap, self._last = 0, -1
        self._own: list[Measured] = []  # measured here, and yet to be sent or merged
        self._news = News() if rank else News(first_step=first_step)
        self._asked_at = math.inf  # to raise
        self._answers: dict[int, int] = {}
        self._pid = os.getpid()
        self._closing = False
        self._close_at = math.inf
        self.agreement = Agreement(first_step)
        self._meeting = Meeting(hashlib.sha256(name.encode()).hexdigest()[:16])
        self._inbox: Inbox | None = None
        self._uplink = Uplink(self._meeting, patience_s, self._hear) if rank else None
        self._gathering = Gathering(
            world_size=world_size,
            patience_s=(2 if rank else 3) * patience_s,
            start_s=patience_s / 4 if rank else 3 * patience_s,
            is_first=not rank,
        )
        self._loop = asyncio.SelectorEventLoop()
        self._woken = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-ranks", daemon=True)
        self._thread.start()

    # --- from any thread -------------------------------------------------------------------------

    def send(self, part: Measured) -> None:
        """Hand over what this rank measured; the phases of a step come before the step itself."""
        self._give(lambda: self._send(part))

    def announce(self, full_step: int) -> None:
        """Have all ranks measure this step in full; on the first rank."""
        self._give(lambda: self._post(replace(self._news, full_step=full_step)))

    def raise_together(self, message: str) -> None:
        """Have all ranks raise at the end of one step, the same one; on the first rank."""
        self._give(lambda: self._ask_all(message))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what waits, let the ranks below go elsewhere, and end. Harmless when repeated.

        The first rank waits for what others measured at the steps that it has, as long as for any
        late rank, and all within ``timeout_s``; then there are two seconds more.
        """
        if not self.is_in_own_process:
            return
        self._close_at = min(self._close_at, time.monotonic() + timeout_s)
        self._give(self._close)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s + _LAST_S)

    @property
    def is_in_own_process(self) -> bool:
        return os.getpid() == self._pid

    def _give(self, act: Callable[[], None]) -> None:
        if self.is_in_own_process:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._do, act)

    # --- on the channel's thread -----------------------------------------------------------------

    def _run(self) -> None:
        with self._failures.contained("to end the exchange with other ranks"):
            self._loop.run_until_complete(self._live())
        self.agreement.decide(self._news.raise_at)
        self._loop.close()

    async def _live(self) -> None:
        meeting = asyncio.create_task(self._meet())
        while not self._closing:
            await self._turn()
        await self._end(meeting)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _meet(self) -> None:
        with self._failures.contained("to find the other ranks"):
            if self._uplink is not None:
                await self._uplink.run()
                return
            while not distributed.is_initialized():
                await asyncio.sleep(IDLE_S)
            with suppress(RuntimeError, OSError, ValueError):  # it stays alone, and says so
                await in_thread(self._meeting.publish)

    def _do(self, act: Callable[[], None]) -> None:
        with self._failures.contained("to exchange records with other ranks"):
            act()
        self._woken.set()

    def _close(self) -> None:
        self._closing = True

    async def _turn(self, *, hurry: bool = False) -> None:
        """Do what there is to do, after a wait of a moment for more of it."""
        await is_set_within(0 if hurry else IDLE_S, self._woken)
        await asyncio.sleep(0 if self._closing else TURN_S)
        self._woken.clear()
        with self._failures.contained("to exchange records with other ranks"):
            turned_at, self._turned_at = self._turned_at, time.monotonic()
            self._now += min(self._turned_at - turned_at, _LONGEST_TURN_S)
            if self._inbox is None and self._meeting.listening is not None:
                self._inbox = Inbox(self._meeting.password, self._hear_below, encode(self._news))
                await self._inbox.open(self._meeting.listening)
            self._hand_on(hurry=hurry)
            if self._uplink is not None:
                self._uplink.look(self._now)
            self._choose()

    def _send(self, part: Measured) -> None:
        end = self._lap + (part.step + 1) * PLACES - 1
        if end <= self._last:  # it goes back to an earlier step
            self._lap += LAP
            end += LAP
        self._last = max(end - PLACES + 1, self._last + 1) if part.phase else end
        self._own.append(replace(part, place=self._last))

    def _hear_below(self, data: bytes) -> None:
        self._do(lambda: self._take(decode(Message, data)))

    def _take(self, message: Message) -> None:
        """Something from below, or an answer of this rank."""
        if message.held is not None:
            self._answers.update(dict.fromkeys(message.ranks, message.held))
        self._gathering.add(message, self._now)
        if self._uplink is not None and not message.payload:
            self._uplink.put(encode(message), droppable=False)

    def _hand_on(self, *, hurry: bool) -> None:
        """Send or deliver the steps that are complete."""
        own, self._own = self._own, []
        others_send = self._uplink is None or self._inbox is not None
        steps = self._merged(own, hurry=hurry) if others_send else iter(own)
        if self._uplink is not None:
            for block in blocks(steps):
                self._uplink.put(encode(Message.of(block)), droppable=True)
            return
        for whole in steps:
            with self._failures.contained("to record what the ranks measured"):
                self._deliver(whole)

    def _merged(self, own: list[Measured], *, hurry: bool) -> Iterator[Measured]:
        for part in own:
            self._gathering.add_own(part, self._now)
        while (whole := self._gathering.take(self._now, hurry=hurry)) is not None:
            if self._uplink is None and not whole.phase:
                self._gathering.tell_missing(whole)
            yield whole

    def _hear(self, data: bytes) -> None:
        if (news := decode(News, data)) != self._news:
            self._post(news)

    def _post(self, news: News) -> None:
        """To the ranks below, and to this one."""
        self._news = news
        if self._inbox is not None:
            self._inbox.post(encode(news))
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
        if self._asked_at < math.inf and self._news.raise_at is None:
            late = self._now - self._asked_at > ANSWER_S
            if late or self._gathering.members <= self._answers.keys():
                self._post(replace(self._news, raise_at=max(self._answers.values())))

    async def _end(self, meeting: asyncio.Task[None]) -> None:
        if self._uplink is not None:
            if self._inbox is not None:
                self._inbox.close()
            await self._turn(hurry=True)
            left = Message(places=(END,), ranks=self._me)
            self._uplink.put(encode(left), droppable=False)
            self._uplink.finish()
            await asyncio.wait({meeting}, timeout=max(0, self._close_at - time.monotonic()))
        else:
            while self._gathering.waiting and time.monotonic() < self._close_at:
                await self._turn()
            await self._turn(hurry=True)
        if self._inbox is not None:
            self._inbox.close()
            with suppress(asyncio.TimeoutError):  # the store may be silent
                await asyncio.wait_for(in_thread(self._meeting.delete), _LAST_S / 2)
