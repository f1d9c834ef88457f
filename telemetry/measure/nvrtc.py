"""Compiles the CUDA kernels at run time, with the NVRTC that PyTorch brings, and has them checked.

NVRTC is called through ctypes: its C interface has not changed since CUDA 11.2, while
``cuda.bindings`` is a dependency of the latest versions of PyTorch only. Compiling needs no GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

DTYPES = {torch.float32: "FLOAT32", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
"""Dtypes that the kernels measure, and their names in ``kernels.cu``."""

SOURCE = Path(__file__).with_name("kernels.cu")

# Timeout of the process that compares some hundred tensors, and its exit status where it cannot
# compare them.
_CHECK_S = 180
NOT_CHECKED = 75


class NvrtcError(RuntimeError):
    """NVRTC was not found or does not compile the kernels; the message says why."""


def compile_kernels(
    dtype: torch.dtype, architecture: str, *, cache_folder: Path | None = None
) -> bytes:
    """Return the compiled kernels for a dtype, an image for ``cuModuleLoadData``.

    Args:
        dtype: One of ``DTYPES``.
        architecture: Such as ``"sm_90"``. An older NVRTC compiles for the next lower one of the
            same major version, whose machine code runs there, too.
        cache_folder: Folder for compiled kernels, by default the user's cache.

    Raises:
        NvrtcError: There is no NVRTC, or it does not know the architecture.
    """
    options = [f"--gpu-architecture={_known(architecture)}", "--std=c++17", "--ptxas-options=-v"]
    options.append(f"-DDTYPE={DTYPES[dtype]}")
    source = SOURCE.read_bytes()
    what = "\0".join([_version(), *options]).encode() + b"\0" + source
    folder = user_cache() if cache_folder is None else cache_folder
    file = folder / f"{hashlib.sha256(what).hexdigest()}.cubin"
    with suppress(OSError):
        return file.read_bytes()
    cubin, _ = _compile(source, options)
    with suppress(OSError):  # the next process compiles again
        _write(file, cubin)
    return cubin


def _compile(source: bytes, options: Sequence[str]) -> tuple[bytes, str]:
    """Return machine code, and the compiler's log with the registers and memory of each kernel."""
    program = ctypes.c_void_p()
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _call("CreateProgram", ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    try:
        result = _library().nvrtcCompileProgram(program, len(options), arguments)
        log = _output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if result:
            raise NvrtcError(f"the kernels for {' '.join(options)} do not compile: {log}")
        return _output(program, "CUBIN"), log
    finally:
        _library().nvrtcDestroyProgram(ctypes.byref(program))


def _output(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"Get{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"Get{what}", program, buffer)
    return buffer.raw


def _call(function: str, *arguments: Any) -> None:
    library = _library()
    if result := getattr(library, f"nvrtc{function}")(*arguments):
        raise NvrtcError(f"NVRTC failed: {library.nvrtcGetErrorString(result).decode()}")


def _known(architecture: str) -> str:
    wanted, size = int(architecture.removeprefix("sm_")), ctypes.c_int()
    _call("GetNumSupportedArchs", ctypes.byref(size))
    known = (ctypes.c_int * size.value)()
    _call("GetSupportedArchs", known)
    return f"sm_{max((k for k in known if wanted // 10 * 10 <= k <= wanted), default=wanted)}"


def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("Version", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@cache
def _library() -> ctypes.CDLL:
    """Load the NVRTC of PyTorch's CUDA version: from pip's packages, PyTorch or the system."""
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
        for part in sorted(Path(file).parent.glob("*nvrtc-builtins*")):
            ctypes.CDLL(str(part))  # NVRTC does not find it
        library = ctypes.CDLL(file)
    except OSError as error:
        raise NvrtcError(f"NVRTC was not found: {error}") from error
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def user_cache() -> Path:
    """Return the folder of compiled kernels and of the results of checks."""
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA", "")
    else:
        root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "torch-telemetry"


def _write(file: Path, data: bytes) -> None:
    """Write a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
        temporary.write(data)
    os.replace(temporary.name, file)


def check(index: int, kernels: bytes) -> None:
    """Run :mod:`telemetry.measure.cuda_check` in a process, unless the kernels have passed.

    Raises:
        OSError: The kernels failed or could not be checked.
    """
    if _passed(index, kernels).exists():
        return
    home = str(Path(__file__).parents[2])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "telemetry.measure.cuda_check", str(index)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        status, reason = NOT_CHECKED, str(error)
    else:
        status = done.returncode
        reason = (done.stderr.strip().splitlines() or [f"exit status {status}"])[-1]
    if status == NOT_CHECKED:
        raise OSError(
            f"the kernels could not be compared with these before their first use: {reason}. Run "
            f"'python {' '.join(command[1:])}' once while no other process uses the GPU"
        )
    if status:
        raise OSError(f"compared with these, the kernels failed: {reason}")
    note_passed(index, kernels)


def note_passed(index: int, kernels: bytes) -> None:
    """Record in the user's cache that the kernels are right on this model of GPU."""
    passed = _passed(index, kernels)
    with suppress(OSError):  # the next process compares again
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def _passed(index: int, kernels: bytes) -> Path:
    what = f"{torch.cuda.get_device_name(index)} {torch.__version__}".encode() + kernels
    return user_cache() / f"{hashlib.sha256(what).hexdigest()}.passed"
