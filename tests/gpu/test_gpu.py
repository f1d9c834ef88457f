"""On a GPU: training is unchanged to the bit and never blocked, and statistics equal NumPy's.

PyTorch's synchronisation debug mode raises where PyTorch would make the host wait for the device,
and a device that sleeps shows any other wait. A simulated GPU runs the same loops where there is
none, see ``test_simulated_gpu.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from telemetry import HookLogger
from telemetry.measure import Measurer
from telemetry.measure.tensors import WORKING_DTYPE
from telemetry.records import TensorRecord
from telemetry.torch_private.compiler import GRAPHS_CAN_BE_OBSERVED
from telemetry.torch_private.host_copy import HostCopy
from tests.helpers.device_loops import (
    LOOPS,
    guarded,
    loss_of,
    mlp,
    plain,
    scaled,
    skip_no_steps,
    step_of,
)
from tests.helpers.device_tensors import COUNT, LAYOUTS, VALUES, assert_measured, made
from tests.helpers.twins import Loop, assert_left_alone, run
from tests.unit.run.test_logger import small_cnn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    # Of a thread of autograd's whose first work is a product of matrices.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

DEVICE = "cuda"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SECOND = 2_000_000_000  # cycles, about


@contextlib.contextmanager
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    skip_no_steps(monkeypatch)


# --- training ------------------------------------------------------------------------------------


def on_two_streams(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    """Each micro-batch on its own stream; the optimizer's waits for both."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    main, streams = torch.cuda.current_stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(3):
        optimizer.zero_grad()
        for stream in streams:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                # A graph that were kept would be the stream's for the next micro-batch, too.
                loss = step_of(model).detach()
            main.wait_stream(stream)
            loss.record_stream(main)
            yield loss
        optimizer.step()


def in_bfloat16(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = loss_of(model, 1, 8, 8)
        loss.backward()
        optimizer.step()
        yield loss


def channels_last() -> nn.Module:
    return small_cnn().to(memory_format=torch.channels_last)


GPU_LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    **LOOPS,
    "autocast and GradScaler": (mlp, partial(scaled, autocast=True)),
    "fused optimizer with GradScaler": (mlp, partial(scaled, autocast=True, fused=True)),
    "bfloat16, channels_last": (channels_last, in_bfloat16),
    "two streams": (mlp, on_two_streams),
}


def moved(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().to(DEVICE)


def with_generator(loop: Loop) -> Loop:
    """The same loop, which at its end also yields the state of the GPU's random numbers."""

    def run(model: nn.Module, logger: HookLogger | None) -> Iterator[object]:
        yield from loop(model, logger)
        yield torch.cuda.get_rng_state()

    return run


def warnings_of_ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "telemetry"]


@pytest.mark.parametrize("name", GPU_LOOPS)
@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_training_is_left_alone_and_never_synchronizes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, every_n_steps: int
) -> None:
    make, loop = GPU_LOOPS[name]
    loop = guarded(with_generator(loop), no_syncs)
    outcome = assert_left_alone(moved(make), loop, tmp_path, every_n_steps=every_n_steps)
    assert warnings_of_ours(caplog) == []
    for record in outcome.full:
        assert record.grads
        assert all(tensor.sketch.count for tensor in record.activations.values())


@pytest.mark.parametrize("every_n_steps", [1, 1000])
def test_a_step_ends_before_the_device_starts_it(tmp_path: Path, every_n_steps: int) -> None:
    # Small enough for the device's queue: a launch blocks when the queue is full.
    model = nn.Linear(4, 2).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, started = torch.rand(8, 4, device=DEVICE), torch.cuda.Event()

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    with HookLogger(model, tmp_path, every_n_steps=every_n_steps) as logger:
        for _ in range(3):  # one-time loading and allocation may block
            step()
            logger.flush()
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * SECOND)
        started.record()
        step()
        assert not started.query()


