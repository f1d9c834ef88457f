"""Files of one logger: event file and run log; and the command that opens them."""

from __future__ import annotations

import logging
import os
import shlex
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import nn
from torch.utils import tensorboard

from telemetry.events.files import EventFile, run_log_file, session_start
from telemetry.events.run_log import new_run_id
from telemetry.events.summaries import event_of
from telemetry.events.writer import Writer
from telemetry.failures import Failures, show
from telemetry.plain_text import printable
from telemetry.ranks.role import Role, is_rank_0, may_be_any_rank
from telemetry.run.arguments import log_dir_of
from telemetry.run.given_file import GivenFile
from telemetry.run.resuming import earlier_run
from telemetry.writing.run_log import RunLog

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("telemetry")


class RunFiles:
    """Opens the files of one logger, and locks their directory; raises OSError if it cannot write.

    Args:
        role: Role of this process. If its rank may be another one, what is written is queued until
            :meth:`open_for`.
        close: Closes the logger when another one replaces it.

    Attributes:
        is_undecided: Whether it is still unknown if this process writes.
    """

    def __init__(
        self,
        model: nn.Module,
        writer: object,
        first_step: int,
        *,
        resume: bool,
        role: Role,
        close: Callable[[], None],
        failures: Failures,
    ) -> None:
        self._given = writer if isinstance(writer, tensorboard.SummaryWriter) else None
        log_dir = log_dir_of(writer, written=role.writes)
        self.log_dir = log_dir if self._given is not None else role.directory(log_dir)
        self._process_id = os.getpid()
        self._failures = failures
        self._lock = DirectoryLock(model, self.log_dir, close)
        earlier = earlier_run(self.log_dir, first_step, resume=resume)
        self.first_step = earlier.next_step
        # A loss that was logged after the last step belongs to the first, which is not repeated.
        hidden_from = self.first_step + earlier.loss_delay if self.first_step else None
        self._has_ended = False
        self._writer = Writer(self.log_dir)
        self._events: EventFile | GivenFile
        if self._given is not None:
            self._events = GivenFile(self._given)
        else:
            self._events = EventFile(self.log_dir, hidden_from=hidden_from)
        self._log_file = run_log_file(self.log_dir)
        self.is_undecided = True
        self.log = RunLog(
            partial(self._writer.put, self._log_file),
            self._log_file.repeat,
            run=earlier.run or new_run_id(),
            seed=torch.initial_seed(),
        )
        if self.first_step:
            self.log.begin(self.first_step)
        if not may_be_any_rank():
            try:
                self.open_for(role)
            except OSError:
                self._writer.close()
                raise

    def open_for(self, role: Role) -> None:
        """Open the files of a role that is final; write nothing more if another rank writes."""
        is_undecided, self.is_undecided = self.is_undecided, False
        if not role.writes:
            self._writer.discard()
        elif is_undecided:
            try:
                self._writer.start(self._events)
            except OSError as error:
                raise type(error)(
                    f"HookLogger(log_dir={self.log_dir!r}): the directory cannot be written: "
                    f"{error}"
                ) from error
            self._lock.acquire(self._given or self._events)

    def write_values(
        self,
        values: Sequence[bytes],
        step: int,
        wall_time: float,
        /,
        *,
        droppable: bool = False,
        flush: bool = False,
        repeat: str = "",
    ) -> None:
        """Add one event with many values, which costs far less than one event for each.

        Args:
            values: Values from :mod:`telemetry.events.summaries`.
            wall_time: Seconds since the epoch.
            droppable: Whether to drop the event when the queue is full: true for measurements.
            flush: Whether to write at once; the call still does not wait for the disk.
            repeat: Key of values that readers need in every file, such as one after the directory
                was removed. Each later file begins with the latest event of each key.
        """
        self._has_ended = False
        event = event_of(values, step, wall_time)
        if repeat:
            self._events.repeat(repeat, event)
        self._writer.put(self._events, event, droppable=droppable, flush=flush)

    def restore(self, step: int, run: str | None) -> None:
        """Hide earlier records of this step and later ones, as a checkpoint of a run is loaded."""
        self.log.begin(step, run)
        if isinstance(self._events, EventFile):
            self._writer.put(self._events, session_start(step))

    def write_end(
        self,
        last_step: int,
        values: Sequence[bytes],
        exception: BaseException | None,
        full_steps: tuple[int, int],
    ) -> None:
        """Write, once and not in a fork, that the run is closed; later records make it void."""
        if self._has_ended or os.getpid() != self._process_id:
            return
        with self._failures.contained("to write that the run has ended"):
            self.log.end(last_step, exception, full_steps)
            if values:
                self.write_values(values, max(last_step, 0), time.time())
        self._has_ended = True

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written, or has failed; False if that takes longer."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write queued records and release the directory."""
        if os.getpid() == self._process_id:  # a fork may never be able to take the locks
            self._writer.close(timeout_s)
        self._lock.release()


