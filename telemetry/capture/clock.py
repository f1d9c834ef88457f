"""Clock of the training loop: splits the time of each step into parts, and reads memory."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from telemetry.capture.hooks import Inert
from telemetry.failures import Failures
from telemetry.tag_names import ALLOCATED_BYTES, HOST_BYTES, HOST_OWN_BYTES, PEAK_BYTES, TIMES
from telemetry.torch_private import in_function_mode
from telemetry.torch_private.compiler import is_compiled, is_compiled_wrapper
from telemetry.torch_private.host_copy import relaxed_capture
from telemetry.torch_private.module_calls import ArmedPreHook, keywords_of_call

# Parts of a step, the first four as in TIMES. APART: the logger's own work, and calls of the model
# that are not training. GAP: after a backward pass, until the next part shows which it was.
WAIT, FORWARD, BACKWARD, OPTIMIZER, APART, GAP = range(6)

# Of shorter steps one in five is measured: the hook of a call costs about 2 us. Loaders with 2, 4
# or 8 workers have batches ready in a rhythm that five does not share.
_SHORT_S = 0.01
_ONE_IN = 5

_MAX_ENTRIES = 8  # modules that the loop itself calls
_MEMORY_EVERY = 10  # steps between two readings of a GPU's memory, about 30 us each
_INDICES = {torch.int64, torch.int32, torch.int16, torch.uint8}


class LoopClock:
    """Splits the time of training by laps: each ends one part of a step and begins the next.

    - Waiting: from the end of a step, or a backward pass, to the next training call of the model.
    - Forward: from there to the backward pass; it includes the loss.
    - Backward: the backward pass; it includes waiting for other ranks.
    - Optimizer: from there to the end of its step; it includes clipping.

    On a CUDA device, an event is recorded at each lap. A step in which no training call was seen
    does not count.

    A global hook sees the calls, and is removed while the model runs, so that its modules run at
    full speed. Hooks on modules would change what PyTorch does: see
    :class:`~telemetry.torch_private.module_calls.AroundModuleCalls`. A graph is valid without
    global hooks only: once one was compiled that may contain the model, no call is seen. But a
    model that ``torch.compile`` returned has the hook, which is outside of its graph.
    """

    def __init__(self, model: nn.Module, failures: Failures) -> None:
        self.eval_mode = not model.training  # training runs in evaluation mode
        self._model, self._failures = weakref.ref(model), failures
        self._calls_hook = _CallHook(self)
        self._global = ArmedPreHook(self._calls_hook)
        self._own_handle: Any = None  # of the hook on a compiled model
        self._entries: dict[int, weakref.ref[nn.Module]] = {}  # called by the loop, by identity
        self._device: torch.device | None = None  # of CUDA
        self._is_known = False  # whether the entries are
        self._running = self._on = False
        self._part, self._since, self._began = APART, 0.0, 0.0
        self._thread = self._count = 0
        self._cpu_waits = CpuWaits()
        self._no_cpu_before = 0.0  # when the wait in progress began
        self._reset()

    def _reset(self) -> None:
        self._laps, self._calls = Laps(), 0

    # --- on and off -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin at the current step."""
        self._running, self._is_known, self._count = True, False, 0
        model = self._model()
        if model is not None and is_compiled(model):
            self._global.retire()
        self._enter_by([] if model is None else [model])
        if model is not None and is_compiled_wrapper(model):
            self._own_handle = model.register_forward_pre_hook(self._calls_hook)
        _clocks.append(weakref.ref(self, _remove_clock))
        torch.autograd.backward = _timed_backward
        self.begin_step()

    def stop(self) -> None:
        """Remove all hooks; idempotent."""
        self._running = self._on = False
        self._global.remove()
        _remove_clock(self)
        if self._own_handle is not None:
            self._own_handle.remove()
            self._own_handle = None
        self._cpu_waits.close()
        self._reset()

    def before_compilation(self) -> None:
        """Use no global hook any more, if the model may be in the graph: it is not running."""
        if self._global.is_armed:
            self._global.retire()

    def _enter_by(self, modules: Iterable[nn.Module]) -> None:
        self._entries = {id(module): weakref.ref(module) for module in modules}

    # --- laps -------------------------------------------------------------------------------------

    def lap(self, part: int) -> None:
        """End the part in progress and begin another one."""
        if not self._on:
            return
        if self._part == GAP:
            self._part = WAIT if part == FORWARD else OPTIMIZER
        if self._part == WAIT:
            self._laps.no_cpu_s += max(self._cpu_waits.seconds() - self._no_cpu_before, 0.0)
        if self._device is None:
            now = perf_counter()
            self._laps.seconds[self._part] += now - self._since
            self._since = now
        else:
            self._mark(self._device)
        self._part = part
        if part in (WAIT, GAP):  # a gap may turn out to be a wait
            self._no_cpu_before = self._cpu_waits.seconds()

    def wait(self) -> None:
        """Begin to wait for the next call of the model."""
        if self._on:
            self.lap(WAIT)
            self._global.arm()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the time inside as no part of the step, as while training waits for the logger."""
        if not self._on or threading.get_ident() != self._thread:
            yield
            return
        part = self._part
        self.lap(APART)
        try:
            yield
        finally:
            self.lap(part)

    def end_step(self, *, full: bool = False) -> None:
        """End a step; then :meth:`take` may hand it over."""
        if not self._on:
            return
        if full and not self._is_known:
            self._choose()
        self.lap(APART)
        if self._calls:
            self._laps.steps, self._calls = self._laps.steps + 1, 0
        else:
            self._reset()

    def take(self) -> Laps | None:
        """Hand over the times up to the end of this step; None: no step was measured."""
        laps = self._laps
        if self._device is not None and self._count % _MEMORY_EVERY == 0:
            laps.memory = device_memory(self._device)
        if not laps.steps and laps.memory is None:
            return None
        self._reset()
        # The wait of the first step began before training.
        return laps if self._count > 1 else None

    def begin_step(self, *, full: bool = True) -> None:
        """Begin a step; a short one may not be measured, unless it is ``full``."""
        if not self._running:
            return
        now, began = perf_counter(), self._began
        self._began, self._count = now, self._count + 1
        short = now - began < _SHORT_S
        if short and self._device is None and not full and self._count % _ONE_IN:
            self._on = False
            self._global.disarm()
            return
        if not self._on:
            self._on, self._part, self._since = True, APART, now
        self._thread = threading.get_ident()
        self.wait()

    def measure(self, device: torch.device) -> None:
        """Measure this device from here on; called at the begin of a full step."""
        cuda = device if device.type == "cuda" else None
        if cuda != self._device:
            self._device, self._on = cuda, False
            self._reset()
            self.begin_step()

    def _mark(self, device: torch.device) -> None:
        with self._failures.contained("to measure the time of a step"):
            if not torch.cuda.is_current_stream_capturing():
                event = torch.cuda.Event(enable_timing=True, blocking=True)
                event.record(torch.cuda.current_stream(device))
                self._laps.marks.append((self._part, event))
                return
        self._on = False
        self._reset()

    # --- passes -----------------------------------------------------------------------------------

    def before_call(self, module: nn.Module, args: Any) -> None:
        """Begin a call of any module, which may be one of training."""
        entry = self._entries.get(id(module))
        if entry is None or entry() is not module or not self._on:
            return
        if self._part not in (WAIT, GAP) or threading.get_ident() != self._thread:
            return
        if not torch.is_grad_enabled() or module.training is self.eval_mode:
            self.restart_wait()  # it was not for a batch of training
            return
        self.lap(FORWARD)
        self._global.disarm()
        self._calls += 1
        if in_function_mode():  # which would see the calls below
            return
        given = args or keywords_of_call().values()
        first = next((value for value in given if isinstance(value, Tensor)), None)
        if first is not None and first.dim() == 2 and first.dtype in _INDICES:
            self._laps.tokens += first.numel()

    def backward_begins(self) -> None:
        """Begin a backward pass, which may be another model's."""
        if self._part in (FORWARD, GAP):
            self.lap(BACKWARD)
        elif threading.get_ident() == self._thread:  # as the other model of a GAN
            self.restart_wait()

    def backward_ended(self) -> None:
        """End a backward pass; a training call may follow, or the optimizer."""
        if self._part == BACKWARD:
            self.lap(GAP)
            self._global.arm()
        elif threading.get_ident() == self._thread:
            self.restart_wait()

    def restart_wait(self) -> None:
        """Restart the wait in progress, if any: the time until now was for something else."""
        if self._on and self._part == WAIT:
            self._part = APART
            self.lap(WAIT)

    def _choose(self) -> None:
        """Follow the parts of a model that the loop itself never calls, after a full step.

        They are the parts of a LightningModule, or of a ModuleDict with the models of a GAN.
        """
        self._is_known, model = True, self._model()
        if not self._calls and model is not None and self._own_handle is None:
            parts = [*_callable_parts(model)]
            self._enter_by(parts if len(parts) <= _MAX_ENTRIES else ())


