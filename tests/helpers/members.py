"""Ranks in separate processes, which run a test's commands and answer when each is done.

So tests wait for events and never for time. The processes are forked from one that has loaded
torch, which takes seconds each time otherwise.
"""

from __future__ import annotations

import ctypes
import logging
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist

from telemetry.alert import Alert
from telemetry.failures import Failures
from telemetry.ranks.exchange import RankExchange
from telemetry.ranks.merging import MergedRecords, MergedStep
from telemetry.ranks.rank_record import RankRecord
from telemetry.records import StepRecord

ANSWER_S = 300.0
"""A test fails when something takes longer."""

PRELOADED = [f"tests.helpers.{name}" for name in ("members", "training", "logging_ranks")]


def measured(rank: int, step: int, phase: str = "") -> RankRecord:
    """The record of a rank at a step: a number under its own name."""
    record = StepRecord(step=step, phase=phase, scalars={str(rank): step + 1.0})
    return RankRecord(rank=rank, size=0, record=record)


def scalars_of(merged: MergedStep) -> Mapping[str, float]:
    return MergedRecords().record(merged).scalars


def total(ranks: Sequence[int], step: int) -> dict[str, float]:
    """The numbers of several ranks, merged."""
    return {str(rank): step + 1.0 for rank in ranks}


ALERT = Alert(
    kind="loss_spike", severity="error", step=0, module_name=None, value=1.0, threshold=0.0,
    summary="The loss rose",
)  # fmt: skip


def exchange_of(
    name: str,
    rank: int,
    size: int,
    put: Callable[[MergedStep], object] = print,
    ask: Callable[[int], object] = print,
    **options: Any,
) -> RankExchange:
    """Return an exchange whose process never is beyond an announced step."""
    return RankExchange(
        name=name, rank=rank, size=size, put=put, ask=ask, current_step=lambda: 0,
        failures=Failures(), **options,
    )  # fmt: skip


def until(is_true: Callable[[], Any]) -> Any:
    """Wait until this is true; return its value."""
    while not (found := is_true()):
        time.sleep(0.01)
    return found


@dataclass(kw_only=True, eq=False)
class Received:
    """Steps and announced full steps of one exchange."""

    merged: list[MergedStep] = field(default_factory=list)
    full_step: int = -1
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, merged: MergedStep) -> None:
        with self.changed:
            self.merged.append(merged)
            self.changed.notify_all()

    def ask(self, step: int) -> None:
        with self.changed:
            self.full_step = step
            self.changed.notify_all()


class Member:
    """One rank, in its own process. Each method is a command."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.exchanges: dict[str, RankExchange] = {}
        self.received: dict[str, Received] = {}
        self.raised: int | None = None

    def init(self, method: str) -> None:
        dist.init_process_group(
            "gloo", init_method=method, rank=self.rank, world_size=self.world_size
        )

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return the result of a test's function, called with this rank and the number of ranks."""
        return function(self.rank, self.world_size, *arguments, **named)

    def open(self, name: str = "run", timeout_s: float = 3.0) -> None:
        received = self.received[name] = Received()
        self.exchanges[name] = exchange_of(
            name, self.rank, self.world_size, received.put, received.ask, timeout_s=timeout_s
        )

    def send(self, steps: Sequence[int], name: str = "run", phase: str = "") -> None:
        for step in steps:
            self.exchanges[name].send_part(measured(self.rank, step, phase))

    def got(
        self, step: int, name: str = "run", count: int = 1
    ) -> list[tuple[int, list[int], Mapping[str, float]]]:
        """Wait for a merged step; return all merged steps: step, ranks, their numbers."""
        received = self.received[name]
        with received.changed:
            received.changed.wait_for(lambda: sum(m.step == step for m in received.merged) >= count)
            return [(m.step, sorted(m.parts), scalars_of(m)) for m in received.merged]

    def announce(self, step: int) -> None:
        exchange = self.exchanges["run"]
        exchange._submit(lambda: exchange._broadcast(full_step=step))

    def await_announcement(self, step: int, name: str = "run") -> None:
        received = self.received[name]
        with received.changed:
            received.changed.wait_for(lambda: step == received.full_step)

    def alert(self) -> None:
        self.exchanges["run"].raise_on_all(ALERT)

    def train(self, steps: int, pause_s: float) -> None:
        """Steps in the background until one raises."""

        def run() -> None:
            for step in range(steps):
                time.sleep(pause_s)
                if self.exchanges["run"].to_raise(step):
                    self.raised = step
                    return

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def trained(self) -> int | None:
        """Wait for the end of the training; the step at which it raised."""
        self.thread.join()
        return self.raised

    def close(self, name: str = "run", timeout_s: float = 1000.0) -> None:
        """Close the exchange; a test fails if this takes the whole default timeout."""
        self.exchanges.pop(name)._close(timeout_s)

    def leave_behind(self, name: str = "run") -> None:
        """Write the stale address that a dead run leaves in a store."""
        exchange = exchange_of(name, 0, self.world_size)
        store = dist.distributed_c10d._get_default_store()
        store.wait([key := exchange._rendezvous.key])
        left = store.get(key)
        exchange._close(20.0)
        store.set(key, left)

    def has_tried(self) -> None:
        """Wait until this rank has failed to connect to rank 0."""
        client = self.exchanges["run"]._client
        until(lambda: client and client.attempts and not client.is_known)

    def address(self) -> tuple[str, int]:
        """Wait until rank 0 listens; return its address."""
        server: Any = until(lambda: self.exchanges["run"]._server)
        host, port, *_ = server._listening.getsockname()
        return host, port

    def last_rank(self, name: str) -> int:
        """Wait until rank 0 listens; return the last rank that may connect."""
        return int(until(self.exchanges[name]._rendezvous.find).last_rank)

    def disconnected(self, rank: int) -> None:
        """Wait until another rank is no longer connected to rank 0."""
        server = self.exchanges["run"]._server
        until(lambda: server and rank not in server._writers)

    def limit_files(self, connections: int) -> None:
        """Lower the limit of open files: about so many ranks may connect to the next exchange."""
        free = [n for n in range(1000) if not os.path.lexists(f"/proc/self/fd/{n}")]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # Rank 0 listens on one, and its event loop has three. It leaves a quarter to training.
        last = free[4 + connections - 1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (math.ceil((last + 1) / 0.75), hard))

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def fork(self) -> int:
        """Fork a process that does nothing until it is killed, such as a DataLoader's worker."""
        child = os.fork()
        if child == 0:
            signal.pause()
        return child

    def wait_until_expecting(self, rank: int) -> None:
        """Wait until this rank waits for another one's measurements."""
        until(lambda: rank in self.exchanges["run"]._collector.members)

    def threads(self) -> list[str]:
        """Return the names of this package's threads that do not end."""
        own = [t for t in threading.enumerate() if t.name.startswith("telemetry")]
        for thread in own:
            thread.join(10)
        return sorted(thread.name for thread in own if thread.is_alive())

    def exit(self) -> None:
        sys.exit()


