"""Rendezvous: rank 0 publishes its address and the run's token in the process group's store.

The store is the one of the default process group: another connection per rank could exhaust the
file descriptors of its server. Calls return at once, unless the server's process is stopped, so
they run :func:`in_thread`. No reference is kept: the server ends with the last one.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import NamedTuple, TypeVar

from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")

_BACKLOG = 1024
_NONE = "none"
_LOOPBACK = "127.0.0.1"
# An address of no host (RFC 5737): the way to it is the default route.
_ELSEWHERE = "192.0.2.1"


class Address(NamedTuple):
    """Address of rank 0, and the token that every rank of the run proves to have."""

    host: str
    port: int
    token: str


class Rendezvous:
    """Publishes rank 0's address, or finds it; one for each logger of a run.

    Args:
        name: The same for the loggers of one run on all ranks, and for no other logger.
    """

    def __init__(self, name: str) -> None:
        # Another key after an elastic restart, which the store outlives.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.key = f"telemetry/{restart}/{name}"

    def publish(self) -> tuple[socket.socket, str]:
        """On rank 0, in a process group: a listening socket and the token of the run."""
        store = default_store()
        host, token = _host_for(store), secrets.token_hex(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        store.set(self.key, json.dumps([host, listening.getsockname()[1], token]))
        return listening, token

    def find(self) -> Address | None:
        """Address of rank 0; None if it is not published."""
        # Unlike get(), this returns at once where there is no such key.
        found = default_store().compare_set(self.key, _NONE, _NONE).decode()
        return None if found == _NONE else Address(*json.loads(found))

    def delete(self) -> None:
        """Remove the address, if the process group still exists."""
        with suppress(RuntimeError, ValueError):
            default_store().delete_key(self.key)


async def in_thread(call: Callable[[], T]) -> T:
    """Result of a call that may never return; no exit waits, unlike for ``asyncio.to_thread``."""
    result = Future[T]()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    Thread(target=run, name="telemetry-rendezvous", daemon=True).start()
    return await asyncio.wrap_future(result)


def default_store() -> Store:
    """The store of the default process group; ValueError: there is none."""
    store: Store | None = distributed.distributed_c10d._get_default_store()
    if store is None:
        raise ValueError("the default process group has no store")
    return store


def _host_for(store: Store) -> str:
    """Address of the interface that reaches the store's host; loopback if all ranks are here."""
    local, world = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR", "")
    if host in ("", "localhost", "::1") or host.startswith("127.") or (local and local == world):
        return _LOOPBACK
    found = _source_towards(host)
    if not found.startswith("127."):
        return found
    # A name of this host, which /etc/hosts maps to loopback; other hosts come by another address.
    with suppress(OSError):
        return _source_towards(_ELSEWHERE)
    return found


def _source_towards(host: str) -> str:
    """Address of the interface on the way to a host; OSError: there is no way."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        source: str = probe.getsockname()[0]
    return source
