"""From a tensor on a GPU to its row, with a driver that is a stub: see stub_driver.c."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from telemetry.measure import Measurer, cuda, native, nvrtc
from telemetry.records import TensorRecord
from telemetry.torch_private import host_copy
from tests.helpers import simulated_gpu as gpu
from tests.helpers.simulated_gpu import on_gpu
from tests.helpers.stubbed import Driver, needs_stub

pytestmark = needs_stub

LAUNCHES = ("cuLaunchKernel",)
OUT_OF_MEMORY = (torch.cuda.OutOfMemoryError, MemoryError)


@pytest.fixture
def driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    driver = gpu.install_with_kernels(monkeypatch, tmp_path_factory.getbasetemp())
    assert cuda.gpu(0) is not None
    driver.forget()
    yield driver
    driver.fail("")
    driver.capturing = 0


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def on_host(tensor: Tensor, unit_axis: int | None = None, powers: int = 4) -> TensorRecord:
    # The stub describes every tensor as one of a GPU, so the values are read through NumPy.
    with pytest.MonkeyPatch.context() as patches:
        gpu.take_as_plain(patches, Tensor)
        patches.setattr(native, "TENSORS", None)
        patches.setattr(native, "sample_step", lambda count: 0)
        measurer = Measurer()
        measurer.add(
            tensor if tensor.dtype == torch.float64 else tensor.float(),
            unit_axis=unit_axis,
            powers=powers,
        )
        [record] = measurer.finish().reduce().values()
    return record


def assert_same(actual: TensorRecord, expected: TensorRecord) -> None:
    a, b = actual.sketch, expected.sketch
    counts = ("count", "zero_count", "nan_count", "positive_inf_count", "negative_inf_count")
    assert [getattr(a, name) for name in counts] == [getattr(b, name) for name in counts]
    extremes = [a.min, a.max], [b.min, b.max]
    np.testing.assert_array_equal(*extremes)
    np.testing.assert_allclose(a.sum_squares, b.sum_squares, rtol=1e-6)
    np.testing.assert_allclose(
        a.sum, b.sum, rtol=1e-6, atol=1e-6 * a.count * np.sqrt(b.sum_squares)
    )
    np.testing.assert_array_equal(a.buckets, b.buckets)
    np.testing.assert_array_equal(a.counts, b.counts)
    np.testing.assert_array_equal(actual.unit_min, expected.unit_min)
    np.testing.assert_array_equal(actual.unit_max, expected.unit_max)


def measured(*tensors: Tensor, **options: int | None) -> list[TensorRecord]:
    measurer = Measurer()
    for tensor in tensors:
        assert measurer.add(on_gpu(tensor), **options) is not None
    return [*measurer.finish().reduce().values()]


# --- measurements ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", nvrtc.DTYPES, ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_layouts_offsets_and_unit_axes_are_measured_as_on_the_host(
    driver: Driver, dtype: torch.dtype, axis: int | None
) -> None:
    whole = normal(4, 6, 5, 3).relu().to(dtype)
    whole[0, 2] = float("nan")
    views = [
        whole,
        whole.to(memory_format=torch.channels_last),
        whole.transpose(1, 3),
        whole[1:3],  # begins at an odd multiple of 2 or 4 bytes
        normal(31).to(dtype)[3:].view(7, 4),
    ]
    records = measured(*views, unit_axis=axis)
    assert sum("measure" in kernel for kernel in driver.counts().elements()) == len(views)
    for record, view in zip(records, views, strict=True):
        assert_same(record, on_host(view, axis))


@pytest.fixture
def by_operations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Tensors that no kernel takes; their own tests are in test_measure_device.py."""
    taken: list[object] = []
    monkeypatch.setattr(
        "telemetry.measure.device.DeviceRows.add", lambda rows, values, number: taken.append(values)
    )
    return taken


def test_tensors_that_kernels_cannot_read_are_measured_by_operations(
    driver: Driver, by_operations: list[object]
) -> None:
    others = [torch.arange(4), normal(3, 3).double(), torch.view_as_complex(normal(4, 2))]
    measurer = Measurer()
    for tensor in others:
        measurer.add(on_gpu(tensor))
    assert len(by_operations) == len(others)
    assert driver.calls(*LAUNCHES) == []
    assert measurer.add(on_gpu(torch.empty(0))) is not None


