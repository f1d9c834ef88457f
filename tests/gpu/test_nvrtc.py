"""The CUDA kernels compile for every architecture, without a GPU, and stay within registers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from telemetry.measure import nvrtc
from telemetry.measure.nvrtc import DTYPES, NvrtcError, compile_kernels
from tests.helpers.stubbed import KERNELS

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]

# Two blocks of 512 threads share a multiprocessor's 65,536 registers and, on sm_75, 64 kB.
MOST_REGISTERS = 64
MOST_SHARED_BYTES = 32 << 10

_RESOURCES = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers[^\n]*?(?P<shared>\d+) bytes smem",
    re.DOTALL,
)


@pytest.fixture(scope="module", autouse=True)
def _nvrtc_is_installed() -> None:
    try:
        nvrtc._library()
    except NvrtcError as error:
        pytest.skip(str(error))


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, str]:
    """Return the compiler's log of each kernel, compiled again and not taken from the cache."""
    found: dict[bytes, str] = {}
    compile_source = nvrtc._compile

    def noted(source: bytes, options: Sequence[str]) -> tuple[bytes, str]:
        cubin, log = compile_source(source, options)
        found[cubin] = log
        return cubin, log

    monkeypatch.setattr(nvrtc, "_compile", noted)
    return found


@pytest.fixture
def small_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One empty kernel, for tests of the cache and of options; the real ones take 1.5 s."""
    source = tmp_path / "kernels.cu"
    source.write_text('extern "C" __global__ void kernel() {}\n')
    monkeypatch.setattr(nvrtc, "SOURCE", source)
    return source


@pytest.mark.parametrize(
    ("architecture", "dtypes"),
    [("sm_75", [*DTYPES]), *[(newer, [torch.float32]) for newer in ARCHITECTURES[1:]]],
)
def test_nvrtc_compiles_every_kernel_without_spills_so_that_two_blocks_fit(
    architecture: str, dtypes: list[torch.dtype], tmp_path: Path, logs: dict[bytes, str]
) -> None:
    def compiled(dtype: torch.dtype) -> bytes:
        return compile_kernels(dtype, architecture, cache_folder=tmp_path)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(compiled, dtypes))
    for dtype, cubin in zip(dtypes, results, strict=True):
        log = logs[cubin]
        found = {match["kernel"]: match for match in _RESOURCES.finditer(log)}
        assert set(found) == {*KERNELS}, (dtype, log)
        assert "warning" not in log
        assert cubin.startswith(b"\x7fELF")
        for kernel, match in found.items():
            assert [match[name] for name in ("stack", "stores", "loads")] == ["0"] * 3, kernel
            assert int(match["registers"]) <= MOST_REGISTERS, kernel
            assert int(match["shared"]) <= MOST_SHARED_BYTES, kernel


def test_nvrtc_compiles_once_per_source_and_architecture(
    tmp_path: Path, small_source: Path, logs: dict[bytes, str]
) -> None:
    def is_compiled(architecture: str = "sm_80") -> bool:
        logs.clear()
        cubin = compile_kernels(torch.float32, architecture, cache_folder=tmp_path / "new")
        results[architecture].add(cubin)
        return [*logs] == [cubin]

    results: dict[str, set[bytes]] = defaultdict(set)
    assert is_compiled()
    assert not is_compiled()
    assert len(results["sm_80"]) == 1
    assert is_compiled("sm_90")
    small_source.write_bytes(small_source.read_bytes() + b"\n")
    assert is_compiled()
    names = sorted(file.suffix for file in (tmp_path / "new").iterdir())
    assert names == [".cubin"] * 3  # and nothing half-written


@pytest.mark.usefixtures("small_source")
def test_nvrtc_compiles_a_known_architecture_for_a_later_minor_version(
    tmp_path: Path, logs: dict[bytes, str]
) -> None:
    """Machine code runs on all later ones of the same major version."""
    cubin = compile_kernels(torch.float32, "sm_99", cache_folder=tmp_path)
    assert "for 'sm_90'" in logs[cubin]


def test_nvrtc_loads_without_the_libraries_of_pytorch(tmp_path: Path) -> None:
    library = Path(nvrtc._library()._name)
    if not library.is_absolute():
        pytest.skip("the system's, which finds its parts")
    version = f"import types\nversion = types.SimpleNamespace(cuda={torch.version.cuda!r})\n"
    (tmp_path / "torch.py").write_text(f"{version}def __getattr__(name): return name\n")
    program = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("nvrtc", {nvrtc.__file__!r})
nvrtc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nvrtc)
nvrtc.find_spec = lambda name: None
nvrtc.torch.__file__ = {str(library.parents[1] / "torch.py")!r}
cubin, _ = nvrtc._compile(b"__global__ void kernel() {{}}", ["--gpu-architecture=sm_90"])
assert cubin.startswith(b"\x7fELF")
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


@pytest.mark.usefixtures("small_source")
def test_nvrtc_compiles_without_a_writable_cache(tmp_path: Path, logs: dict[bytes, str]) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        logs.clear()
        assert compile_kernels(torch.float32, "sm_80", cache_folder=tmp_path / "file") in logs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: compile_kernels(torch.float32, "sm_1", cache_folder=folder), "sm_1"),
        (lambda folder: _compile_wrong(folder), "kernels.cu.*error"),
    ],
)
def test_nvrtc_reports_why_nothing_was_compiled(
    call: Callable[[Path], bytes], message: str, tmp_path: Path
) -> None:
    with pytest.raises(NvrtcError, match=re.compile(message, re.DOTALL)):
        call(tmp_path)
    assert not list(tmp_path.glob("*.cubin"))


def _compile_wrong(folder: Path) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "SOURCE", folder / "kernels.cu")
        nvrtc.SOURCE.write_text("int wrong = ;")
        return compile_kernels(torch.float32, "sm_80", cache_folder=folder)


def test_nvrtc_reports_a_pytorch_that_was_built_without_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    nvrtc._library.cache_clear()
    with pytest.raises(NvrtcError, match="built without CUDA"):
        compile_kernels(torch.float32, "sm_80")