class _CallHook(Inert):
    """Hook of modules' calls, which holds the clock weakly."""

    __slots__ = ("_clock",)

    def __init__(self, clock: LoopClock) -> None:
        self._clock = weakref.ref(clock)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and (clock := self._clock()) is not None:
            clock.before_call(module, args)


_backward = torch.autograd.backward
_clocks: list[weakref.ref[LoopClock]] = []  # those that run


@functools.wraps(_backward)
def _timed_backward(*args: Any, **kwargs: Any) -> None:
    """Run a backward pass between two laps; ``Tensor.backward`` calls this function by its name.

    It is the only way to see the passes without a hook on their tensors.
    """
    if torch.compiler.is_compiling():  # of a whole step: Dynamo ends its graph here
        _backward(*args, **kwargs)
        return
    clocks = [clock for known in _clocks if (clock := known()) is not None]
    for clock in clocks:
        clock.backward_begins()
    try:
        _backward(*args, **kwargs)
    finally:
        for clock in clocks:
            clock.backward_ended()


def _remove_clock(clock: LoopClock | weakref.ref[LoopClock]) -> None:
    """Time no backward passes for a clock that has stopped, or was deleted. Idempotent."""
    _clocks[:] = [known for known in _clocks if known() not in (None, clock)]
    if not _clocks and torch.autograd.backward is _timed_backward:
        torch.autograd.backward = _backward


def _callable_parts(model: nn.Module) -> Iterable[nn.Module]:
    """Yield the outermost modules inside of the model that have parameters and can be called."""
    for child in model.children():
        if next(child.parameters(), None) is None:
            continue
        if type(child).forward is nn.Module.forward:
            yield from _callable_parts(child)
        else:
            yield child


# --- from the training thread to the record -------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Laps:
    """Times of the measured steps since the last hand-over.

    Attributes:
        seconds: Sum over the steps for each part.
        marks: On a CUDA device instead: the part that ended, and an event at its end.
        tokens: Sum over the steps.
        memory: Bytes allocated on the CUDA device, and their highest number up to now.
        no_cpu_s: Seconds of the waits for which the thread was ready, but others had the CPUs.
    """

    seconds: list[float] = field(default_factory=lambda: [0.0] * 6)
    marks: list[tuple[int, torch.cuda.Event]] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    memory: tuple[int, int] | None = None
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


@functools.lru_cache(1)
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