class DirectoryLock:
    """Shared lock of a logger on the directory where it writes.

    A new lock for the same model and directory replaces the former one and closes its logger. If
    other loggers, of this process or another one, lock the directory, and do not share a writer, a
    warning is logged. The system releases the lock however the process ends. Other processes are
    not detected on Windows, in remote directories and on some network drives.
    """

    def __init__(self, model: object, log_dir: str, close: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._directory = log_dir if "://" in log_dir else os.path.realpath(log_dir)
        self._close = weakref.WeakMethod(close)
        self._writer: weakref.ref[object] = weakref.ref(self)
        self._unlock: Callable[[], object] = lambda: None
        for other in list(_LOCKS):
            if other._model() is model and other._directory == self._directory:
                log.warning(
                    "telemetry: a new HookLogger replaces the one that watched the same model and "
                    "wrote to %s; that one is now closed",
                    log_dir,
                )
                if (close_it := other._close()) is not None:
                    close_it()

    def acquire(self, writer: object) -> None:
        """Lock the directory, which must exist, for this writer; log a conflict."""
        is_shared = any(other._writer() is writer for other in _LOCKS)
        self._writer = weakref.ref(writer)
        _LOCKS.add(self)
        if self._has_conflict() and not is_shared:
            log.warning(
                "telemetry: another HookLogger, in this process or another one, also writes to %s: "
                "TensorBoard draws the curves of both as one; the Telemetry page and the commands "
                "list two runs. Give each run its own directory. Ranks that train one model write "
                "one run together if torch.distributed is initialized before the logger is made; "
                "loggers of several models in one process may share a SummaryWriter",
                self._directory,
            )

    def _has_conflict(self) -> bool:
        """Take a shared lock; return whether others held one before."""
        if fcntl is None:
            return False
        conflict = False
        with suppress(OSError):
            descriptor = os.open(self._directory, os.O_RDONLY)
            self._unlock = weakref.finalize(self, os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                conflict = True
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return conflict

    def release(self) -> None:
        self._unlock()
        _LOCKS.discard(self)


def _release_in_child() -> None:
    """Release all locks in a forked child: its copies could outlive the parent."""
    for lock in list(_LOCKS):
        lock.release()


# Outlives a reload of this module in a notebook.
_LOCKS: weakref.WeakSet[DirectoryLock] = globals().get("_LOCKS") or weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def tensorboard_command(log_dir: str) -> str:
    """Return the command that starts TensorBoard on this run and its neighbors."""
    folder, run = os.path.split(log_dir.rstrip("/") or "/")
    if not run or folder.endswith(":"):  # "/", or the whole of a bucket
        folder = log_dir
    return f"tensorboard --logdir {shlex.quote(folder or '.')}"


def show_log_dir(log_dir: str) -> None:
    """Show where the run is written, and the command to look at it; once for all ranks."""
    if is_rank_0():
        command = tensorboard_command(log_dir)
        show(f"telemetry: writing to {printable(log_dir)}; to look at it: {command}")