@pytest.mark.filterwarnings("ignore")  # the compiler's
def test_a_compiled_model_is_left_alone_and_never_synchronizes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before PyTorch 2.13, compiled graphs show no activations, and one message reports it."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        torch.compiler.reset()  # its code does not check whether modules have new hooks
        model.compile()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            # The compiler itself may wait.
            with no_syncs() if number > 1 else contextlib.nullcontext():
                optimizer.zero_grad()
                loss = step_of(model)
                optimizer.step()
            yield loss

    outcome = assert_left_alone(moved(mlp), loop, tmp_path)
    warnings = warnings_of_ours(caplog)
    assert all(record.grads for record in outcome.full)
    assert all(bool(record.activations) == GRAPHS_CAN_BE_OBSERVED for record in outcome.full)
    assert len(warnings) == (not GRAPHS_CAN_BE_OBSERVED)
    assert all("cannot show what happens inside" in warning for warning in warnings)


@pytest.mark.filterwarnings("ignore")  # the profiler's
def test_a_full_step_copies_to_the_host_twice_at_most(tmp_path: Path) -> None:
    """One copy of the tensors' rows and one of everything else."""

    def quiet(model: nn.Module, logger: HookLogger | None) -> Iterable[object]:
        return plain(model, None)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        outcome = run(moved(mlp), quiet, tmp_path)
        torch.cuda.synchronize()
    copies = [event for event in profile.events() if "DtoH" in event.name]
    assert 0 < len(outcome.full) <= len(copies) <= 2 * len(outcome.full)


