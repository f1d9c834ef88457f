"""A GPU of tests: a driver that is a stub, tensors in CPU memory that say they are in a GPU's."""

from __future__ import annotations

import ctypes
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

HERE = Path(__file__).parent


class Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 32),
        ("kernel", ctypes.c_char * 64),
        ("stream", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


class OnGpu(Tensor):
    """Says that it is on a GPU."""

    is_cuda, is_cpu = True, False  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


def on_gpu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnGpu)


class Driver:
    """The stub: what it was asked, and how it is to answer."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.PyDLL(self.path)
        self._library.stub_exchange.restype = ctypes.py_object
        self._library.stub_exchange.argtypes = (ctypes.py_object,)
        self.stream = 7

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("deferred", "capturing"):
            ctypes.c_int.in_dll(self._library, f"stub_{name}").value = value
        super().__setattr__(name, value)

    def fail(self, name: str, error: int = 700) -> None:
        """Have a function return this error from now on; none if the name is empty."""
        (ctypes.c_char * 32).in_dll(self._library, "stub_failing").value = name.encode()
        ctypes.c_int.in_dll(self._library, "stub_error").value = error

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


@cache
def built(directory: Path) -> tuple[Path, Path]:
    """The stub, and the kernels compiled for the host."""
    include = sysconfig.get_path("include")
    paths = []
    for name in ("stub_driver", "host_kernels"):
        paths.append(directory / f"{name}.so")
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", f"-I{include}", HERE / f"{name}.c",
             "-o", paths[-1], "-lm", "-ldl"],
            check=True,
        )  # fmt: skip
    return paths[0], paths[1]


def install(patches: pytest.MonkeyPatch, directory: Path) -> Driver:
    """A GPU 0 whose tensors are :class:`OnGpu`."""
    stub, kernels = built(directory)
    driver = Driver(stub)
    driver.forget()
    driver.fail("")
    driver.deferred = driver.capturing = 0
    image = bytes(kernels) + b"\0"
    patches.setattr(nvrtc, "cubin", lambda capability: image)
    patches.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    patches.setattr(native, "TENSORS", driver.exchange())
    patches.setattr(native, "TYPES", (OnGpu,))
    patches.setattr(cuda, "_DRIVER", driver.path)
    patches.setattr(cuda, "_gpus", {})
    patches.setattr(cuda, "raw_stream", lambda index: driver.stream)
    patches.setattr(cuda, "_device_memory", lambda size, index: torch.full((size,), 255, dtype=torch.uint8))
    patches.setattr(cuda, "_pinned_memory", lambda size: torch.full((size,), 255, dtype=torch.uint8))
    return driver
