"""Compiles the CUDA kernels at run time, with the NVRTC that PyTorch brings.

Called through ctypes: its C interface has not changed since CUDA 11.1, while ``cuda.bindings`` is a
dependency of the latest versions of PyTorch only. No GPU is needed to compile.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

DTYPES = {
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float8_e4m3fn: "FLOAT8_E4M3FN",
    torch.float8_e5m2: "FLOAT8_E5M2",
}
"""What the kernels measure, and what ``kernels.cu`` calls it."""

SOURCE = Path(__file__).with_name("kernels.cu")


class NvrtcError(RuntimeError):
    """NVRTC was not found or does not compile the kernels; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Machine code for one architecture.

    Attributes:
        cubin: What the driver's ``cuModuleLoadData`` takes.
        log: What the compiler said; of what is compiled here, not in the cache, the registers and
            memory that each kernel takes.
        compile_s: Seconds that compiling took; 0 if it was in the cache.
    """

    cubin: bytes
    log: str
    compile_s: float


def compile_kernels(
    dtype: torch.dtype | None, architecture: str, *, cache_folder: Path | None = None
) -> Compiled:
    """The kernels for a dtype, or those that pack results for None.

    Args:
        dtype: One of ``DTYPES``, or None.
        architecture: Such as ``"sm_90"``.
        cache_folder: Where compiled kernels are kept, by default in the user's cache.

    Raises:
        NvrtcError: There is no NVRTC, or it does not know the architecture.
    """
    library = _library()
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v"]
    if dtype is not None:
        options.append(f"-DDTYPE={DTYPES[dtype]}")
    source = SOURCE.read_bytes()
    what = "\0".join([_version(library), *options]).encode() + b"\0" + source
    folder = user_cache() if cache_folder is None else cache_folder
    file = folder / f"{hashlib.sha256(what).hexdigest()}.cubin"
    with suppress(OSError):
        return Compiled(cubin=file.read_bytes(), log="", compile_s=0)
    start = time.perf_counter()
    cubin, log = _compile(library, source, options)
    compiled = Compiled(cubin=cubin, log=log, compile_s=time.perf_counter() - start)
    with suppress(OSError):  # compiled anew by the next process
        _write(file, cubin)
    return compiled


def _compile(library: ctypes.CDLL, source: bytes, options: Sequence[str]) -> tuple[bytes, str]:
    program = ctypes.c_void_p()
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None
        ),
    )
    try:
        result = library.nvrtcCompileProgram(program, len(options), arguments)
        log = _output(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if result:
            raise NvrtcError(f"the kernels for {' '.join(options)} do not compile: {log}")
        return _output(library, program, "CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        raise NvrtcError(f"NVRTC says {library.nvrtcGetErrorString(result).decode()}")


def _version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


@cache
def _library() -> ctypes.CDLL:
    """The NVRTC of PyTorch's CUDA version: of pip's packages, of PyTorch's own, or the system's."""
    version = torch.version.cuda
    if version is None:
        raise NvrtcError("NVRTC was not found: this PyTorch is built without CUDA")
    major = version.split(".")[0]
    windows = sys.platform == "win32"
    name = f"nvrtc64_{major}0_0.dll" if windows else f"libnvrtc.so.{major}"
    nvidia = find_spec("nvidia")
    folders = [Path(path) for path in (nvidia and nvidia.submodule_search_locations) or ()]
    found = [file for folder in folders for file in sorted(folder.glob(f"*/*/{name}"))]
    found.append(Path(torch.__file__).parent / "lib" / name)
    file = next((str(file) for file in found if file.exists()), name)
    try:
        library = ctypes.CDLL(file)
    except OSError as error:
        raise NvrtcError(f"NVRTC was not found: {error}") from error
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def user_cache() -> Path:
    """Where what was compiled and checked for this user is noted."""
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA", "")
    else:
        root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "torch-telemetry"


def _write(file: Path, data: bytes) -> None:
    """Another process sees the whole file or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
        temporary.write(data)
    os.replace(temporary.name, file)