def test_a_step_in_a_captured_graph_is_left_alone(tmp_path: Path) -> None:
    """The captured step is not measured, and the capture contains no work of the logger."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, graph = torch.rand(8, 4, device=DEVICE), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        if logger is not None:
            logger.flush()
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            if logger is not None:
                with pytest.raises(RuntimeError, match="log it after the graph was replayed"):
                    logger.log(loss=loss)
        for _ in range(3):
            graph.replay()
            yield loss

    outcome = assert_left_alone(moved(mlp), loop, tmp_path)
    first, *_, last = outcome.yielded
    assert last < first
    assert [record.step for record in outcome.full if record.activations] == [0, 1, 2]


def test_a_graph_capture_stays_valid_while_another_thread_waits_for_measurements() -> None:
    """An event query by another thread would invalidate a capture in the default mode."""
    tensor, measurer, graph = torch.ones(1000, device=DEVICE), Measurer(), torch.cuda.CUDAGraph()
    (tensor * 2).sum()  # one-time loading and allocation may block
    measurer.add(tensor)
    measurements, copy = measurer.finish(), HostCopy(tensor)
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        doubled = (tensor * 2).sum()
        record = pool.submit(measurements.reduce).result()[0]
        copied = pool.submit(copy.wait).result()
    graph.replay()
    assert (record.sketch.sum, copied.sum(), doubled.item()) == (1000, 1000, 2000)


def test_feature_maps_and_filters_of_a_network_are_recorded(tmp_path: Path) -> None:
    outcome = run(moved(small_cnn), LOOPS["CNN"][1], tmp_path)
    assert all(record.feature_maps and record.filters for record in outcome.full)


@pytest.mark.parametrize("make", [small_cnn, channels_last])
@pytest.mark.parametrize("autocast", FLOATS, ids=str)
def test_statistics_equal_those_of_plain_hooks(
    tmp_path: Path, make: Callable[[], nn.Module], autocast: torch.dtype
) -> None:
    seen: dict[str, Tensor] = {}

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        def keep(key: str, values: Tensor) -> None:
            seen[key] = values.detach().clone()

        def observe(module: nn.Module, args: object, output: Tensor, *, name: str) -> None:
            keep(f"activations {name}", output)
            output.register_hook(partial(keep, f"activation_grads {name}"))

        for name, module in model.named_children():
            module.register_forward_hook(partial(observe, name=name))
        with torch.autocast(DEVICE, autocast, enabled=autocast is not torch.float32):
            loss = loss_of(model, 1, 8, 8)
        loss.backward()
        for name, parameter in model.named_parameters():
            keep(f"weights {name}", parameter)
            keep(f"grads {name}", parameter.grad)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        yield loss

    [record] = run(moved(make), loop, tmp_path).full
    measured = 0
    for kind in ("activations", "activation_grads", "weights", "grads"):
        for name, tensor in getattr(record, kind).items():
            axis, powers = (1, 4) if kind == "activations" else (None, 2)
            assert_measured(tensor, seen[f"{kind} {name}"], axis, powers=powers)
            measured += 1
    assert measured == len(seen) == 6 + 6 + 6 + 6


# --- measuring -----------------------------------------------------------------------------------


def measure(tensors: Iterable[Tensor], axis: int | None = None) -> list[TensorRecord]:
    """Rows of tensors on a GPU, measured without synchronization."""
    measurer = Measurer()
    with no_syncs():
        for tensor in tensors:
            assert measurer.add(tensor, unit_axis=axis) is not None
        measurements = measurer.finish()
    return list(measurements.reduce().values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_statistics_equal_those_of_numpy(dtype: torch.dtype, values: str, layout: str) -> None:
    view, axis = LAYOUTS[layout]
    tensor = view(made(dtype, values).to(DEVICE))
    [record] = measure([tensor], axis)
    assert_measured(record, tensor, axis)


@pytest.mark.parametrize("layout", ["flat", "not aligned", "64 units last", "units in the middle"])
@pytest.mark.parametrize("dtype", WORKING_DTYPE, ids=str)
@pytest.mark.filterwarnings("ignore:.*support is experimental:UserWarning")
def test_every_dtype_is_measured(dtype: torch.dtype, layout: str) -> None:
    view, axis = LAYOUTS[layout]
    tensor = view(made(dtype, "mixed scales").to(DEVICE))
    [record] = measure([tensor], axis)
    assert_measured(record, view(made(dtype, "mixed scales")), axis)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_16_bit_pattern_is_measured(dtype: torch.dtype) -> None:
    """Include the upper half of a float32 number with any lower half: the edge of a bucket."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype is torch.float32:
        halves = [(bits << 16) + lower for lower in (0, 0x7FFF, 0x8000, 0x8001)]
        tensor = torch.cat(halves).view(dtype)
    else:
        tensor = bits.to(torch.int16).view(dtype)
    [record, shuffled] = measure(
        [tensor.to(DEVICE), tensor[torch.randperm(len(tensor))].to(DEVICE)]
    )
    assert_measured(record, tensor)
    assert_measured(shuffled, tensor)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_tensors_are_measured_to_the_same_bits_each_time(
    dtype: torch.dtype, deterministic: bool
) -> None:
    normal = torch.randn(5_000_003).mul(3).relu().sub(0.25).to(dtype).to(DEVICE)
    cases = [
        (normal, None),
        (normal[: 1_000 * 5_000].view(1_000, 5_000), 1),
        (normal[: 8 * 60 * 100 * 100].view(8, 60, 100, 100), 1),
    ]
    torch.use_deterministic_algorithms(deterministic)
    try:
        for tensor, axis in cases:
            first, second = measure([tensor, tensor], axis), measure([tensor], axis)
            assert_measured(first[0], tensor, axis)
            for other in (first[1], second[0]):
                assert_same_bits(first[0], other)
    finally:
        torch.use_deterministic_algorithms(False)


def assert_same_bits(record: TensorRecord, other: TensorRecord) -> None:
    for field in fields(record.sketch):
        one, two = getattr(record.sketch, field.name), getattr(other.sketch, field.name)
        np.testing.assert_array_equal(one, two, err_msg=field.name)
    np.testing.assert_array_equal(record.unit_min, other.unit_min)
    np.testing.assert_array_equal(record.unit_max, other.unit_max)


