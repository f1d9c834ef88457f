"""A stub of the CUDA driver, which runs the kernels on the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from telemetry.measure import cuda, native, nvrtc
from tests.helpers.require import needs_tensor_reader

HERE = Path(__file__).parent

needs_stub = [
    needs_tensor_reader,
    pytest.mark.skipif(not shutil.which("c++"), reason="no compiler for the stub"),
]


class Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 32),
        ("kernel", ctypes.c_char * 64),
        ("stream", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 16),
    )


class Driver:
    """The stub: its recorded calls and its configured answers."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.PyDLL(self.path)
        self._library.stub_exchange.restype = ctypes.py_object
        self._library.stub_exchange.argtypes = (ctypes.py_object,)
        self.uploads: list[Tensor] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("capturing", "idle"):
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


def install(patches: pytest.MonkeyPatch, directory: Path, types: tuple[type, ...]) -> Driver:
    """Have the stub measure tensors of these types on GPU 0."""
    driver = Driver(stub_driver(directory))
    driver.forget()
    driver.fail("")
    driver.capturing = driver.idle = 0

    def compiled(dtype: torch.dtype, architecture: str) -> bytes:
        return bytes(emulated(directory, dtype)) + b"\0"

    def uploaded(data: bytearray, index: int) -> Tensor:
        driver.uploads.append(torch.frombuffer(data, dtype=torch.uint8))
        return driver.uploads[-1]

    patches.setattr(nvrtc, "compile_kernels", compiled)
    patches.setattr(nvrtc, "check", lambda index, kernels: None)
    patches.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    patches.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(driver.capturing))
    patches.setattr(native, "TENSORS", driver.exchange())
    patches.setattr(native, "TYPES", types)
    patches.setattr(cuda, "_DRIVER", driver.path)
    patches.setattr(cuda, "_gpus", {})
    patches.setattr(cuda, "_reasons", {})
    patches.setattr(cuda, "_uploaded", uploaded)
    return driver
