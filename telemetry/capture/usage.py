"""Times and memory of steps, from the training thread to their record."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from telemetry.tag_names import ALLOCATED_BYTES, HOST_BYTES, HOST_OWN_BYTES, PEAK_BYTES, TIMES
from telemetry.torch_private.host_copy import relaxed_capture

# Parts of a step, the first four as in TIMES. APART: the logger's own work, and calls of the model
# that are not training. GAP: after a backward pass, until the next part shows which it was.
WAIT, FORWARD, BACKWARD, OPTIMIZER, APART, GAP = range(6)


class Laps(NamedTuple):
    """Times of the measured steps since the last hand-over.

    Attributes:
        seconds: Sum over the steps for each part.
        marks: On a CUDA device instead: the part that ended, and an event at its end.
        tokens: Sum over the steps.
        memory: Bytes allocated on the CUDA device, and their highest number up to now.
        no_cpu_s: Seconds of the waits for which the thread was ready, but others had the CPUs.
    """

    seconds: list[float]
    marks: list[tuple[int, torch.cuda.Event]]
    steps: int
    tokens: int
    memory: tuple[int, int] | None
    no_cpu_s: float = 0.0

    def usage(self) -> dict[str, float]:
        """Return means per step by tag; waits for an accelerator."""
        seconds = [*self.seconds]
        if self.marks:
            with relaxed_capture():
                self.marks[-1][1].synchronize()
                for (_, before), (part, after) in pairwise(self.marks):
                    seconds[part] += before.elapsed_time(after) * 1e-3
        # On a busy machine, a loader that needs little time waits, too.
        seconds[WAIT] = max(seconds[WAIT] - self.no_cpu_s, 0.0)
        parts = zip(TIMES, seconds, strict=False)
        means = {tag: spent / self.steps for tag, spent in parts} if self.steps else {}
        if self.memory is not None:
            means |= dict(zip((ALLOCATED_BYTES, PEAK_BYTES), self.memory, strict=True))
        return means


def usage_of(laps: Laps | None) -> tuple[Mapping[str, float], float]:
    """Return ``usage`` and ``tokens`` of a step's record, on the worker."""
    if laps is None:
        return host_memory(), 0.0
    return {**laps.usage(), **host_memory()}, laps.tokens / max(laps.steps, 1)


class CpuWaits:
    """Clock of the time for which this thread was ready, but had no CPU; 1 us per reading.

    It stands at 0 where Linux does not count it. From "Scheduler Statistics" of the Linux kernel:
    time running, and time on a run queue.
    """

    def __init__(self) -> None:
        self._thread, self._file = 0, -1

    def seconds(self) -> float:
        """Read the clock of the calling thread."""
        if self._thread != (thread := threading.get_ident()):
            self.close()
            with suppress(OSError):
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            self._thread = thread
        with suppress(OSError, ValueError, IndexError):
            return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        return 0.0

    def close(self) -> None:
        """Close the file; the next reading opens it again."""
        with suppress(OSError):
            os.close(self._file)
        self._thread, self._file = 0, -1

    __del__ = close


def host_memory() -> Mapping[str, float]:
    """Return the resident bytes of this process, and those that map no file; Linux only."""
    return _host_memory(int(perf_counter() / _HOST_MEMORY_S))


@lru_cache(1)
def _host_memory(interval: int) -> Mapping[str, float]:
    with suppress(OSError):
        pages = Path("/proc/self/statm").read_text().split()
        resident, shared = (float(count) * os.sysconf("SC_PAGE_SIZE") for count in pages[1:3])
        return {HOST_BYTES: resident, HOST_OWN_BYTES: resident - shared}
    return {}


_HOST_MEMORY_S = 0.05  # between two readings, 10 us each


def device_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes that are allocated, and their highest number up to now."""
    allocated = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return allocated["current"], allocated["peak"]
