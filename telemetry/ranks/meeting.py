"""How ranks find each other: through the default process group's store, in the order they come.

The first rank publishes where it listens. Of every other machine, the rank that comes first leads:
it listens, too, and the other ranks of that machine send to it, and it to the first rank. Nobody
waits for a rank that never comes, or has to know how many a machine has.

The store and its connection are those of training, too, since a further one per rank could exhaust
the file descriptors of the process that serves it. Only calls are made that return at once, unless
that process is stopped. No reference is kept: the server ends with the last.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple, TypeVar

from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")

_LOOPBACK = ("127.", "::1")
_BACKLOG = 1024


class Address(NamedTuple):
    """Where a rank listens: its machine, names of the host, the best first; and the port."""

    machine: str
    hosts: list[str]
    port: int

    @property
    def reachable(self) -> list[str]:
        """Ranks of one machine or container share the loopback."""
        return ["127.0.0.1", "::1"] if self.machine == this_machine() else self.hosts


class Meeting:
    """Publishes where this rank is, if others send to it, and finds out where it sends itself.

    Its methods ask the store, so call them :func:`in_thread`.
    """

    def __init__(self, name: str) -> None:
        self.password = ""  # of this run, for whom nobody else is taken
        self.first: Address | None = None  # where the first rank is, as far as that is known
        # At which others reach this rank, if it leads its machine or is the first.
        self.listening: socket.socket | None = None
        self._name = name
        self._keys: list[str] = []

    def publish(self) -> None:
        """On the first rank: say where it is, once there is a process group."""
        self.password = uuid.uuid4().hex  # not that of a dead run
        here = self._leader()
        self._keys.append(key_of(self._name))
        default_store().set(key_of(self._name), json.dumps([self.password, here]))

    def find(self) -> Address | None:
        """Where to send: to who leads, later to the first rank; None if that has not come."""
        if self.first is not None:
            return self.first
        key = key_of(self._name)
        if not default_store().check([key]):
            return None
        self.password, first = json.loads(default_store().get(key))
        self.first = Address(*first)
        return self._leader() if self.listening is None else self.first

    def _leader(self) -> Address:
        """Of this machine: this rank, unless another one was before it."""
        store, key = default_store(), f"telemetry/{self.password}/{this_machine()}"
        listening = self.listening or _listen()
        here = json.dumps(address_of(listening.getsockname()[1], meeting_host(store)))
        found = store.compare_set(key, "", here).decode()
        if found != here:
            listening.close()
            return Address(*json.loads(found))
        self._keys.append(key)
        self.listening = listening
        return self.first or Address(*json.loads(here))

    def delete(self) -> None:
        """What was published, unless the process group is gone."""
        with suppress(RuntimeError, ValueError):
            for key in self._keys:
                default_store().delete_key(key)


async def in_thread(call: Callable[[], T]) -> T:
    """What a call returns that may never do so; no exit waits, unlike for ``asyncio.to_thread``."""
    result = Future[T]()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    Thread(target=run, name="telemetry-meeting", daemon=True).start()
    return await asyncio.wrap_future(result)


def _listen() -> socket.socket:
    """On a free port of all addresses."""
    with suppress(OSError):  # IPv6 may be switched off
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
    return socket.create_server(("", 0), backlog=_BACKLOG)


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


def address_of(port: int, meeting_host: str | None) -> Address:
    """Where others reach this rank: at the address that is used towards ``meeting_host``."""
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
    return Address(this_machine(), list(dict.fromkeys(hosts)), port)
