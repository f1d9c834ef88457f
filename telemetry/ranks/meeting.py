"""How ranks find each other: through the default process group's store, in the order they come.

The first rank publishes the address of its store. Of every other machine, the rank that comes first
leads: it opens a store of its own, to which the other ranks of that machine send, and sends to the
first rank. Nobody waits for a rank that never comes, and no rank has to know how many ranks a
machine has.

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

from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from telemetry.ranks.stores import Address, Inbox, address_of, this_machine

# How long to wait for a leader that was about to publish its address, before the first rank.
PATIENCE_S = 5.0

_ASK_S = 0.1
_LAST_S = 1.0


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
        machine, first = machine_key(meeting), key_of(self._name)
        self._keys = first, machine, f"{machine}/address"
        store.set(machine, "0")
        store.set(f"{machine}/address", here)
        store.set(first, json.dumps([meeting, here]))


class Search:
    """Looks for whom a rank is to send to, a step further with each call of :meth:`find`.

    If this rank leads its machine, ``open_inbox`` is called.

    Attributes:
        first: Where the first rank is, as far as it is known.
        only_first: Whether to send to the first rank, whoever leads.
        keys: What this rank has published, to be deleted at the end.
    """

    def __init__(self, name: str, rank: int, open_inbox: Callable[[], Inbox]) -> None:
        self._name = name
        self._rank = rank
        self._open_inbox = open_inbox
        self._meeting = ""
        self._came_at = 0.0
        self.first: Address | None = None
        self.only_first = False
        self.keys: tuple[str, ...] = ()

    def find(self) -> Address | None:
        """Where to send; None if somebody has not come so far."""
        if self.first is not None and self.only_first:
            return self.first
        if not distributed.is_initialized():
            return None
        store = default_store()
        if self.first is None:
            if not store.check([key_of(self._name)]):
                return None
            former = self._meeting
            self._meeting, address = json.loads(store.get(key_of(self._name)))
            if self._meeting != former:
                self._come(store)
            self.first = Address.from_text(address)
        key = f"{machine_key(self._meeting)}/address"
        if self.only_first or time.monotonic() - self._came_at > PATIENCE_S:
            return self.first
        return Address.from_text(store.get(key)) if store.check([key]) else None

    def _come(self, store: Store) -> None:
        """Lead this machine, unless another rank does."""
        self._came_at = time.monotonic()
        machine = machine_key(self._meeting)
        self.only_first = int(store.compare_set(machine, "", str(self._rank))) == self._rank
        if self.only_first:
            here = address_of(self._open_inbox().store, meeting_host(store)).to_text()
            store.set(f"{machine}/address", here)
            self.keys = machine, f"{machine}/address"


def machine_key(meeting: str) -> str:
    return f"{meeting}/machine/{this_machine()}"


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
