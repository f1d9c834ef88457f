"""How ranks find each other: through the default process group's store, in the order they come.

The first rank publishes the address of its store. Of every other machine, the rank that comes first
leads: it opens a store of its own, to which the other ranks of that machine send, and sends to the
first rank. Nobody waits for a rank that never comes, or has to know how many a machine has.

The store and its connection are those of training, too, since a further one per rank could exhaust
the file descriptors of the process that serves it. Only calls are made that return at once, ever
more seldom while something is not there yet. No reference is kept: the server ends with the last.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from telemetry.ranks.stores import Inbox

_ASK_S = 0.1
_LAST_S = 1.0
_LOOPBACK = ("127.", "::1")


class Address(NamedTuple):
    """Where a rank's store can be reached: its machine, names of the host, the best first; port."""

    machine: str
    hosts: list[str]
    port: int

    @property
    def reachable(self) -> list[str]:
        """Ranks of one machine or container share ``localhost``."""
        return ["localhost"] if self.machine == this_machine() else self.hosts


class Meeting:
    """Publishes where this rank is, if others send to it, and finds out where it sends itself.

    Attributes:
        first: Where the first rank is, as far as it is known.
        inbox: To which others send, if this rank leads its machine or is the first.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._closing = threading.Event()
        self._meeting = ""
        self._keys: list[str] = []
        self.first: Address | None = None
        self.inbox: Inbox | None = None

    def publish(self, inbox: Inbox) -> None:
        """On the first rank: say where it is, on a thread, as soon as there is a process group."""
        self.inbox = inbox
        threading.Thread(target=self._publish, name="telemetry-meeting", daemon=True).start()

    def find(self) -> Address | None:
        """Where to send: at first to who leads, then to the first rank; None if it has not come."""
        if self.first is not None:
            return self.first
        key = key_of(self._name)
        if not distributed.is_initialized() or not default_store().check([key]):
            return None
        self._meeting, first = json.loads(default_store().get(key))
        self.first = Address(*first)
        return self._leader() if self.inbox is None else self.first

    def close(self) -> None:
        """Delete what was published, unless the process group is gone or its store is silent."""
        self._closing.set()
        if self._keys and distributed.is_initialized():
            thread = threading.Thread(target=self._delete, name="telemetry-meeting", daemon=True)
            thread.start()
            thread.join(_LAST_S)

    def _publish(self) -> None:
        # Without a store, the first rank stays alone, and says so.
        with suppress(RuntimeError, OSError, ValueError):
            while not distributed.is_initialized():
                if self._closing.wait(_ASK_S):
                    return
            self._meeting = f"telemetry/{self._name}/{uuid.uuid4().hex}"  # not that of a dead run
            here = self._leader()
            self._keys.append(key_of(self._name))
            default_store().set(key_of(self._name), json.dumps([self._meeting, here]))

    def _leader(self) -> Address:
        """Of this machine: this rank, unless another one was before it."""
        store, key = default_store(), f"{self._meeting}/machine/{this_machine()}"
        inbox = self.inbox or Inbox()
        here = json.dumps(address_of(inbox.store, meeting_host(store)))
        found = store.compare_set(key, "", here).decode()
        if found != here:
            return Address(*json.loads(found))
        self._keys.append(key)
        self.inbox = inbox
        return self.first or Address(*json.loads(here))

    def _delete(self) -> None:
        with suppress(RuntimeError, ValueError):
            for key in self._keys:
                default_store().delete_key(key)


def default_store() -> Store:
    """The store of the default process group; ValueError: there is none."""
    store: Store | None = distributed.distributed_c10d._get_default_store()
    if store is None:
        raise ValueError("the default process group has no store")
    return store


def key_of(name: str) -> str:
    """Where the first rank's address is; another one after an elastic restart.

    The store of torchrun's agent outlives the processes, with what they have left in it.
    """
    return f"telemetry/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def this_machine() -> str:
    """Names this machine and its network: containers of one machine have different ones."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        names.append(os.readlink("/proc/self/ns/net"))
    return "/".join(names)


def meeting_host(store: Store) -> str | None:
    """The host at which all ranks find the store; None if it is none with a server."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR")


def address_of(server: TCPStore, meeting_host: str | None) -> Address:
    """Where others reach a server: at the address that is used towards ``meeting_host``."""
    hosts = []
    if meeting_host:
        with suppress(OSError):
            found = socket.getaddrinfo(meeting_host, 9, type=socket.SOCK_DGRAM)
            family, kind, _, _, target = found[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                hosts.append(probe.getsockname()[0])
        if not hosts or hosts[0].startswith(_LOOPBACK):
            hosts.append(meeting_host)  # which is this machine
    hosts.append(socket.gethostname())
    return Address(this_machine(), list(dict.fromkeys(hosts)), server.port)
