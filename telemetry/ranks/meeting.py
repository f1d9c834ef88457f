"""How ranks find each other: through the default process group's store, in the order they come.

The first rank publishes the address of its store. Of every other machine, the rank that comes first
opens a store of its own, to which the other ranks of that machine send. These leaders are numbered
as they come, and leader ``i`` sends to leader ``(i - 1) // 8``, where 0 is the first rank. So who
is above another in the tree has come before it: nobody waits for a rank that never comes, and
no rank has to know how many ranks a machine has.

The store is the one that training uses, too, and so is its connection, since a further one per rank
could exhaust the file descriptors of the process that serves it. Only calls are made that return at
once; a rank makes a dozen of them, and asks less and less often for what is not there yet. No
reference is kept, since the server ends with the last one.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from telemetry.ranks.address import Address, address_of, this_machine
from telemetry.ranks.inbox import Inbox

FAN_OUT = 8

PATIENCE_S = 5.0
"""How long to wait for a leader that was about to publish its address, before the first rank."""

_ASK_S = 0.1
_LAST_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place in the tree: where the first rank is reached, and the one to send to."""

    first: Address
    parent: Address
    keys: tuple[str, ...] = ()  # what this rank has published, to be deleted at the end


def default_store() -> Store:
    """The store of the default process group; ValueError: there is none."""
    store: Store | None = distributed.distributed_c10d._get_default_store()
    if store is None:
        raise ValueError("the default process group has no store")
    return store


class Meeting(threading.Thread):
    """Publishes the address of the first rank's inbox, as soon as there is a process group."""

    def __init__(self, name: str, inbox: Inbox) -> None:
        super().__init__(name="telemetry-meeting", daemon=True)
        self._name = name
        self._inbox = inbox
        self._closing = threading.Event()
        self._keys: tuple[str, ...] = ()
        self.start()

    def run(self) -> None:
        # Without a store, the first rank stays alone, and says so.
        with suppress(RuntimeError, OSError, ValueError):
            while not distributed.is_initialized():
                if self._closing.wait(_ASK_S):
                    return
            self._publish(default_store())

    def close(self) -> None:
        self._closing.set()
        self.join(_LAST_S)
        delete_keys(self._keys)

    def _publish(self, store: Store) -> None:
        here = address_of(self._inbox.store, meeting_host(store)).to_text()
        meeting = f"telemetry/{self._name}/{uuid.uuid4().hex}"  # not those of a run that has died
        machine = f"{meeting}/machine/{this_machine()}"
        first = key_of(self._name)
        self._keys = first, f"{meeting}/leaders", machine, f"{machine}/address"
        store.set(machine, "0")
        store.set(f"{machine}/address", here)
        store.set(first, json.dumps([meeting, here]))


class Search:
    """Looks for a rank's place in the tree, a step further with each call.

    If this rank leads its machine, ``open_inbox`` is called with its level in the tree: 0 is that
    of the first rank.
    """

    def __init__(self, name: str, rank: int, open_inbox: Callable[[int], Inbox]) -> None:
        self._name = name
        self._rank = rank
        self._open_inbox = open_inbox
        self._meeting = ""
        self._first: Address | None = None
        self._index = 0
        self._came_at = 0.0
        self._keys: tuple[str, ...] = ()

    @property
    def first(self) -> Address | None:
        return self._first

    def forget(self) -> None:
        """Nobody is where the first rank was said to be: that is what a former run has left."""
        self._first = None

    def go_on(self, store: Store) -> Place | None:
        """The place; None if somebody has not come so far."""
        if self._first is None:
            if not store.check([key_of(self._name)]):
                return None
            former = self._meeting
            self._meeting, address = json.loads(store.get(key_of(self._name)))
            self._first = Address.from_text(address)
            if self._meeting != former:
                self._come(store)
                self._came_at = time.monotonic()
        parent = self._parent(store)
        if parent is None:
            if time.monotonic() - self._came_at < PATIENCE_S:
                return None
            parent = self._first
        return Place(first=self._first, parent=parent, keys=self._keys)

    def _come(self, store: Store) -> None:
        self._index = 0
        machine = f"{self._meeting}/machine/{this_machine()}"
        leader = store.compare_set(machine, "", str(self._rank))
        if int(leader) != self._rank:
            return
        self._index = store.add(f"{self._meeting}/leaders", 1)
        inbox = self._open_inbox(level_of(self._index))
        here = address_of(inbox.store, meeting_host(store)).to_text()
        store.set(f"{machine}/address", here)
        own = f"{self._meeting}/leader/{self._index}"
        store.set(own, here)
        self._keys = (machine, f"{machine}/address", own)

    def _parent(self, store: Store) -> Address | None:
        if self._index == 0:
            key = f"{self._meeting}/machine/{this_machine()}/address"
        elif self._index <= FAN_OUT:
            return self._first
        else:
            key = f"{self._meeting}/leader/{(self._index - 1) // FAN_OUT}"
        return Address.from_text(store.get(key)) if store.check([key]) else None


def level_of(leader: int) -> int:
    """How many ranks are above a leader."""
    return 0 if leader == 0 else 1 + level_of((leader - 1) // FAN_OUT)


def most_levels(world_size: int) -> int:
    """How many levels a tree has at most: if each rank has a machine of its own."""
    return 1 + level_of(world_size)


def key_of(name: str) -> str:
    """Where the first rank's address is; another one after an elastic restart.

    The store of torchrun's agent outlives the processes, with what they have left in it.
    """
    return f"telemetry/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def delete_keys(keys: Sequence[str]) -> None:
    """Delete what was published, unless the process group is gone or its store does not answer."""

    def delete() -> None:
        with suppress(RuntimeError, ValueError):
            store = default_store()
            for key in keys:
                store.delete_key(key)

    if keys and distributed.is_initialized():
        thread = threading.Thread(target=delete, name="telemetry-meeting", daemon=True)
        thread.start()
        thread.join(_LAST_S)


def meeting_host(store: Store) -> str | None:
    """The host at which all ranks find the store; None if it is none with a server."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR")
