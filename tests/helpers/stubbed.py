"""GPU of tests: a stub of the driver, and tensors in CPU memory that claim to be on a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from telemetry.measure import cuda, native, nvrtc

HERE = Path(__file__).parent


class Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 32),
        ("kernel", ctypes.c_char * 64),
        ("stream", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 16),
    )


class OnGpu(Tensor):
    """Tensor that claims to be on a GPU."""

    is_cuda, is_cpu = True, False  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


def on_gpu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnGpu)


class Driver:
    """The stub: its recorded calls and its configured answers."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.PyDLL(self.path)
        self._library.stub_begin()
        self._library.stub_exchange.restype = ctypes.py_object
        self._library.stub_exchange.argtypes = (ctypes.py_object,)
        self.stream = 7
        self.uploads: list[Tensor] = []
        self.kept: list[Tensor] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("deferred", "capturing", "idle"):
            ctypes.c_int.in_dll(self._library, f"stub_{name}").value = value
        super().__setattr__(name, value)

    def fail(self, name: str, error: int = 700) -> None:
        """Have a function return this error from now on; none if the name is empty."""
        (ctypes.c_char * 32).in_dll(self._library, "stub_failing").value = name.encode()
        ctypes.c_int.in_dll(self._library, "stub_error").value = error

    def capture_mode(self, mode: int) -> int:
        """Set how this thread's calls treat captures of other threads; the mode before."""
        box = ctypes.c_int(mode)
        self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(box))
        return box.value

    def call(self, name: str, *arguments: object) -> None:
        """Call a function as PyTorch does: in the device's context, whatever captures meanwhile.

        Raises:
            RuntimeError: It returns an error.
        """
        context, mode = ctypes.c_void_p(), self.capture_mode(RELAXED)
        self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self._library.cuCtxPushCurrent_v2(context)
        error = getattr(self._library, name)(*arguments)
        self._library.cuCtxPopCurrent_v2(ctypes.byref(context))
        self.capture_mode(mode)
        if error:
            raise RuntimeError(f"{name}: error {error}")

    def exchange(self) -> object:
        return self._library.stub_exchange(native.TENSORS)

    @property
    def _count(self) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self._library, "stub_call_count")

    def calls(self, *names: str) -> list[Call]:
        """All calls, or those of these functions, since the last :meth:`forget`."""
        known = (Call * (1 << 16)).in_dll(self._library, "stub_calls")
        calls = known[: self._count.value]
        return [call for call in calls if not names or call.name.decode() in names]

    def counts(self) -> Counter[str]:
        return Counter((call.kernel or call.name).decode() for call in self.calls())

    def forget(self) -> None:
        self._count.value = 0


RELAXED = 2


@dataclass(frozen=True)
class Event:
    """An event of the stub, for :class:`torch.cuda.Event`."""

    handle: ctypes.c_void_p


@dataclass(frozen=True)
class Stream:
    """A stream of the stub, for :class:`torch.cuda.Stream`."""

    driver: Driver
    handle: int

    def record_event(self) -> Event:
        event = Event(ctypes.c_void_p())
        self.driver.call("cuEventCreate", ctypes.byref(event.handle), 2)
        self.driver.call("cuEventRecord", event.handle, ctypes.c_void_p(self.handle))
        return event

    def wait_event(self, event: Event) -> None:
        stream = ctypes.c_void_p(self.handle)
        self.driver.call("cuStreamWaitEvent", stream, event.handle, 0)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Memory(Tensor):
    """Device memory of the stub; it is cleared in the order of the current stream."""

    driver: Driver

    def zero_(self) -> Tensor:
        at, stream = ctypes.c_uint64(self.data_ptr()), ctypes.c_void_p(self.driver.stream)
        self.driver.call("cuMemsetD8Async", at, 0, ctypes.c_size_t(self.nbytes), stream)
        return self


