"""The CUDA kernels, compiled for the host, against NumPy: see emulated.h."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from telemetry.measure.native import HostRows
from telemetry.measure.nvrtc import DTYPES
from telemetry.records.moments import COUNTS, EXTREMES, POWER_SUMS
from telemetry.records.rows import Rows
from telemetry.records.sketch import sketch_array
from tests.helpers.stubbed import emulated

THREADS = 64  # two warps, so that what happens between them is tried, and quickly

# Error of float32 sums of a vector's powers, relative to the sum of magnitudes.
SUM_TOLERANCE = 1e-6

ROW = np.dtype(
    [("elements", "u8"), ("zeros", "u8"), ("low", "u8"), ("high", "u8"), ("sums", "f8", 4),
     ("units", "u4"), ("done", "u4"), ("padding", "u4", 2), ("counts", "u4", 4096)]
)  # fmt: skip
CHUNK = np.dtype(
    [("values", "u8"), ("elements", "u4"), ("row", "u4"), ("part", "u4"), ("parts", "u4")]
)
NORM = np.dtype([("square", "f8"), ("largest", "f8"), ("done", "u4"), ("padding", "u4")])

# sm_75 compares neither pairs nor NaN.
VARIANTS = [*((dtype, 800) for dtype in DTYPES), (torch.float16, 750)]

# Compiler flags of the process that is started with sanitizers.
SANITIZERS = tuple(os.environ.get("TELEMETRY_SANITIZERS", "").split())

Libraries = Callable[[torch.dtype, int], ctypes.CDLL]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    """Kernels by dtype, for architectures with and without comparisons of pairs."""
    if not shutil.which("c++"):
        pytest.skip("no compiler of C++ for the host")
    folder = tmp_path_factory.mktemp("emulated")
    return lambda dtype, architecture: ctypes.CDLL(
        str(emulated(folder, dtype, architecture, THREADS, SANITIZERS))
    )


class Memory:
    """Zeroed bytes with guard bytes around them that must not change."""

    MARGIN = 128

    def __init__(self, size: int, offset: int = 0) -> None:
        space = np.full(size + 4 * self.MARGIN, 0xA5, np.uint8)
        self._all = space
        self._start = self.MARGIN + -space.ctypes.data % self.MARGIN + offset
        self.bytes = space[self._start : self._start + size]
        self.bytes[:] = 0

    @property
    def address(self) -> int:
        return self._all.ctypes.data + self._start

    def view(self, dtype: Any) -> NDArray[Any]:
        """The contents; checks the margins."""
        outside = np.delete(self._all, np.s_[self._start : self._start + self.bytes.size])
        assert (outside == 0xA5).all(), "written beyond the ends"
        return self.bytes.copy().view(dtype)


def tensor_memory(x: torch.Tensor, offset: int) -> Memory:
    """Return a tensor at ``offset`` elements from an aligned address."""
    memory = Memory(x.numel() * x.itemsize, offset * x.itemsize)
    memory.bytes[:] = x.reshape(-1).view(torch.uint8).numpy()
    return memory


def launch(
    library: ctypes.CDLL,
    kernel: str,
    arguments: Sequence[Memory | int | None],
    *,
    grid: int,
    seed: int,
    tensors: Sequence[Memory] = (),
) -> None:
    """Memory is passed by address, integers as u32 unless they are ctypes objects."""
    library.forget_tensors()
    for memory in tensors:
        library.allow_tensor(ctypes.c_void_p(memory.address), ctypes.c_size_t(memory.bytes.size))
    boxes = [
        ctypes.c_uint64(a.address if isinstance(a, Memory) else a or 0)  # little-endian: u32, too
        for a in arguments
    ]
    pointers = (ctypes.c_void_p * len(boxes))(*(ctypes.addressof(box) for box in boxes))
    run = getattr(library, f"emulate_{kernel}")
    run.restype = ctypes.c_char_p
    assert run(grid, seed, pointers) == b""


class Step:
    """The rows of a step, and before them the codes of the units of one."""

    def __init__(self, rows: int, units: int = 0) -> None:
        self._codes = 8 * units
        self._memory = Memory(self._codes + rows * ROW.itemsize, -self._codes % Memory.MARGIN)
        self.rows = self._memory.address + self._codes
        self.codes = self._memory.address

    def decoded(self) -> Rows:
        self._memory.view(np.uint8)
        found = HostRows()
        for _ in range(2):  # reading changes nothing
            found = HostRows()
            found.add_compacted(self.rows, (self._memory.bytes.size - self._codes) // ROW.itemsize)
        return found.decode()


def bits_of(rows: Rows) -> bytes:
    return b"".join([rows.columns.tobytes(), rows.counts.tobytes(), rows.buckets.tobytes(),
                     rows.units.tobytes()])  # fmt: skip


def assert_equals_oracle(
    rows: Rows, row: int, x: torch.Tensor, powers: int, unit_count: int = 0
) -> None:
    values = x.reshape(-1).double().numpy()
    expected = sketch_array(values)
    for name in (*COUNTS, *EXTREMES):
        np.testing.assert_array_equal(getattr(rows, name)[row], getattr(expected, name))
    assert rows.unit_count[row] == unit_count
    np.testing.assert_array_equal(rows.buckets[rows.span(row)], expected.buckets)
    np.testing.assert_array_equal(rows.counts[rows.span(row)], expected.counts)
    finite = values[np.isfinite(values)]
    for power, name in enumerate(POWER_SUMS, 1):
        with np.errstate(over="ignore"):
            magnitude = float((np.abs(finite) ** power).sum())
        got = getattr(rows, name)[row]
        if power > powers:
            assert np.isnan(got)
        elif np.isfinite(magnitude):
            assert abs(got - (finite**power).sum()) <= SUM_TOLERANCE * magnitude


def unit_extremes(x: torch.Tensor, units: int, inner: int) -> NDArray[np.float32]:
    values = x.reshape(-1, units, inner).double().numpy()
    with np.errstate(over="ignore"):
        both = np.stack([values.min((0, 2)), values.max((0, 2))], 1)
        return both.astype(np.float32)  # type: ignore[no-any-return]


# --- values ---------------------------------------------------------------------------------------

Maker = Callable[[np.random.Generator, int], NDArray[Any]]
KINDS: dict[str, Maker] = {
    "normal": lambda random, size: random.normal(size=size),
    "half zeros": lambda random, size: np.maximum(random.normal(size=size), 0),
    "1e-8": lambda random, size: random.normal(size=size) * 1e-8,
    "scales": lambda random, size: random.normal(size=size) * 10.0 ** random.uniform(-46, 38, size),
    "huge": lambda random, size: random.choice([3.4028235e38, -3.3959e38, 3.39e38], size),
    "constant": lambda random, size: np.full(size, 0.37),
    "negative zero": lambda random, size: np.full(size, -0.0),
    "NaN": lambda random, size: np.full(size, np.nan),
    "subnormal": lambda random, size: random.normal(size=size) * 1e-39,
    "infinite": lambda random, size: random.choice([np.inf, -np.inf, 1.0], size),
}
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 65504.0]


def make_values(
    kind: str, size: int, dtype: torch.dtype, seed: int, special: float
) -> torch.Tensor:
    """Values of a kind, some of which are replaced; or any bits at all."""
    random = np.random.default_rng(seed)
    if kind == "bits":
        bits = random.integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(bits).view(dtype)
    values = KINDS[kind](random, size)
    replaced = random.random(size) < special
    values = np.where(replaced, random.choice(SPECIAL, size), values)
    return torch.from_numpy(values).to(dtype)


kinds = st.sampled_from([*KINDS, "bits"])
shares = st.sampled_from([0.0, 0.0, 0.01, 0.5])
seeds = st.integers(0, 2**31 - 2)
offsets = st.integers(0, 15)
sizes = st.one_of(
    st.integers(1, 40),
    # Around a vector of each thread, and what one thread takes before the loop's first round.
    st.builds(
        lambda vectors, by: max(1, vectors * THREADS + by),
        st.sampled_from([2, 4, 8, 16, 24, 48]),
        st.integers(-2, 2),
    ),
    st.integers(1, 6000),
)


def check_measure(
    libraries: Libraries,
    variant: tuple[torch.dtype, int],
    axis: str,
    *,
    kind: str,
    special: float = 0.0,
    seed: int = 0,
    offset: int = 1,
    size: int = 1500,
    grid: int = 2,
    powers: int = 4,
    units: int = 12,
    inner: int = 7,
) -> None:
    """Measure twice, in different orders of threads and blocks, and compare with the oracle."""
    name, unit_count = f"measure_{powers}", 0
    if axis != "none":
        if axis == "wide":  # whole vectors
            units, offset = -(-units * variant[0].itemsize // 16) * 16 // variant[0].itemsize, 0
        name, unit_count = f"measure_{axis}_{powers}", units
        inner = inner if axis == "middle" else 1
        size = units * inner * max(1, size // (units * inner))
        grid = max(grid, -(-units // THREADS)) if axis != "middle" else grid
    x = make_values(kind, size, variant[0], seed, special)
    memory, results = tensor_memory(x, offset), []
    for order in (seed, seed + 1):
        step, partials = Step(1, units=unit_count), Memory(32 * grid)
        arguments = [memory, size, step.rows, partials, step.codes, units, inner]
        arguments = arguments[:4] if axis == "none" else arguments
        launch(libraries(*variant), name, arguments, grid=grid, seed=order, tensors=[memory])
        results.append(step.decoded())
        partials.view(np.float64)
    rows, again = results
    assert bits_of(rows) == bits_of(again)
    assert_equals_oracle(rows, 0, x, powers, unit_count)
    if unit_count:
        np.testing.assert_array_equal(rows.units, unit_extremes(x, units, inner))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("axis", ["none", "wide", "last", "middle"])
def test_emulated_measure_equals_the_oracle_in_any_order_of_threads(
    libraries: Libraries, variant: tuple[torch.dtype, int], axis: str
) -> None:
    @settings(max_examples=20)
    @given(
        kind=kinds,
        special=shares,
        seed=seeds,
        offset=offsets,
        size=sizes,
        grid=st.integers(1, 3),
        powers=st.sampled_from([2, 4]),
        units=st.one_of(st.integers(1, 12), st.sampled_from([16, 64, 130, 1100])),
        inner=st.one_of(st.integers(2, 10), st.sampled_from([16, 49, 200])),
    )
    def check(**drawn: Any) -> None:
        check_measure(libraries, variant, axis, **drawn)

    check()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_emulated_measure_of_each_kind_of_values_equals_the_oracle(
    libraries: Libraries, variant: tuple[torch.dtype, int]
) -> None:
    for kind in (*KINDS, "bits"):
        for axis in ("none", "wide", "last", "middle"):
            check_measure(libraries, variant, axis, kind=kind)


def chunk_table(memories: Sequence[Memory], itemsize: int, limit: int) -> NDArray[Any]:
    """Return every tensor in chunks of at most ``limit`` elements."""
    chunks = []
    for row, memory in enumerate(memories):
        size = memory.bytes.size // itemsize
        parts = -(-size // limit)
        for part in range(parts):
            start = part * limit
            address = memory.address + start * itemsize
            chunks.append((address, min(limit, size - start), row, part, parts))
    return np.array(chunks, CHUNK)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_emulated_measure_many_and_norms_equal_the_oracle_in_any_order(
    libraries: Libraries, variant: tuple[torch.dtype, int]
) -> None:
    tensor = st.tuples(kinds, shares, seeds, offsets, sizes)

    @settings(max_examples=15)
    @given(st.lists(tensor, min_size=1, max_size=6), st.integers(100, 3000), seeds)
    def check(drawn: list[tuple[str, float, int, int, int]], limit: int, seed: int) -> None:
        tensors = [
            make_values(kind, size, variant[0], seed, special)
            for kind, special, seed, offset, size in drawn
        ]
        memories = [tensor_memory(x, one[3]) for x, one in zip(tensors, drawn, strict=True)]
        table = chunk_table(memories, variant[0].itemsize, limit)
        chunks = Memory(table.nbytes)
        chunks.bytes[:] = table.view(np.uint8)
        found, norms_of = [], []
        for order in (seed, seed + 1):
            step, partials = Step(len(tensors)), Memory(32 * len(table))
            launch(libraries(*variant), "measure_many_4", [chunks, step.rows, partials],
                   grid=len(table), seed=order, tensors=memories)  # fmt: skip
            found.append(step.decoded())
            norms, partials = Memory(len(tensors) * NORM.itemsize), Memory(8 * len(table))
            launch(libraries(*variant), "norms", [chunks, norms, partials], grid=len(table),
                   seed=order, tensors=memories)  # fmt: skip
            norms_of.append(norms.view(NORM))
            partials.view(np.float64)
        assert norms_of[0].tobytes() == norms_of[1].tobytes()
        assert bits_of(found[0]) == bits_of(found[1])
        for i, x in enumerate(tensors):
            assert_equals_oracle(found[0], i, x, 4)
            magnitudes = np.abs(x.double().numpy())
            np.testing.assert_array_equal(norms_of[0][i]["largest"], magnitudes.max())
            with np.errstate(over="ignore", invalid="ignore"):
                np.testing.assert_allclose(
                    norms_of[0][i]["square"], (magnitudes**2).sum(), rtol=SUM_TOLERANCE, atol=0
                )

    check()


def test_sanitizers_report_nothing_for_the_kernels_and_their_readers() -> None:
    runtime = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    if not Path(runtime).is_file():
        pytest.skip("no sanitizer of addresses")
    # bfloat16 runs the code of float16, and sm_75 that of sm_80 without pairs.
    selected = "(equals_the_oracle or norms_equal) and not bfloat16 and not 750"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__, "-k", selected],
        env={
            **os.environ,
            "TELEMETRY_SANITIZERS": "-fsanitize=address,undefined -fno-sanitize-recover=all",
            "LD_PRELOAD": runtime,
            # A coroutine's stack is not what the sanitizer takes for the thread's.
            "ASAN_OPTIONS": "detect_leaks=0,detect_stack_use_after_return=0,handle_segv=0",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
