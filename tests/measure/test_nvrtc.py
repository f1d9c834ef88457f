"""The CUDA kernels compile for every architecture, without a GPU, and stay within registers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from telemetry.measure import nvrtc
from telemetry.measure.nvrtc import DTYPES, NvrtcError, compile_kernels

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
KERNELS = {f"measure{kind}_{n}" for kind in ("", "_last", "_middle", "_many") for n in (2, 4)}

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
    """What the compiler says, by the machine code: of what is compiled, not in the cache."""
    found: dict[bytes, str] = {}
    compile_source = nvrtc._compile

    def noted(source: bytes, options: Sequence[str]) -> tuple[bytes, str]:
        cubin, log = compile_source(source, options)
        found[cubin] = log
        return cubin, log

    monkeypatch.setattr(nvrtc, "_compile", noted)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc_compiles_every_kernel_without_spills_so_that_two_blocks_fit(
    architecture: str, tmp_path: Path, logs: dict[bytes, str]
) -> None:
    def compiled(dtype: torch.dtype | None) -> bytes:
        return compile_kernels(dtype, architecture, cache_folder=tmp_path)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(compiled, [*DTYPES, None]))
    for dtype, cubin in zip([*DTYPES, None], results, strict=True):
        log = logs[cubin]
        found = {match["kernel"]: match for match in _RESOURCES.finditer(log)}
        assert set(found) == (
            {"pack_heads", "pack_pairs"} if dtype is None else {*KERNELS, "norms"}
        ), log
        assert "warning" not in log
        assert cubin.startswith(b"\x7fELF")
        for kernel, match in found.items():
            assert [match[name] for name in ("stack", "stores", "loads")] == ["0"] * 3, kernel
            assert int(match["registers"]) <= MOST_REGISTERS, kernel
            assert int(match["shared"]) <= MOST_SHARED_BYTES, kernel


def test_nvrtc_compiles_once_per_source_and_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: dict[bytes, str]
) -> None:
    def is_compiled(architecture: str = "sm_80") -> bool:
        logs.clear()
        cubin = compile_kernels(None, architecture, cache_folder=tmp_path / "new")
        results[architecture].add(cubin)
        return [*logs] == [cubin]

    results: dict[str, set[bytes]] = defaultdict(set)
    assert is_compiled()
    assert not is_compiled()
    assert len(results["sm_80"]) == 1
    assert is_compiled("sm_90")
    changed = tmp_path / "kernels.cu"
    changed.write_bytes(nvrtc.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(nvrtc, "SOURCE", changed)
    assert is_compiled()
    names = sorted(file.suffix for file in (tmp_path / "new").iterdir())
    assert names == [".cubin"] * 3  # and nothing half-written


def test_nvrtc_compiles_where_nothing_can_be_kept(tmp_path: Path, logs: dict[bytes, str]) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        logs.clear()
        assert compile_kernels(None, "sm_80", cache_folder=tmp_path / "file") in logs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: compile_kernels(None, "sm_1", cache_folder=folder), "sm_1"),
        (lambda folder: _compile_wrong(folder), "kernels.cu.*error"),
    ],
)
def test_nvrtc_tells_why_nothing_was_compiled(
    call: Callable[[Path], bytes], message: str, tmp_path: Path
) -> None:
    with pytest.raises(NvrtcError, match=re.compile(message, re.DOTALL)):
        call(tmp_path)
    assert not list(tmp_path.glob("*.cubin"))


def _compile_wrong(folder: Path) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "SOURCE", folder / "kernels.cu")
        nvrtc.SOURCE.write_text("int wrong = ;")
        return compile_kernels(None, "sm_80", cache_folder=folder)


def test_nvrtc_is_missing_where_pytorch_has_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    nvrtc._library.cache_clear()
    with pytest.raises(NvrtcError, match="built without CUDA"):
        compile_kernels(None, "sm_80")
