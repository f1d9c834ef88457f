"""The C extension against NumPy, at the edges of memory, and under sanitizers."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import Tensor

from telemetry import TensorRecord
from telemetry.measure import native
from telemetry.records.rows import Rows
from telemetry.records.sketch import sketch_array
from tests.helpers.moments_close import assert_moments_close, assert_same_bits
from tests.helpers.native_cases import LETTERS, libc, read_everything
from tests.helpers.paths import ROOT

if native.available:
    from telemetry.measure import _native


def needs_extension(test: Callable[..., None]) -> Any:
    """Run a test once for each instruction set of this processor that the extension uses."""
    skip = pytest.mark.skipif(not native.available, reason=native.native)
    return skip(pytest.mark.usefixtures("instructions")(test))


@pytest.fixture(scope="module", params=_native.instructions() if native.available else [None])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    _native.use_instructions(request.param)
    yield
    _native.use_instructions(_native.instructions()[-1])


def measure(tensor: Tensor, units: int = 0, inner: int = 1, sample_step: int = 0) -> TensorRecord:
    dtype = native.DTYPES[tensor.dtype]
    source = tensor.data_ptr(), tensor.numel(), dtype
    rows = bytearray(), bytearray(), bytearray()
    _native.measure((*source, units, inner, sample_step, 4), *rows)
    return TensorRecord.of_row(Rows.decode(*rows), 0)


def assert_exact(record: TensorRecord, x: NDArray[np.floating]) -> None:
    expected = sketch_array(x)
    assert_moments_close(record.sketch, expected, rtol=1e-12)
    np.testing.assert_array_equal(record.sketch.buckets, expected.buckets)
    np.testing.assert_array_equal(record.sketch.counts, expected.counts)


@pytest.mark.skipif(not native.available, reason=native.native)
def test_the_fastest_instructions_that_the_processor_has_are_used() -> None:
    cpus = Path("/proc/cpuinfo")
    flags = set(cpus.read_text().split()) if cpus.exists() else set()
    names = {"avx2": "AVX2", "avx512f": "AVX-512"}
    assert _native.instructions() == ["baseline", *(names[f] for f in names if f in flags)]
    assert native.native.endswith(f"({_native.instructions()[-1]})")
    with pytest.raises(ValueError, match="has no instructions 'AVX3'"):
        _native.use_instructions("AVX3")


@needs_extension
@given(arrays(np.uint32, st.integers(1, 100), elements=st.integers(0, 2**32 - 1)))
def test_any_bits_are_read_as_numpy_reads_them(bits: NDArray[np.uint32]) -> None:
    x = bits.view(np.float32)
    assert_exact(measure(torch.from_numpy(x)), x)
    with np.errstate(invalid="ignore"):  # of signaling NaN
        wide = x.astype(np.float64)
    assert_exact(measure(torch.from_numpy(wide)), wide)


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_8_bit_pattern_is_read_as_pytorch_reads_it(dtype: torch.dtype) -> None:
    for byte in range(256):
        tensor = torch.tensor([byte], dtype=torch.uint8).view(dtype)
        assert_exact(measure(tensor), tensor.float().numpy())


@needs_extension
@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_values_next_to_each_edge_are_in_the_bucket_of_numpy(sign: int) -> None:
    edges = (np.arange(1, 1 << 16, dtype=np.uint32) << 15) + np.uint32(sign)
    for moved in (-1, 0, 1):
        x = (edges.astype(np.int64) + moved).astype(np.uint32).view(np.float32)
        for part in np.array_split(x[np.isfinite(x)], 20):
            assert_exact(measure(torch.from_numpy(part.copy())), part)


@needs_extension
@pytest.mark.parametrize("letter", LETTERS)
def test_rare_values_are_found_at_any_position(letter: str) -> None:
    """Whole blocks and remainders, vectorized or not."""
    dtype = next(dtype for dtype, code in native.DTYPES.items() if code == ord(letter))
    for index in (0, 5, 2047, 2048, 4099, 4100):
        # NaN where there is no Inf
        for rare in (0.0, np.nan, np.inf, -np.inf) if dtype.is_floating_point else (0.0,):
            values = torch.ones(4101)
            values[index] = rare
            tensor = values.to(dtype)
            assert_exact(measure(tensor), tensor.double().numpy())
            assert measure(tensor).sketch.zero_count == (rare == 0)


@needs_extension
def test_sums_are_those_of_float64() -> None:
    """Values whose squares overflow float32, whose fourth powers vanish, or with a large mean."""
    x = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    for values in (x, x * np.float32(1e30), x * np.float32(1e-30), 1000 + x):
        assert_exact(measure(torch.from_numpy(values)), values)
    sketch = measure(torch.from_numpy(1000 + x)).sketch
    exact = (1000 + x).astype(np.float64)
    np.testing.assert_allclose(sketch.std, exact.std(), rtol=1e-7)
    np.testing.assert_allclose(measure(torch.from_numpy(x)).sketch.kurtosis, 3, rtol=0.05)


@needs_extension
def test_results_are_the_same_bits_at_any_address() -> None:
    memory = torch.randn(9_100, generator=torch.Generator().manual_seed(0)).abs()
    expected = measure(memory, units=91, inner=100)
    for start in range(17):
        shifted = torch.empty(9_100 + start)[start:]
        shifted.copy_(memory)
        assert_same_bits(measure(shifted, units=91, inner=100), expected)


@needs_extension
def test_unaligned_numbers_are_read() -> None:
    x = np.arange(5000, dtype=np.float32)
    tensor = torch.frombuffer(bytearray(b"\0" + x.tobytes()), dtype=torch.float32, offset=1)
    assert tensor.data_ptr() % 4
    assert_exact(measure(tensor), x)


@needs_extension
@given(st.integers(1, 20), st.integers(1, 70), st.integers(1, 40), st.integers(0, 5))
def test_extremes_of_units_equal_those_of_numpy(
    outer: int, units: int, inner: int, odd: int
) -> None:
    x = np.random.default_rng(outer * units).normal(size=outer * units * inner).astype(np.float32)
    x[:: max(x.size // (odd + 1), 1)] = [np.nan, np.inf, -np.inf, 0, 1e38, -1e38][odd]
    record = measure(torch.from_numpy(x), units, inner)
    expected = x.reshape(outer, units, inner)
    np.testing.assert_array_equal(record.unit_min, expected.min(axis=(0, 2)))
    np.testing.assert_array_equal(record.unit_max, expected.max(axis=(0, 2)))
    assert_moments_close(record.sketch, sketch_array(x), rtol=1e-12)


@needs_extension
def test_one_call_computes_the_norms_of_many_tensors() -> None:
    tensors = [torch.full((size,), 2.0) for size in (0, 1, 15, 16, 2048, 2049, 70_000)]
    tensors += [torch.ones(3).to(dtype) for dtype in native.DTYPES]
    expected = [float(t.double().square().sum()) for t in tensors]
    assert native.squared_norms(tensors).tolist() == expected
    assert native.squared_norms([]).tolist() == []
    for index in (0, 2, 2050, 4096):
        tensor = torch.full((4097,), 3e38)
        assert native.squared_norms([tensor]) == [4097 * float(tensor[0]) ** 2]
        tensor[index] = float("inf")
        assert native.squared_norms([tensor]) == [np.inf]
        tensor[index - 1] = float("nan")
        assert np.isnan(native.squared_norms([tensor])[0])


@needs_extension
def test_inconsistent_sizes_are_refused() -> None:
    address, rows = torch.ones(6).data_ptr(), (bytearray(), bytearray(), bytearray())
    for count, letter, *others in (
        (6, "x", 0, 1, 0, 4), (-1, "f", 0, 1, 0, 4), (6, "f", 7, 1, 0, 4), (6, "f", 2, 0, 0, 4),
        (6, "f", 1 << 62, 1 << 62, 0, 4), (6, "f", 0, 1, -1, 4), (6, "f", 0, 1, 0, 3),
        (1 << 40, "f", 0, 1, 0, 4),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="count"):
            _native.measure((address, count, ord(letter), *others), *rows)
    for wrong in ((address,), address):
        with pytest.raises(TypeError, match="tuples of 7"):
            _native.measure(wrong, *rows)  # type: ignore[arg-type]
    for lists in (([address], [6, 6], b"f"), ([address], [6], b"ff"), ([address], [6])):
        with pytest.raises(ValueError, match="as long"):
            _native.squared_norms(*lists)
    with pytest.raises(TypeError):
        _native.squared_norms(["a"], [6], b"f")  # type: ignore[list-item]


@contextmanager
def before_a_page_that_must_not_be_read(size: int) -> Iterator[int]:
    readable = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    with mmap.mmap(-1, readable + mmap.PAGESIZE) as pages:
        view = (ctypes.c_char * len(pages)).from_buffer(pages)
        start = ctypes.addressof(view)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert libc.mprotect(start + readable, mmap.PAGESIZE, 0) == 0
        try:
            yield start + readable - size
        finally:
            del view


@needs_extension
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_no_memory_beyond_a_page_is_read() -> None:
    read_everything(_native, before_a_page_that_must_not_be_read)


@needs_extension
def test_x87_arithmetic_is_right_after_measuring() -> None:
    """Adds ``long double`` numbers, as ``fmod`` of the C library does, after each layout."""
    for units, inner in ((0, 1), (3, 1), (3, 7), (1, 64), (3, 64), (2, 200)):
        measure(torch.ones(12 * max(units, 1) * inner), units, inner)
        assert np.longdouble(3) + np.longdouble(4) == 7


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    extension = tmp_path / "_native.so"
    sanitize = "-fsanitize=address,undefined"
    build = ["gcc", "-shared", "-fPIC", "-O1", "-g", "-fopenmp-simd", "-Wall", "-Wextra", "-Werror"]
    build += [sanitize, "-fno-sanitize-recover=all", "-DPy_LIMITED_API=0x030A0000"]
    build += [f"-I{sysconfig.get_paths()['include']}", str(ROOT / "telemetry/measure/_native.c")]
    done = subprocess.run([*build, "-o", str(extension)], capture_output=True, text=True)
    if "Python.h" in done.stderr or "cannot find" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    runtime = subprocess.check_output(["gcc", "-print-file-name=libasan.so"], text=True).strip()
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/helpers/native_cases.py"), str(extension)],
        env={**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_extension_compiles_with_the_headers_of_the_newest_installed_python(
    tmp_path: Path,
) -> None:
    """Headers of 3.13 require that some functions are inlined."""
    found = Path(sys.base_prefix).parent.glob("*/include/python3.1?/Python.h")
    default = Path(sysconfig.get_paths()["include"], "Python.h")
    newest = max(found, key=lambda header: header.parent.name, default=default).parent
    if not (newest / "Python.h").exists():
        pytest.skip("there are no headers of Python")
    build = ["gcc", "-c", "-fPIC", "-O1", "-fopenmp-simd", "-DPy_LIMITED_API=0x030A0000"]
    build += [f"-I{newest}", str(ROOT / "telemetry/measure/_native.c")]
    done = subprocess.run(
        [*build, "-o", str(tmp_path / "_native.o")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("required", ["", "1"])
def test_a_build_without_a_compiler_fails_where_the_extension_is_required(
    tmp_path: Path, required: str
) -> None:
    """Wheels of a release require the extension."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={tmp_path}",
         f"--build-temp={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "CC": "false", "TELEMETRY_REQUIRE_NATIVE": required},
        capture_output=True,
        check=False,
    )  # fmt: skip
    assert bool(done.returncode) is bool(required), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not native.available, reason=native.native)
def test_numpy_measures_the_same_without_the_extension() -> None:
    """The module is loaded without it, so that none of its functions can be called."""
    program = """
import sys, pytest, telemetry.measure.native as native
assert not native.available and native.DTYPES == {}
arguments = ["-q", "--hypothesis-profile=brief", "-k", "not elsewhere"]
sys.exit(pytest.main([*arguments, "tests/unit/measure/test_measure.py"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "TELEMETRY_NATIVE": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
