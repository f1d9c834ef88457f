"""Where the ranks find each other's stores: servers on free ports, their addresses, connections."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

CONNECT_S = 2.0
_NO_LIMIT = timedelta(days=1)
_LOOPBACK = ("127.", "::1")

Peer = tuple[str, int]
"""Host and port of a server that has answered."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a rank's store can be reached.

    Attributes:
        machine: Names the machine or container: ranks with the same one share ``localhost``.
        hosts: Names or numbers under which others may reach it, the best first.
        port: Of its server.
    """

    machine: str
    hosts: tuple[str, ...]
    port: int

    def to_text(self) -> str:
        return json.dumps([self.machine, list(self.hosts), self.port])

    @staticmethod
    def from_text(text: bytes) -> Address:
        machine, hosts, port = json.loads(text)
        return Address(machine=str(machine), hosts=tuple(map(str, hosts)), port=int(port))


def this_machine() -> str:
    """Names this machine and its network: containers of one machine have different ones."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return "/".join(parts)


def open_server() -> TCPStore:
    """A store with a server on a free port; its thread is the library's own, without the GIL."""
    return TCPStore(
        "localhost", 0, is_master=True, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False
    )


def address_of(server: TCPStore, meeting_host: str | None) -> Address:
    """Where others reach a server of this process.

    Towards the host through which all ranks met, such as ``MASTER_ADDR``, the system knows which of
    this machine's addresses to use.
    """
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
    return Address(machine=this_machine(), hosts=tuple(dict.fromkeys(hosts)), port=server.port)


def reach(address: Address) -> Peer:
    """Finds under which of its addresses a server answers; OSError: under none."""
    on_this_machine = address.machine == this_machine()
    reason: OSError | None = None
    for host in ("localhost",) if on_this_machine else address.hosts:
        try:
            # The store would itself repeat this for seconds and print each failure.
            with socket.create_connection((host, address.port), CONNECT_S) as probe:
                return _plain(probe.getpeername())
        except OSError as error:
            reason = error
    raise reason or OSError("an address without hosts")


def open_client(peer: Peer) -> TCPStore:
    """A connection to a server. Its calls wait without limit for one whose process is stopped."""
    host, port = peer
    store = TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False
    )
    store.set_timeout(_NO_LIMIT)  # a stopped server may come back
    return store


def sever(peer: Peer) -> None:
    """Shut down this process's connections to a server, so that calls in progress fail.

    A thread that stayed in such a call would abort the process if the answer came while the
    interpreter shuts down (CPython before 3.14). A store tells nobody its socket, but the system
    lists those of the process. One that is being opened tries again, so repeat this.
    """
    with suppress(OSError):
        for descriptor in os.listdir("/dev/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if _plain(connection.getpeername()) == peer:
                    connection.shutdown(socket.SHUT_RDWR)


def _plain(name: tuple[Any, ...]) -> Peer:
    """Host and port of a socket's name, IPv4 also where it is written as IPv6."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