class Process:
    """A test's handle on a member."""

    def __init__(self, rank: int, world_size: int, log: Path, network: str | None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)  # loading torch takes seconds
        self._connection, other = context.Pipe()
        self.rank = rank
        self.log = log
        self.process = context.Process(target=serve, args=(other, rank, world_size, log, network))
        self.process.start()
        other.close()

    def begin(self, command: str, *arguments: Any, **named: Any) -> None:
        self._connection.send((command, arguments, named))

    def answer(self) -> Any:
        assert self._connection.poll(ANSWER_S), f"rank {self.rank}: {self.log.read_text()}"
        try:
            return self._connection.recv()
        except EOFError as error:
            raise AssertionError(f"rank {self.rank}: {self.log.read_text()}") from error

    def do(self, command: str, *arguments: Any, **named: Any) -> Any:
        self.begin(command, *arguments, **named)
        return self.answer()

    def occurrences(self, words: str) -> int:
        return self.log.read_text().count(words)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            stat = Path(f"/proc/{self.process.pid}/stat")
            while stat.read_text().rpartition(")")[2].split()[0] != "T":
                pass
        elif number == signal.SIGKILL:
            self.process.join()

    def exit_code(self) -> int | None:
        self.begin("exit")
        self.process.join(ANSWER_S)
        return self.process.exitcode

    def end(self) -> None:
        self.process.kill()
        self.process.join()


Ranks: TypeAlias = list[Process]


def serve(
    connection: Connection, rank: int, world_size: int, log: Path, network: str | None
) -> None:
    """Run commands in the new process until the exit command."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if network is None else "veth"
    if network is not None:
        with open(f"/run/netns/{network}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    member = Member(rank, world_size)
    while True:
        command, arguments, named = connection.recv()
        connection.send(getattr(member, command)(*arguments, **named))


def every(processes: Sequence[Process], command: str, *arguments: Any, **named: Any) -> list[Any]:
    """Run one command on all ranks at the same time."""
    for process in processes:
        process.begin(command, *arguments, **named)
    return [process.answer() for process in processes]


@contextmanager
def ranks(folder: Path, count: int, networks: Sequence[str] = ()) -> Iterator[Ranks]:
    """Start ``count`` processes of one process group.

    ``networks`` names the network namespace of each, and then they form no group yet.
    """
    processes = [
        Process(r, count, folder / f"{r}.log", networks[r] if networks else None)
        for r in range(count)
    ]
    try:
        if not networks:
            every(processes, "init", f"file://{folder}/rendezvous")
        yield processes
    finally:
        for process in processes:
            process.end()