def test_many_tensors_of_any_size_and_dtype_are_measured_at_once() -> None:
    sizes = [int(size) for size in np.geomspace(1, COUNT, 400)]
    tensors = [made(FLOATS[n % 3], "ordinary")[:size] for n, size in enumerate(sizes)]
    on_device, measurer = [tensor.to(DEVICE) for tensor in tensors], Measurer()
    with no_syncs():
        places = measurer.add_all(on_device)
        measurements = measurer.finish()
    assert places == list(range(len(tensors)))
    for record, tensor in zip(measurements.reduce().values(), tensors, strict=True):
        assert_measured(record, tensor)


def test_a_tensor_with_more_elements_than_32_bits_count_is_measured() -> None:
    shape = (1 << 16, 257, 1 << 8)
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("takes 9 GB of the device's memory")
    tensor = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    tensor[-1, -1, -1] = 2
    [record] = measure([tensor], 1)
    sketch, count = record.sketch, tensor.numel()
    assert (sketch.count, sketch.zero_count, sketch.sum, sketch.max) == (count, count - 1, 2, 2)
    assert sketch.counts.tolist() == [count - 1, 1]
    assert record.unit_max is not None
    assert record.unit_max.tolist() == [0] * 256 + [2]


def test_an_uncoalesced_sparse_tensor_is_not_measured_and_does_not_synchronize() -> None:
    indices = [[0, 0, 3]]
    tensor = torch.sparse_coo_tensor(indices, [1.0, 2.0, 4.0], (5,), check_invariants=True)
    on_device, measurer = tensor.to(DEVICE), Measurer()
    with no_syncs():
        assert measurer.add(on_device) is None
    [record] = measure([on_device.coalesce()])
    assert_measured(record, tensor.to_dense())


def test_a_tensor_is_measured_with_its_values_at_the_call() -> None:
    tensor, measurer = torch.ones(1 << 20, device=DEVICE), Measurer()
    measurer.add(tensor)
    measurer.finish().reduce()  # one-time loading and allocation may block
    torch.cuda._sleep(SECOND // 10)
    with no_syncs():
        measurer.add(tensor)
        tensor.zero_()
        del tensor  # its memory is given to the next
        other = torch.full((1 << 20,), 3.0, device=DEVICE)
        measurements = measurer.finish()
    [record] = measurements.reduce().values()
    assert (record.sketch.min, record.sketch.sum) == (1, other.numel())


def test_tensors_of_several_streams_are_measured() -> None:
    measurer = Measurer()
    streams = [torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()]
    with no_syncs():
        for number, stream in enumerate(streams, start=1):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SECOND // 20 * number)  # the others come too early if they do
                measurer.add(torch.full((5, 5), float(number), device=DEVICE), unit_axis=1)
                torch.full((5, 5), -1.0, device=DEVICE)
        measurements = measurer.finish()
    records = measurements.reduce().values()
    assert [record.sketch.sum for record in records] == [25, 50, 75]


def test_tensors_of_several_gpus_are_measured() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensors = [torch.arange(100_000.0, device=f"cuda:{index % 2}") + index for index in range(4)]
    with torch.cuda.device(0):
        records = measure(tensors)
        copy = HostCopy(tensors[1])
    for record, tensor in zip(records, tensors, strict=True):
        assert_measured(record, tensor)
    assert copy.wait().equal(tensors[1].cpu())


def test_a_host_copy_has_the_values_at_the_call() -> None:
    tensor = torch.ones(1 << 20, device=DEVICE)
    torch.cuda._sleep(SECOND // 20)  # the device is behind
    with no_syncs():
        copy = HostCopy(tensor)
        tensor.zero_()
    assert copy.wait().sum() == 1 << 20
    assert copy.wait().is_pinned()