OTHER_LAYOUTS = {
    "slice": lambda: normal(6, 6)[:, ::2],
    "split": lambda: normal(6, 12).split(4, dim=1)[1],
    "expanded": lambda: normal(6, 1).expand(6, 3),
    "negated": lambda: torch.view_as_complex(normal(4, 2)).conj().imag.unsqueeze(1),
    "imaginary": lambda: torch.view_as_complex(normal(4, 2)).imag.unsqueeze(1),
    "bool": lambda: normal(6, 5) > 0,
    "bytes": lambda: torch.arange(40, dtype=torch.uint8).view(8, 5),
    "float8": lambda: normal(8, 5).to(torch.float8_e4m3fn),
    "bfloat16 slice": lambda: normal(9, 6).bfloat16()[1::2, 1:],
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_tensors_that_kernels_cannot_read_in_place_are_copied(
    driver: Driver, by_operations: list[object], layout: str, axis: int | None
) -> None:
    tensor = OTHER_LAYOUTS[layout]()
    [record] = measured(tensor, unit_axis=axis)
    assert len(driver.calls(*LAUNCHES)) == 1
    assert_same(record, on_host(tensor, axis))
    assert by_operations == []


def test_a_parameter_of_a_custom_class_is_measured_by_kernels(
    driver: Driver, by_operations: list[object]
) -> None:
    class OnGpuFlat(gpu.GpuTensor):
        """Tensor of a class unknown to the extension, like FSDP's FlatParameter."""

    tensors = [normal(10, 7), normal(5)]
    measurer = Measurer()
    assert measurer.add_all([OnGpuFlat(tensor) for tensor in tensors]) == [0, 1]
    records = measurer.finish().reduce()
    for number, tensor in enumerate(tensors):
        assert_same(records[number], on_host(tensor))
    assert by_operations == []


def test_a_kernel_receives_the_address_and_the_shape_of_the_tensor(driver: Driver) -> None:
    tensor = normal(100, 30)
    measured(tensor, unit_axis=0, powers=2)
    [call] = driver.calls(*LAUNCHES)[:1]
    assert call.kernel == b"measure_middle_2"
    assert call.size == 1  # block
    values, elements, _, _, _, units, inner = call.arguments[:7]
    assert (values, elements & 0xFFFFFFFF, units, inner) == (tensor.data_ptr(), 3000, 100, 30)


@pytest.mark.parametrize("units", [7, 8, 24, 1030, 4096])
@pytest.mark.parametrize("dtype", nvrtc.DTYPES, ids=str)
def test_units_that_fill_whole_vectors_use_the_wide_kernel(
    driver: Driver, dtype: torch.dtype, units: int
) -> None:
    tensor = normal(5, units).to(dtype)
    [record] = measured(tensor, unit_axis=1)
    assert_same(record, on_host(tensor, 1))
    kernel = "measure_last_4" if units % (16 // dtype.itemsize) else "measure_wide_4"
    assert driver.counts()[kernel] == 1
    flat = normal(units * 5 + 1).to(dtype)
    [record] = measured(flat[1:].view(5, units), unit_axis=1)
    assert_same(record, on_host(flat[1:].view(5, units), 1))


def test_a_tensor_of_2_31_elements_is_measured_by_operations(
    driver: Driver, by_operations: list[object]
) -> None:
    tensor = torch.empty(2**31 + 7, dtype=torch.bfloat16)  # virtual memory, never touched
    measurer = Measurer()
    assert measurer.add(on_gpu(tensor)) == 0
    assert driver.calls(*LAUNCHES) == []
    assert len(by_operations) == 1


def test_all_filled_buckets_are_copied_to_the_host(driver: Driver) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    tensor = torch.from_numpy(bits.view(np.float32))
    for record in measured(tensor, tensor):
        assert len(record.sketch.buckets) > 3000
        assert_same(record, on_host(tensor))


def test_many_tensors_are_one_launch_for_each_dtype(driver: Driver) -> None:
    shapes = [(7,), (200, 300), (2049,), (2048,), (1, 1), (40,)]
    tensors = [normal(*shape) for shape in shapes] + [normal(70_000).bfloat16(), normal(3).half()]
    others = [torch.arange(4), torch.empty(0)]
    everything = [*tensors[:3], *others, *tensors[3:]]
    measurer = Measurer()
    numbers = measurer.add_all([on_gpu(tensor) for tensor in everything], powers=2)
    counts = driver.counts()
    assert (counts["measure_many_2"], counts["measure_2"]) == (3, 0)
    records = measurer.finish().reduce()
    assert sorted(numbers) == list(range(len(everything)))
    for tensor, number in zip(everything, numbers, strict=True):
        assert_same(records[number], on_host(tensor, powers=2))


def test_addresses_are_uploaded_when_they_or_the_stream_change(driver: Driver) -> None:
    tensors = [on_gpu(normal(size)) for size in (3, 70, 5_000)]
    for _ in range(3):
        first = cuda.norms(tensors)
    assert len(driver.uploads) == 1
    others = [tensors[1], tensors[0], tensors[2]]
    second = cuda.norms(others)
    assert len(driver.uploads) == 2
    assert first is not None
    assert second is not None
    assert second.cpu().equal(first.cpu()[:, [1, 0, 2]])
    with on_stream():  # the upload is not ordered before its work
        cuda.norms(others)
    assert len(driver.uploads) == 3


def test_norms_of_many_tensors_are_one_launch_for_each_dtype(driver: Driver) -> None:
    tensors = [normal(70_000), normal(5, 5).bfloat16(), normal(3) * 1e30, torch.zeros(4)]
    tensors += [torch.tensor([1.0, float("inf")]), torch.tensor([float("nan"), float("inf")])]
    found = cuda.norms([on_gpu(tensor) for tensor in tensors])
    assert driver.counts()["norms"] == 2
    wide = [tensor.double() for tensor in tensors]
    expected = torch.tensor([[t.norm() for t in wide], [t.abs().max() for t in wide]])
    assert found is not None
    torch.testing.assert_close(found.cpu(), expected.double(), rtol=1e-6, atol=0, equal_nan=True)
    assert cuda.norms([on_gpu(normal(3)), on_gpu(torch.arange(3))]) is None


def test_norms_are_left_to_operations_after_a_driver_error(driver: Driver) -> None:
    driver.fail("cuLaunchKernel")
    with pytest.raises(RuntimeError):
        cuda.norms([on_gpu(normal(3))])
    assert cuda.gpu(0) is None
    assert cuda.norms([on_gpu(normal(3))]) is None


# --- buffers -------------------------------------------------------------------------------------


@contextmanager
def on_stream() -> Iterator[int]:
    """Continue on a new stream, after all work of the current one; its handle."""
    stream = gpu.Stream()
    stream.wait_stream(gpu.current_stream())
    with gpu.use_stream(stream):
        yield stream.cuda_stream


def test_a_step_is_one_memset_and_one_copy(driver: Driver) -> None:
    measurer = Measurer()
    for _ in range(3):
        driver.forget()
        gpu.operations.clear()
        gpu.transfers.clear()
        for _ in range(5):
            measurer.add(on_gpu(normal(10, 3)), unit_axis=0)
        measurer.finish().reduce()
        assert gpu.operations["zero_"] == len(gpu.transfers) == 1
        assert driver.counts()["measure_middle_4"] == 5


def test_one_buffer_is_used_for_all_steps_and_only_reading_synchronizes(driver: Driver) -> None:
    measurer = Measurer()
    steps = []
    for number in range(4):
        measurer.add(on_gpu(torch.full((3,), float(number))))
        steps.append(measurer.finish())
    rows = [call.arguments[2] for call in driver.calls(*LAUNCHES) if call.kernel == b"measure_4"]
    assert len(rows) == 4
    assert len({*rows}) == 1
    assert len(gpu.on_the_way) == 4
    assert [step.reduce()[0].sketch.sum for step in reversed(steps)] == [9, 6, 3, 0]


def test_rows_beyond_one_buffer_are_copied_in_several(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "BUFFER_BYTES", 2**17)
    monkeypatch.setattr(cuda, "_LEAST_BYTES", 2**17)
    monkeypatch.setattr(cuda, "_gpus", {})
    tensors = [torch.full((5, number % 3 + 1), float(number)) for number in range(20)]
    measurer = Measurer()
    for tensor in tensors[:10]:
        measurer.add(on_gpu(tensor), unit_axis=1)
    measurer.add_all([on_gpu(tensor) for tensor in tensors[10:]])
    records = measurer.finish().reduce()
    assert len(gpu.transfers) > 2
    for number, tensor in enumerate(tensors):
        assert_same(records[number], on_host(tensor, 1 if number < 10 else None))


@pytest.mark.parametrize("places", [(0, 1, 2), (0, 0, 1)])
def test_buffers_are_copied_after_the_work_of_all_streams(
    driver: Driver, places: tuple[int, ...]
) -> None:
    measurer, steps, streams = Measurer(), [], [gpu.Stream() for _ in range(3)]
    tensors = [normal(40, 5), normal(300), normal(9, 9)]
    for _ in range(5):
        for place, tensor in zip(places, tensors, strict=True):
            with gpu.use_stream(streams[place]):
                measurer.add(on_gpu(tensor), unit_axis=0)
        with gpu.use_stream(streams[places[-1]]):
            measurer.add_all([on_gpu(tensor) for tensor in tensors])
            steps.append(measurer.finish())
        launches = [call.stream for call in driver.calls(*LAUNCHES)][-4:]
        assert launches == [streams[place].cuda_stream for place in (*places, places[-1])]
    for step in reversed(steps):
        records = step.reduce()
        for number, tensor in enumerate(tensors):
            assert_same(records[number], on_host(tensor, 0))
            assert_same(records[3 + number], on_host(tensor))


def test_concurrent_steps_have_separate_buffers_up_to_a_limit(driver: Driver) -> None:
    measurers = [Measurer() for _ in range(cuda.BUFFERS + 1)]
    for _ in range(2):
        for number, measurer in enumerate(measurers):
            measurer.add(on_gpu(torch.full((3,), float(number))))
    assert driver.counts()["measure_4"] == 2 * cuda.BUFFERS  # operations measure the rest
    for number, measurer in enumerate(measurers):
        records = measurer.finish().reduce()
        assert [record.sketch.sum for record in records.values()] == [3 * number, 3 * number]


def test_the_buffer_of_an_abandoned_step_is_cleared_and_reused(driver: Driver) -> None:
    for _ in range(5):
        measurer = Measurer()
        measurer.add(on_gpu(normal(100)))
        del measurer
    assert_same(*measured(normal(10)), on_host(normal(10)))
    assert len(cuda.gpu(0)._buffers) == 1  # type: ignore[union-attr]


def test_the_buffer_of_an_abandoned_step_is_cleared_for_other_streams(driver: Driver) -> None:
    abandoned, streams = normal(100, 3), [gpu.Stream() for _ in range(3)]
    for place in (0, 1, 2, 0):
        with gpu.use_stream(streams[place]):
            Measurer().add(on_gpu(abandoned), unit_axis=1)
    measurer, tensor = Measurer(), normal(10, 4)
    with gpu.use_stream(gpu.Stream()):
        measurer.add(on_gpu(tensor), unit_axis=1)
    with gpu.use_stream(gpu.Stream()):
        measurements = measurer.finish()
    assert_same(measurements.reduce()[0], on_host(tensor, 1))


# --- errors ------------------------------------------------------------------------------------


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "telemetry"]


def test_a_driver_error_is_raised_once_and_operations_measure_afterwards(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "telemetry")
    measurer, tensor = Measurer(), on_gpu(normal(10))
    driver.fail("cuLaunchKernel", 700)
    with pytest.raises(RuntimeError, match=r"CUDA, to .*: error 700, stub 700"):
        measurer.add(tensor)
    assert len(messages(caplog)) == 1
    assert cuda.gpu(0) is None
    driver.forget()
    again = Measurer()
    again.add(tensor)
    assert_same(again.finish().reduce()[0], on_host(normal(10)))
    assert driver.calls() == []


def test_measurements_before_an_error_are_kept(driver: Driver) -> None:
    measurer, tensors = Measurer(), [normal(10), normal(20), normal(30), normal(40)]
    assert measurer.add(on_gpu(tensors[0])) == 0
    driver.fail("cuLaunchKernel")
    with pytest.raises(RuntimeError):
        measurer.add_all([on_gpu(tensor) for tensor in tensors[1:3]])
    driver.fail("")
    assert measurer.add(on_gpu(tensors[3])) == 1
    [rows] = measurer._step.gpus.values()
    rows.send()
    assert len(rows.decode()) == len(rows.numbers)
    assert rows.numbers == [0, -1, -1]
    records = measurer.finish().reduce()
    assert_same(records[0], on_host(tensors[0]))
    assert_same(records[1], on_host(tensors[3]))


def test_nothing_is_launched_on_a_stream_that_is_captured(driver: Driver) -> None:
    driver.capturing = 1
    rows = cuda.GpuRows(cuda.gpu(0))  # type: ignore[arg-type]
    tensors = [on_gpu(normal(10)), on_gpu(normal(20))]
    for stream in (gpu.default_stream, gpu.Stream()):
        with gpu.use_stream(stream):
            assert not rows.add(tensors[0], None, 4, 0)
            assert rows.add_all(tensors, 4, 0) == [False, False]
    assert rows.send() == 0
    assert driver.calls() == []


def test_a_step_that_ends_in_a_capture_is_lost_and_the_next_measured(driver: Driver) -> None:
    measurer = Measurer()
    measurer.add(on_gpu(normal(20)))
    driver.capturing = 1
    driver.forget()
    with pytest.raises(RuntimeError, match="captured by a CUDA graph"):
        measurer.finish()
    assert driver.calls() == []
    driver.capturing = 0
    assert_same(*measured(normal(10)), on_host(normal(10)))


GLOBAL, THREAD_LOCAL, RELAXED = range(3)


def test_calls_do_not_invalidate_a_capture_by_another_thread(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub refuses all calls in the default mode, in which they invalidate that capture."""
    monkeypatch.setattr(host_copy, "DRIVER", driver.path)
    host_copy._exchange_capture_mode.cache_clear()
    modes: list[int] = []

    class Event:
        def synchronize(self) -> None:
            modes.append(driver.capture_mode(RELAXED))

    for before in (GLOBAL, THREAD_LOCAL):
        driver.capture_mode(before)
        assert_same(*measured(normal(10)), on_host(normal(10)))
        copy = host_copy.HostCopy(normal(3))
        copy._event = Event()  # type: ignore[assignment]
        copy.wait()
        assert modes.pop() == RELAXED
        assert driver.capture_mode(GLOBAL) == before
    host_copy._exchange_capture_mode.cache_clear()


def test_operations_measure_after_smaller_buffers_were_tried_without_memory(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[int] = []

    def refuse(size: int, index: int) -> Tensor:
        requested.append(size)
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(cuda, "_gpus", {})
    monkeypatch.setattr(cuda, "_device_memory", refuse)
    measurer = Measurer()
    for _ in range(3):
        measurer.add(on_gpu(normal(10)))
    assert_same(measurer.finish().reduce()[0], on_host(normal(10)))
    assert requested == sorted(requested, reverse=True)
    assert len(requested) == 3


NO_KERNELS = {
    "TELEMETRY_NATIVE is 0": lambda p: p.setattr(cuda, "_missing", "TELEMETRY_NATIVE is 0"),
    "ROCm": lambda p: p.setattr(torch.version, "hip", "6.2"),
    "capability 7.0": lambda p: p.setattr(torch.cuda, "get_device_capability", lambda i: (7, 0)),
    "NVRTC was not found": lambda p: p.setattr(nvrtc, "compile_kernels", _no_nvrtc),
    "cannot be loaded": lambda p: p.setattr(cuda, "_DRIVER", "/nowhere/libcuda.so.1"),
    "libm.so.6 has no cu": lambda p: p.setattr(cuda, "_DRIVER", "libm.so.6"),
}


def _no_nvrtc(*arguments: object) -> None:
    raise nvrtc.NvrtcError("NVRTC was not found: none")


@pytest.mark.parametrize("reason", NO_KERNELS)
def test_operations_measure_where_kernels_cannot(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    caplog.set_level(logging.INFO, "telemetry")
    monkeypatch.setattr(cuda, "_gpus", {})
    NO_KERNELS[reason](monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    measurer = Measurer()
    measurer.add(on_gpu(normal(10)))
    assert "GPU 0: PyTorch, because " in cuda.native
    assert reason in cuda.native
    assert_same(measurer.finish().reduce()[0], on_host(normal(10)))
    assert driver.calls(*LAUNCHES) == []
    assert [record.levelname for record in caplog.records if record.name == "telemetry"] == [
        "WARNING"
    ]


def test_the_measuring_backend_is_named_without_initializing_cuda(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cuda.native == native.native
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    named = f"{native.native}; GPU 0: CUDA kernels; GPU 1: no logger has used it in this process"
    assert cuda.native == named
    assert driver.calls() == []
    assert list(cuda._gpus) == [0]


# --- out of memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["_uploaded", "HostCopy", "cuLaunchKernel", "norms"])
def test_a_step_without_memory_is_skipped_and_the_next_measured(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    tensors = [on_gpu(normal(10)), on_gpu(normal(20))]

    def refuse(*arguments: object) -> Tensor:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patches, pytest.raises(OUT_OF_MEMORY):  # noqa: PT012
        if failing == "cuLaunchKernel":
            driver.fail(failing, 2)
        elif failing == "norms":
            patches.setattr(cuda, "_device_memory", refuse)
        else:
            patches.setattr(cuda, failing, refuse)
        measurer = Measurer()
        if failing == "norms":
            cuda.norms(tensors)
        measurer.add_all(tensors)
        measurer.finish()
    driver.fail("")
    del measurer
    for _ in range(cuda.BUFFERS + 1):
        assert_same(*measured(normal(10)), on_host(normal(10)))
        assert cuda.norms(tensors) is not None
    assert len(cuda.gpu(0)._buffers) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("failing", ["table", "launch"])
def test_the_first_tensor_after_an_out_of_memory_error_is_measured_correctly(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    measurer, tensors = Measurer(), [normal(10), normal(20), normal(30)]
    measurer.add(on_gpu(tensors[0]))

    def refuse(*arguments: object) -> Tensor:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patches, pytest.raises(OUT_OF_MEMORY):  # noqa: PT012
        if failing == "table":
            patches.setattr(cuda, "_uploaded", refuse)
            measurer.add_all([on_gpu(tensor) for tensor in tensors])
        else:
            driver.fail("cuLaunchKernel", 2)
            measurer.add(on_gpu(tensors[1]))
    driver.fail("")
    numbers = measurer.add_all([on_gpu(tensor) for tensor in tensors[1:]])
    records = measurer.finish().reduce()
    assert len(records) == 3
    for number, tensor in zip([0, *numbers], tensors, strict=True):
        assert number is not None
        assert_same(records[number], on_host(tensor))


def test_memory_for_a_buffer_is_requested_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int, index: int) -> Tensor:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(cuda, "_gpus", {})
    with monkeypatch.context() as patches:
        patches.setattr(cuda, "_device_memory", refuse)
        measured(normal(10))
        assert driver.calls(*LAUNCHES) == []
    measured(normal(10))
    assert driver.calls(*LAUNCHES) == []
    monkeypatch.setattr(cuda.gpu(0), "_retry_at", 1.0)  # long ago
    assert_same(*measured(normal(10)), on_host(normal(10)))
    assert len(driver.calls(*LAUNCHES)) == 1


def test_a_step_may_use_40_streams(driver: Driver) -> None:
    measurer = Measurer()
    for number in range(40):
        with on_stream():
            measurer.add(on_gpu(torch.full((3,), float(number))))
    records = measurer.finish().reduce()
    assert [record.sketch.sum for record in records.values()] == [3 * n for n in range(40)]


# --- older versions of PyTorch --------------------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0, 1, -1, 7])
def test_tensors_that_pytorch_does_not_describe_to_c_are_described_in_python(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, axis: int | None
) -> None:
    described = {}
    views = [
        normal(4, 6, 5, 3),
        normal(4, 6, 5, 3).to(memory_format=torch.channels_last),
        normal(4, 6).bfloat16().t(),
        normal(31)[3:].view(7, 4),
        normal(5, 2, 3).half(),
        normal(6, 6)[:, ::2],
        torch.arange(6.0).double().view(2, 3),
        torch.arange(6).view(2, 3),
        torch.empty(0, 3),
    ]
    for exchange in (native.TENSORS, None):
        monkeypatch.setattr(native, "TENSORS", exchange)
        monkeypatch.setattr(cuda, "_gpus", {})
        rows = cuda.GpuRows(cuda.gpu(0))  # type: ignore[arg-type]
        driver.forget()
        taken = [rows.add(on_gpu(view), axis, 4, 0) for view in views]
        calls = driver.calls(*LAUNCHES)
        described[exchange is None] = (
            taken,
            [(call.kernel, call.arguments[0], call.arguments[1]) for call in calls],
            [call.arguments[5:7] for call in calls] if axis is not None else [],
        )
        assert cuda.norms([on_gpu(view) for view in views[:4]]) is not None
    assert described[True] == described[False]
    assert any(described[True][0]) == (axis != 7)