class Copy:
    """A copy in the order of the current stream, for ``HostCopy``; its own tests are elsewhere."""

    driver: Driver

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes = tensor.nbytes
        before = 0 if self.driver.idle else -1
        self._values = torch.full(tensor.shape, before, dtype=tensor.dtype, device="cpu")
        stream, size = ctypes.c_void_p(self.driver.stream), ctypes.c_size_t(self.nbytes)
        target, source = self._values.data_ptr(), ctypes.c_uint64(tensor.data_ptr())
        self.driver.kept.append(self._values)  # as PyTorch's allocator does until it has arrived
        self.driver.call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(target), source, size, stream)
        self._event = Stream(self.driver, self.driver.stream).record_event()

    def wait(self) -> Tensor:
        self.driver.call("cuEventSynchronize", self._event.handle)
        return self._values


KINDS = ("", "_wide", "_last", "_middle", "_many")
KERNELS = (*(f"measure{kind}_{powers}" for kind in KINDS for powers in (2, 4)), "norms")


@cache
def stub_driver(directory: Path) -> Path:
    path = directory / "stub_driver.so"
    include = f"-I{sysconfig.get_path('include')}"
    source = HERE / "stub_driver.c"
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", include, source, "-o", path, "-ldl"], check=True
    )
    return path


@cache
def emulated(
    directory: Path,
    dtype: torch.dtype,
    architecture: int = 800,
    threads: int = 512,
    flags: tuple[str, ...] = (),
) -> Path:
    """Compile the kernels for a dtype and an architecture to run on the host."""
    path = directory / f"{dtype}_{architecture}.so"
    source = path.with_suffix(".cpp")
    lines = [f'#include "{nvrtc.SOURCE}"', *(f"EMULATE({kernel})" for kernel in KERNELS)]
    source.write_text("\n".join(lines) + "\n")
    command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", *flags]
    command += ["-U_FORTIFY_SOURCE", f"-D__CUDA_ARCH__={architecture}", f"-DTHREADS={threads}"]
    command += [f"-DDTYPE={[*nvrtc.DTYPES].index(dtype) + 1}"]
    command += ["-include", str(HERE / "emulated.h"), str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def install(
    patches: pytest.MonkeyPatch,
    directory: Path,
    types: tuple[type, ...] = (OnGpu,),
    stream: Callable[[], int] | None = None,
) -> Driver:
    """Install a GPU 0 whose tensors are of these types.

    Args:
        stream: Returns the handle of the current stream, whose events, clearing and copies the
            caller provides; None: the driver's.
    """
    driver = Driver(stub_driver(directory))
    driver.forget()
    driver.fail("")
    driver.deferred = driver.capturing = driver.idle = 0

    def compiled(dtype: torch.dtype, architecture: str) -> bytes:
        return bytes(emulated(directory, dtype)) + b"\0"

    def memory(size: int, index: int) -> Tensor:
        return torch.full((size // 8,), -1, device="cpu").as_subclass(OrderedMemory)

    class OrderedMemory(Memory):
        pass

    class OrderedCopy(Copy):
        pass

    OrderedMemory.driver = OrderedCopy.driver = driver

    def uploaded(data: bytearray, index: int) -> Tensor:
        driver.uploads.append(torch.frombuffer(data, dtype=torch.uint8))
        return driver.uploads[-1]

    patches.setattr(nvrtc, "compile_kernels", compiled)
    patches.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    # Else integers are counted by an operation that the CPU does not have.
    patches.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    patches.setattr(native, "TENSORS", driver.exchange())
    patches.setattr(native, "TYPES", types)
    patches.setattr(cuda, "_DRIVER", driver.path)
    patches.setattr(nvrtc, "check", lambda index, kernels: None)
    patches.setattr(cuda, "_gpus", {})
    patches.setattr(cuda, "_reasons", {})
    patches.setattr(cuda, "raw_stream", lambda index: stream() if stream else driver.stream)
    patches.setattr(cuda, "_device_memory", memory)
    if stream is None:
        patches.setattr(cuda, "current_stream", lambda device: Stream(driver, driver.stream))
        patches.setattr(cuda, "HostCopy", OrderedCopy)
        patches.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(driver.capturing))
    patches.setattr(cuda, "_uploaded", uploaded)
    return driver
